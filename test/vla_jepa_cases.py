"""Loads the network cases of VLA-JEPA (test/cases/README.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from groot_cases import frame_vision_of_case, image_places, pixels_of_patches
from network_cases import ReferenceCase, our_weights
from safetensors.torch import load_file
from torch import Tensor

from vla_convert.readers.vla_jepa import NAMES
from vla_runtime.declarations.vla_jepa import VlaJepaDims
from vla_runtime.family.dimensions import DecoderDims
from vla_runtime.family.dit import StackDims
from vla_runtime.models.base.flow_network import build_network
from vla_runtime.models.vla_jepa import VlaJepa


@dataclass(frozen=True)
class VlaJepaCase(ReferenceCase):
    """One batch entry of a case, and our networks with its weights, with and without a state.

    Attributes:
        b: the batch entry.
        valid: tokens of the sequence that are there, (P,) bool; padding is on the left.
    """

    network: VlaJepa
    blind: VlaJepa
    b: int
    valid: Tensor

    @property
    def cameras(self) -> int:
        return len(self.description['camera_keys'])

    @property
    def pixels(self) -> Tensor:
        """Pixels (V, 3, height, width), put together from the patches."""
        return pixels_of_patches(
            self.tensors['pixel_values'], self.tensors['image_grid_thw'], self.description
        )[self.b * self.cameras : (self.b + 1) * self.cameras]

    @property
    def visible(self) -> Tensor:
        return torch.ones(self.cameras, dtype=torch.bool)

    def rows(self) -> dict[str, Tensor]:
        """Inputs of the prefix: the text tokens, padding behind the text."""
        ids = self.tensors['input_ids'][self.b, self.valid]
        text = ids[ids != self.description['token_ids']['<|image_pad|>']]
        tokens = torch.zeros(1, self.network.dims.prompt_length, dtype=torch.int64)
        tokens[0, : len(text)] = text
        return {'tokens': tokens, 'token_mask': torch.arange(tokens.shape[1])[None] < len(text)}

    def state(self) -> dict[str, Tensor]:
        return {'state': self.tensors['state'][self.b : self.b + 1]}

    def prefix(self) -> Mapping[str, Tensor]:
        """Outputs of the prefix network."""
        return self.network.prefix(self.network.vision(self.pixels), self.visible, **self.rows())


def dims_of_case(
    d: Mapping[str, Any], tensors: Mapping[str, Tensor], ids: list[int], padding: int
) -> VlaJepaDims:
    """Our dimensions of a case; `ids`: the sequence of one batch entry, without padding."""
    # What no policy changes is a constant of the networks.
    assert (d['buckets'], d['temporal_patch']) == (1000, 2)
    image = d['token_ids']['<|image_pad|>']
    _, rows, columns = tensors['image_grid_thw'][0].tolist()
    return VlaJepaDims(
        vision=frame_vision_of_case(d),
        image=(rows * d['patch'], columns * d['patch']),
        language=DecoderDims(
            **{name: d[name] for name in ('width', 'depth', 'mlp_dim')},
            **{name: d[name] for name in ('num_heads', 'num_kv_heads', 'head_dim')},
        ),
        rope_sections=tuple(d['mrope_section']),
        dit=StackDims(
            depth=d['dit_layers'],
            num_heads=d['dit_heads'],
            head_dim=d['dit_head_dim'],
            mlp_dim=4 * d['inner'],
        ),
        head_width=d['hidden_size'],
        positions=tensors['action_model.position_embedding.weight'].shape[0],
        future_tokens=d['embodied_tokens'],
        vocabulary=d['vocab'],
        tokens_behind=ids[::-1].index(d['token_ids']['<|embodied_action|>']),
        frames=d['video_frames'] // d['tubelet'] - 1,
        frame_tokens=d['action_tokens_per_step'],
        cameras=len(d['camera_keys']),
        image_places=image_places(ids, image),
        prompt_length=sum(token != image for token in ids) + padding,
        horizon=d['chunk'],
        action_dim=d['action_dim'],
        state_dim=d['state_dim'],
        rope_base=d['rope_theta'],
        rms_epsilon=d['rms_eps'],
    )


@lru_cache(maxsize=4)
def load_vla_jepa_case(path: Path, b: int, padding: int = 0) -> VlaJepaCase:
    """Read one batch entry of a case and load its weights under our names, every one of them.

    Args:
        path: the description.
        b: the batch entry.
        padding: masked text tokens behind the prompt that our network is given.
    """
    d = json.loads(path.read_text())
    tensors = load_file(path.with_suffix('.case.safetensors'))
    stored = load_file(path.with_suffix('.weights.safetensors'))
    valid = tensors['attention_mask'][b].bool()
    ids = [int(token) for token in tensors['input_ids'][b][valid]]
    dims = dims_of_case(d, {**tensors, **stored}, ids, padding)
    weights = our_weights(path, NAMES)
    networks = []
    for changed in (dims, replace(dims, state_dim=0)):
        network = build_network('vla_jepa', changed)
        assert isinstance(network, VlaJepa)
        wanted = {
            name: tensor
            for name, tensor in weights.items()
            if changed.state_dim or not name.startswith('state_encoder.')
        }
        network.load_state_dict(wanted)
        networks.append(network.eval().requires_grad_(False))
    return VlaJepaCase(d, tensors, *networks, b, valid)
