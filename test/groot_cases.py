"""Loads the network cases of GR00T (test/cases/README.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from network_cases import ReferenceCase, our_weights, vision_of_case
from safetensors.torch import load_file
from torch import Tensor

from vla_convert.readers.groot.checkpoint import NAMES, SLICED
from vla_runtime.declarations.groot import GrootDims, GrootN16Dims, GrootN17Dims, Siglip2Dims
from vla_runtime.family.dimensions import DecoderDims
from vla_runtime.family.dit import StackDims
from vla_runtime.family.frame_vision import FrameVisionDims
from vla_runtime.models.base.flow_network import build_network
from vla_runtime.models.groot.networks import GrootN15, GrootN16, GrootN17

N15, N16, N17 = 'groot_n15', 'groot_n16', 'groot_n17'


@dataclass(frozen=True)
class GrootCase(ReferenceCase):
    """One batch entry of a case, and our network with its embodiment's weights.

    Attributes:
        b: the batch entry.
        valid: tokens of the sequence that are there, (P,) bool.
    """

    network: GrootN15 | GrootN16 | GrootN17
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
        """The chunk of this entry, (H, A)."""
        return self.tensors['actions'][self.b]

    @property
    def masks_padding(self) -> bool:
        """False where the training code's head sees padding, which ours does not."""
        return bool(self.valid.all())


@dataclass(frozen=True)
class GrootN16Case(GrootCase):
    """An entry of a case of N1.6, whose head sees no padding."""

    @property
    def masks_padding(self) -> bool:
        return True


@dataclass(frozen=True)
class GrootN17Case(GrootCase):
    """An entry of a case of N1.7, whose pixels are stored as patches."""

    @property
    def pixels(self) -> Tensor:
        """Pixels (V, 3, height, width), put together from the patches."""
        cameras, first = self.description['cameras'], self.b * self.description['cameras']
        return pixels_of_patches(
            self.tensors['pixel_values'], self.tensors['image_grid_thw'], self.description
        )[first : first + cameras]

    def actions(self) -> Tensor:
        """The chunk of this entry without the others' padding, (H, A)."""
        return self.tensors['actions_rows_alone'][self.b]


def pixels_of_patches(patches: Tensor, grids: Tensor, d: Mapping[str, Any]) -> Tensor:
    """Pixels (n, 3, height, width) of images of one size from their patches, square by square."""
    ((rows, columns),) = {(rows, columns) for _, rows, columns in grids.tolist()}
    edge, patch = d['merge'], d['patch']
    x = patches.reshape(
        -1, rows // edge, columns // edge, edge, edge, 3, d['temporal_patch'], patch, patch
    )
    # One frame stands for both.
    assert torch.equal(x[..., 0, :, :], x[..., 1, :, :])
    x = x[..., 0, :, :].permute(0, 5, 1, 3, 6, 2, 4, 7)
    return x.reshape(-1, 3, rows * patch, columns * patch)


def image_places(ids: Sequence[int], image_token: int) -> tuple[int, ...]:
    """Text tokens before each image of a sequence without padding."""
    text, places = 0, []
    for before, token in zip((None, *ids), ids, strict=False):
        if token != image_token:
            text += 1
        elif before != image_token:
            places.append(text)
    return tuple(places)


def language_of_case(d: Mapping[str, Any]) -> DecoderDims:
    """Our dimensions of a description's language model."""
    heads = {name: d[name] for name in ('num_heads', 'num_kv_heads', 'head_dim')}
    return DecoderDims(width=d['width'], depth=d['select_layer'], mlp_dim=d['mlp_dim'], **heads)


def head_of_case(d: Mapping[str, Any], ids: Sequence[int], length: int) -> dict[str, Any]:
    """Our dimensions of what the versions share.

    Args:
        d: the description.
        ids: the sequence of one batch entry, without padding.
        length: text tokens of the padded prompt.
    """
    return {
        'language': language_of_case(d),
        'dit': StackDims(
            depth=d['dit_layers'],
            num_heads=d['dit_heads'],
            head_dim=d['dit_head_dim'],
            mlp_dim=4 * d['dit_heads'] * d['dit_head_dim'],
        ),
        'head_width': d['hidden_size'],
        'positions': d['max_seq_len'],
        'vocabulary': d['vocab'],
        'cameras': d['cameras'],
        'image_places': image_places(ids, d['image_token']),
        'prompt_length': length,
        'horizon': d['horizon'],
        'action_dim': d['action_dim'],
        'rope_base': d['rope_theta'],
        'rms_epsilon': d['rms_eps'],
    }


