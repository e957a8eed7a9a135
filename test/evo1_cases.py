"""Loads Evo-1's network cases and builds tiny policies of it (test/cases/README.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from network_cases import ReferenceCase, our_weights
from safetensors.torch import load_file
from torch import Tensor

from vla_convert.readers.evo1 import NAMES
from vla_runtime.declarations.evo1 import Evo1Dims, HeadDims
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.models.base.flow_network import build_network
from vla_runtime.models.evo1 import Evo1


@dataclass(frozen=True)
class Evo1Case(ReferenceCase):
    """One batch entry of a case of Evo-1, and our network with its embodiment's weights.

    Attributes:
        entry: the batch entry.
    """

    network: Evo1
    entry: int

    def of(self, name: str) -> Tensor:
        """A tensor of this entry, batch axis first."""
        return self.tensors[name][self.entry]

    @property
    def views(self) -> int:
        return self.network.dims.cameras

    @property
    def pixels(self) -> Tensor:
        """(V, 3, S, S)."""
        return self.tensors['pixel_values'].unflatten(0, (-1, self.views))[self.entry]

    @property
    def image_mask(self) -> Tensor:
        return self.of('image_masks')

    @property
    def places(self) -> Tensor:
        """Places of our prefix among the reference's, which may be padded in front."""
        start = int(self.of('token_mask').long().argmax())
        return torch.arange(start, len(self.of('input_ids')))

    def rows(self) -> dict[str, Tensor]:
        """Inputs of the prefix, (1, …) each."""
        ids, mask = (self.of(name)[self.places] for name in ('input_ids', 'token_mask'))
        text = ids != self.description['image_token']
        tokens, mask = ids[text], mask[text]
        length = self.network.dims.prompt_length
        padded = torch.zeros(length, dtype=tokens.dtype)
        padded[: len(tokens)] = tokens
        seen = torch.zeros(length, dtype=torch.bool)
        seen[: len(mask)] = mask.bool()
        return {'tokens': padded[None], 'token_mask': seen[None], 'state': self.of('state')[None]}

    def prefix(self) -> Mapping[str, Tensor]:
        """Outputs of the prefix network."""
        return self.network.prefix(self.network.vision(self.pixels), self.image_mask, **self.rows())


def dims_of_case(d: Mapping[str, Any], tensors: Mapping[str, Tensor], b: int) -> Evo1Dims:
    """Our dimensions of a case's batch entry."""
    # Constants of the networks.
    assert d['v_eps'] == 1e-6
    ids, mask = (tensors[name][b].tolist() for name in ('input_ids', 'token_mask'))
    ids = ids[mask.index(1) :]
    image_token = d['image_token']
    starts = [
        place
        for place, token in enumerate(ids)
        if token == image_token and ids[place - 1] != image_token
    ]
    assert len(starts) == d['max_views']
    real = int(tensors['action_mask'][b].sum())
    assert tensors['action_mask'][b][:real].all(), 'padding comes last'
    return Evo1Dims(
        vision=VisionDims(
            width=d['v_hidden'],
            depth=d['v_layers'],
            num_heads=d['v_heads'],
            mlp_dim=d['v_mlp'],
            patch_size=d['patch'],
            image_size=d['image'],
        ),
        pixel_shuffle=round(1 / d['downsample_ratio']),
        language=DecoderDims(
            width=d['width'],
            depth=d['depth'],
            mlp_dim=d['mlp_dim'],
            num_heads=d['num_heads'],
            num_kv_heads=d['num_kv_heads'],
            head_dim=d['head_dim'],
        ),
        head=HeadDims(
            depth=d['head_layers'],
            num_heads=d['head_heads'],
            mlp_dim=4 * d['width'],
            state_hidden=d['state_hidden'],
            velocity_hidden=d['head_hidden'],
        ),
        vocabulary=d['vocab'],
        cameras=d['max_views'],
        image_places=tuple(sum(token != image_token for token in ids[:start]) for start in starts),
        prompt_length=sum(token != image_token for token in ids),
        horizon=d['chunk'],
        action_dim=d['action_dim'],
        real_actions=real,
        state_dim=d['state_dim'],
        rope_base=d['rope_theta'],
        rms_epsilon=d['rms_eps'],
        input_major=d['num_categories'] > 1,
    )


@lru_cache(maxsize=8)
def load_evo1_case(path: Path, b: int) -> Evo1Case:
    """Read a case and load its weights under our names, every one of them."""
    description = json.loads(path.read_text())
    tensors = load_file(path.with_suffix('.case.safetensors'))
    network = build_network('evo1', dims_of_case(description, tensors, b))
    assert isinstance(network, Evo1)
    weights = our_weights(path, NAMES)
    if network.dims.input_major:
        embodiment = int(tensors['embodiment_id'][b])
        weights = {
            name: value[embodiment].contiguous() if _has_embodiments(name, value) else value
            for name, value in weights.items()
        }
    network.load_state_dict(weights)
    network.eval().requires_grad_(False)
    return Evo1Case(description, tensors, network, b)


def _has_embodiments(name: str, value: Tensor) -> bool:
    encoder = name.startswith(('state_encoder', 'action_encoder', 'velocity_head'))
    return encoder and value.dim() == (3 if name.endswith('weight') else 2)
