"""Loads GR00T N1.7's network cases (test/cases/README.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from network_cases import ReferenceCase, batch_entries, network_case_paths, our_weights
from safetensors.torch import load_file
from torch import Tensor

from vla_runtime.families import build_network
from vla_runtime.families.blocks.dimensions import DecoderDims
from vla_runtime.families.groot.dimensions import StackDims
from vla_runtime.families.groot.n17 import GrootN17
from vla_runtime.families.groot.n17_dimensions import GrootN17Dims, QwenVisionDims
from vla_runtime.families.groot.tensor_names import NAMES, SLICED

FAMILY = 'groot_n17'


@dataclass(frozen=True)
class GrootN17Case(ReferenceCase):
    """One batch entry of a case, and our network with its embodiment's weights.

    Attributes:
        b: the batch entry.
        valid: tokens of the sequence that are there, (P,) bool.
    """

    network: GrootN17
    b: int
    valid: Tensor

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of an image's patches, the same for all."""
        ((rows, columns),) = {
            (rows, columns) for _, rows, columns in self.tensors['image_grid_thw'].tolist()
        }
        return rows, columns

    @property
    def patches(self) -> Tensor:
        """Patches of this entry's images, (V, patches, 3 * 2 * p * p)."""
        rows, columns = self.grid
        cameras = self.description['cameras']
        every = self.tensors['pixel_values'].view(-1, rows * columns, self._patch_numbers)
        return every[self.b * cameras : (self.b + 1) * cameras]

    @property
    def _patch_numbers(self) -> int:
        return self.tensors['pixel_values'].shape[1]

    @property
    def pixels(self) -> Tensor:
        """Pixels (V, 3, height, width), put together from the patches."""
        d, (rows, columns) = self.description, self.grid
        edge, patch = d['merge'], d['patch']
        x = self.patches.view(
            -1, rows // edge, columns // edge, edge, edge, 3, d['temporal_patch'], patch, patch
        )
        # One frame stands for both.
        assert torch.equal(x[..., 0, :, :], x[..., 1, :, :])
        x = x[..., 0, :, :].permute(0, 5, 1, 3, 6, 2, 4, 7)
        return x.reshape(-1, 3, rows * patch, columns * patch)

    @property
    def visible(self) -> Tensor:
        """A mask (V,) that hides no camera."""
        return torch.ones(self.description['cameras'], dtype=torch.bool)

    @property
    def ids(self) -> Tensor:
        """Token ids without padding."""
        return self.tensors['input_ids'][self.b, self.valid]

    def rows(self) -> dict[str, Tensor]:
        """Inputs of the prefix: the text tokens, padding moved behind the text."""
        text = self.ids[self.ids != self.description['image_token']]
        tokens = torch.zeros(1, self.network.dims.prompt_length, dtype=torch.int64)
        tokens[0, : len(text)] = text
        return {'tokens': tokens, 'token_mask': torch.arange(tokens.shape[1])[None] < len(text)}

    def state(self) -> dict[str, Tensor]:
        """Input of the head: all states of the history in one row."""
        return {'state': self.tensors['state'][self.b].reshape(1, -1)}

    def prefix(self) -> Mapping[str, Tensor]:
        """Outputs of the prefix network."""
        return self.network.prefix(self.network.vision(self.pixels), self.visible, **self.rows())

    def actions(self) -> Tensor:
        """The chunk of this entry without the others' padding, (H, A)."""
        return self.tensors['actions_rows_alone'][self.b]


def image_places(ids: Sequence[int], image_token: int) -> tuple[int, ...]:
    """Text tokens before each image of a sequence without padding."""
    text, places = 0, []
    for before, token in zip((None, *ids), ids, strict=False):
        if token != image_token:
            text += 1
        elif before != image_token:
            places.append(text)
    return tuple(places)


def dims_of_case(
    d: Mapping[str, Any], image: tuple[int, int], ids: Sequence[int], length: int
) -> GrootN17Dims:
    """Our dimensions of a case's description.

    Args:
        d: the description.
        image: height and width of the images in pixels.
        ids: the sequence of one batch entry, without padding.
        length: text tokens of the padded prompt.
    """
    assert (d['buckets'], d['temporal_patch']) == (1000, 2)
    return GrootN17Dims(
        vision=QwenVisionDims(
            width=d['v_hidden'],
            depth=d['v_layers'],
            num_heads=d['v_heads'],
            mlp_dim=d['v_mlp'],
            patch_size=d['patch'],
            merge=d['merge'],
            positions=math.isqrt(d['v_positions']),
            deepstack=tuple(index + 1 for index in d['deepstack']),
        ),
        image=image,
        language=DecoderDims(
            width=d['width'],
            depth=d['select_layer'],
            mlp_dim=d['mlp_dim'],
            num_heads=d['num_heads'],
            num_kv_heads=d['num_kv_heads'],
            head_dim=d['head_dim'],
        ),
        rope_sections=tuple(d['mrope_section']),
        context=StackDims(
            depth=d['vlsa_layers'],
            num_heads=d['vlsa_heads'],
            head_dim=d['vlsa_head_dim'],
            mlp_dim=4 * d['width'],
        )
        if d['vlsa_layers']
        else None,
        dit=StackDims(
            depth=d['dit_layers'],
            num_heads=d['dit_heads'],
            head_dim=d['dit_head_dim'],
            mlp_dim=4 * d['dit_heads'] * d['dit_head_dim'],
        ),
        text_every=d['attend_text_every_n_blocks'],
        head_width=d['hidden_size'],
        positions=d['max_seq_len'],
        vocabulary=d['vocab'],
        cameras=d['cameras'],
        image_places=image_places(ids, d['image_token']),
        prompt_length=length,
        horizon=d['horizon'],
        real_horizon=d['valid_horizon'],
        action_dim=d['action_dim'],
        state_dim=d['state_dim'] * d['state_history'],
        rope_base=d['rope_theta'],
        rms_epsilon=d['rms_eps'],
    )


def n17_case_paths() -> list[Path]:
    """Descriptions of all GR00T N1.7 cases in the cases folder."""
    return network_case_paths(FAMILY)


@lru_cache(maxsize=4)
def load_n17_case(path: Path, b: int, padding: int = 0) -> GrootN17Case:
    """Read one batch entry of a case and load its weights under our names, every one of them.

    Args:
        path: the description.
        b: the batch entry.
        padding: masked text tokens behind the prompt that our network is given.
    """
    d = json.loads(path.read_text())
    tensors = load_file(path.with_suffix('.case.safetensors'))
    valid = tensors['attention_mask'][b].bool()
    ids = [int(token) for token in tensors['input_ids'][b][valid]]
    text = sum(token != d['image_token'] for token in ids)
    _, rows, columns = tensors['image_grid_thw'][0].tolist()
    image = (rows * d['patch'], columns * d['patch'])
    network = build_network(FAMILY, dims_of_case(d, image, ids, text + padding))
    assert isinstance(network, GrootN17)
    embodiment = int(tensors['embodiment_id'][b])
    network.load_state_dict(
        {
            name: tensor[embodiment] if name.startswith(SLICED) else tensor
            for name, tensor in our_weights(path, NAMES).items()
        }
    )
    network.eval().requires_grad_(False)
    return GrootN17Case(d, tensors, network, b, valid)


def n17_entries() -> Iterator[tuple[Path, int]]:
    """Every (case, batch entry)."""
    return batch_entries(FAMILY)