def context_of_case(d: Mapping[str, Any]) -> StackDims:
    """Our dimensions of the self-attention over the features."""
    return StackDims(
        depth=d['vlsa_layers'],
        num_heads=d['vlsa_heads'],
        head_dim=d['vlsa_head_dim'],
        mlp_dim=4 * d['width'],
    )


def n15_dims(
    d: Mapping[str, Any], tensors: Mapping[str, Tensor], head: Mapping[str, Any]
) -> GrootDims:
    """Our dimensions of a case of N1.5."""
    # What no policy changes is a constant of the networks.
    assert (d['v_eps'], d['buckets'], d['vision_select_layer']) == (1e-6, 1000, -1)
    assert d['cross_attention_blocks'] == list(range(0, d['dit_layers'], 2))
    return GrootDims(
        vision=vision_of_case(d),
        pixel_shuffle=round(1 / d['downsample_ratio']) if d['use_pixel_shuffle'] else 1,
        connector_layers=d['mlp_connector_layers'],
        context=context_of_case(d),
        future_tokens=d['future_tokens'],
        state_dim=d['state_dim'],
        **head,
    )


def frame_vision_of_case(d: Mapping[str, Any]) -> FrameVisionDims:
    """Our sizes of Qwen3-VL's tower in a case."""
    return FrameVisionDims(
        width=d['v_hidden'],
        depth=d['v_layers'],
        num_heads=d['v_heads'],
        mlp_dim=d['v_mlp'],
        patch_size=d['patch'],
        merge=d['merge'],
        positions=math.isqrt(d['v_positions']),
        deepstack=tuple(index + 1 for index in d['deepstack']),
    )


def n17_dims(
    d: Mapping[str, Any], tensors: Mapping[str, Tensor], head: Mapping[str, Any]
) -> GrootN17Dims:
    """Our dimensions of a case of N1.7."""
    assert (d['buckets'], d['temporal_patch']) == (1000, 2)
    _, rows, columns = tensors['image_grid_thw'][0].tolist()
    return GrootN17Dims(
        vision=frame_vision_of_case(d),
        image=(rows * d['patch'], columns * d['patch']),
        rope_sections=tuple(d['mrope_section']),
        text_every=d['attend_text_every_n_blocks'],
        real_horizon=d['valid_horizon'],
        state_dim=d['state_dim'] * d['state_history'],
        context=context_of_case(d) if d['vlsa_layers'] else None,
        **head,
    )


def n16_dims(
    d: Mapping[str, Any], tensors: Mapping[str, Tensor], head: Mapping[str, Any]
) -> GrootN16Dims:
    """Our dimensions of a case of N1.6."""
    assert (d['v_eps'], d['buckets']) == (1e-6, 1000)
    return GrootN16Dims(
        vision=Siglip2Dims(
            width=d['v_hidden'],
            depth=d['v_layers'],
            num_heads=d['v_heads'],
            mlp_dim=d['v_mlp'],
            patch_size=d['patch'],
            merge=2,
            positions=math.isqrt(d['v_positions']),
        ),
        image=tuple(tensors['pixel_values'].shape[2:]),
        text_every=d['attend_text_every_n_blocks'],
        real_horizon=d['valid_horizon'],
        state_dim=d['state_dim'] * d['state_history'],
        state_steps=d['state_history'],
        **head,
    )


_KINDS: Mapping[str, tuple[Callable[..., Any], type[GrootCase]]] = {
    N15: (n15_dims, GrootCase),
    N16: (n16_dims, GrootN16Case),
    N17: (n17_dims, GrootN17Case),
}


@lru_cache(maxsize=4)
def load_groot_case(path: Path, b: int, padding: int = 0) -> GrootCase:
    """Read one batch entry of a case and load its weights under our names, every one of them.

    Args:
        path: the description.
        b: the batch entry.
        padding: masked text tokens behind the prompt that our network is given.
    """
    d = json.loads(path.read_text())
    dims_of, case = _KINDS[d['kind']]
    tensors = load_file(path.with_suffix('.case.safetensors'))
    valid = tensors['attention_mask'][b].bool()
    ids = [int(token) for token in tensors['input_ids'][b][valid]]
    text = sum(token != d['image_token'] for token in ids)
    network = build_network(d['kind'], dims_of(d, tensors, head_of_case(d, ids, text + padding)))
    embodiment = int(tensors['embodiment_id'][b])
    network.load_state_dict(
        {
            name: tensor[embodiment] if name.startswith(SLICED) else tensor
            for name, tensor in our_weights(path, NAMES).items()
        }
    )
    network.eval().requires_grad_(False)
    return case(d, tensors, network, b, valid)
