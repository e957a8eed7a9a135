"""Loads GR00T N1.5's network cases and builds tiny policies of it (test/cases/README.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from network_cases import (
    ReferenceCase,
    batch_entries,
    network_case_paths,
    our_weights,
    vision_of_case,
)
from safetensors.torch import load_file
from torch import Tensor

from vla_runtime.families import build_network
from vla_runtime.families.blocks.dimensions import DecoderDims
from vla_runtime.families.groot.dimensions import GrootDims, StackDims
from vla_runtime.families.groot.n15 import GrootN15
from vla_runtime.families.groot.tensor_names import NAMES, SLICED

FAMILY = 'groot_n15'


@dataclass(frozen=True)
class GrootCase(ReferenceCase):
    """One batch entry of a case, and our network with its embodiment's weights.

    Attributes:
        b: the batch entry.
        valid: tokens of the sequence that are there, (P,) bool.
    """

    network: GrootN15
    b: int
    valid: Tensor

    @property
    def pixels(self) -> Tensor:
        """Pixels (V, 3, S, S); the case has them sample by sample."""
        cameras = self.description['cameras']
        return self.tensors['pixel_values'][self.b * cameras : (self.b + 1) * cameras]

    @property
    def visible(self) -> Tensor:
        """A mask (V,) that hides no camera."""
        return torch.ones(self.description['cameras'], dtype=torch.bool)

    def rows(self) -> dict[str, Tensor]:
        """Inputs of the prefix: the text tokens, padding moved behind the text."""
        ids = self.tensors['input_ids'][self.b]
        text = ids[self.valid & (ids != self.description['image_token'])]
        tokens = torch.zeros(1, self.network.dims.prompt_length, dtype=torch.int64)
        tokens[0, : len(text)] = text
        return {'tokens': tokens, 'token_mask': torch.arange(tokens.shape[1])[None] < len(text)}

    def state(self) -> dict[str, Tensor]:
        """Input of the head."""
        return {'state': self.tensors['state'][self.b].view(1, -1)}

    def prefix(self) -> Mapping[str, Tensor]:
        """Outputs of the prefix network."""
        return self.network.prefix(self.network.vision(self.pixels), self.visible, **self.rows())


def image_places(ids: Sequence[int], d: Mapping[str, Any]) -> tuple[int, ...]:
    """Text tokens before each image of a sequence without padding."""
    text, places = 0, []
    for before, token in zip((None, *ids), ids, strict=False):
        if token != d['image_token']:
            text += 1
        elif before == d['image_start_token']:
            places.append(text)
    return tuple(places)


def dims_of_case(d: Mapping[str, Any], ids: Sequence[int], length: int) -> GrootDims:
    """Our dimensions of a case's description.

    Args:
        d: the description.
        ids: the sequence of one batch entry, without padding.
        length: text tokens of the padded prompt.
    """
    # What no policy changes is a constant of the networks.
    assert (d['v_eps'], d['buckets'], d['vision_select_layer']) == (1e-6, 1000, -1)
    assert d['cross_attention_blocks'] == list(range(0, d['dit_layers'], 2))
    width = d['dit_heads'] * d['dit_head_dim']
    return GrootDims(
        vision=vision_of_case(d),
        pixel_shuffle=round(1 / d['downsample_ratio']) if d['use_pixel_shuffle'] else 1,
        connector_layers=d['mlp_connector_layers'],
        language=DecoderDims(
            width=d['width'],
            depth=d['select_layer'],
            mlp_dim=d['mlp_dim'],
            num_heads=d['num_heads'],
            num_kv_heads=d['num_kv_heads'],
            head_dim=d['head_dim'],
        ),
        context=StackDims(
            depth=d['vlsa_layers'],
            num_heads=d['vlsa_heads'],
            head_dim=d['vlsa_head_dim'],
            mlp_dim=4 * d['width'],
        ),
        dit=StackDims(
            depth=d['dit_layers'],
            num_heads=d['dit_heads'],
            head_dim=d['dit_head_dim'],
            mlp_dim=4 * width,
        ),
        head_width=d['hidden_size'],
        future_tokens=d['future_tokens'],
        positions=d['max_seq_len'],
        vocabulary=d['vocab'],
        cameras=d['cameras'],
        image_places=image_places(ids, d),
        prompt_length=length,
        horizon=d['horizon'],
        action_dim=d['action_dim'],
        state_dim=d['state_dim'],
        rope_base=d['rope_theta'],
        rms_epsilon=d['rms_eps'],
    )


def groot_case_paths() -> list[Path]:
    """Descriptions of all GR00T N1.5 cases in the cases folder."""
    return network_case_paths(FAMILY)


@lru_cache(maxsize=4)
def load_groot_case(path: Path, b: int, padding: int = 0) -> GrootCase:
    """Read one batch entry of a case and load its weights under our names, every one of them.

    Args:
        path: the description.
        b: the batch entry.
        padding: masked text tokens behind the prompt that our network is given.
    """
    description = json.loads(path.read_text())
    tensors = load_file(path.with_suffix('.case.safetensors'))
    valid = tensors['attention_mask'][b].bool()
    ids = [int(token) for token in tensors['input_ids'][b][valid]]
    text = sum(token != description['image_token'] for token in ids)
    network = build_network(FAMILY, dims_of_case(description, ids, text + padding))
    assert isinstance(network, GrootN15)
    embodiment = int(tensors['embodiment_id'][b])
    network.load_state_dict(
        {
            name: tensor[embodiment] if name.startswith(SLICED) else tensor
            for name, tensor in our_weights(path, NAMES).items()
        }
    )
    network.eval().requires_grad_(False)
    return GrootCase(description, tensors, network, b, valid)


def groot_entries() -> Iterator[tuple[Path, int]]:
    """Every (case, batch entry)."""
    return batch_entries(FAMILY)
