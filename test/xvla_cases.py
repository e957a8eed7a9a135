"""Loads the network cases of X-VLA (test/cases/README.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from network_cases import our_weights
from safetensors.torch import load_file
from sampled_cases import SampledCase, Sampling
from torch import Tensor

from vla_convert.readers.xvla import NAMES, domain_tables, row_shape
from vla_runtime.declarations.xvla import BartDims, DavitDims, SoftPromptedDims, XvlaDims
from vla_runtime.family.noise_schedule import Renoising
from vla_runtime.models.base.flow_network import build_network
from vla_runtime.models.xvla import Xvla


@dataclass(frozen=True)
class XvlaCase(SampledCase):
    """A case of X-VLA; `network` is ours in the domain of its first row.

    Its samplings: its own chunk, and those of other settings that it recorded.
    """

    weights: Mapping[str, Tensor]
    _networks: dict[object, Xvla] = field(default_factory=dict)

    def in_domain(self, domain: int, **changes: Any) -> Xvla:
        """Our network in a domain, with other dimensions; the same for the same."""
        key = domain, *changes.items()
        if key not in self._networks:
            dims = replace(dims_of_case(self.description), **changes)
            self._networks[key] = network_of_weights(dims, self.weights, domain)
        return self._networks[key]

    @property
    def samplings(self) -> tuple[Sampling, ...]:
        names = ['', *(name for name in OTHERS if _tensor_of(name) in self.tensors)]
        names += [f'mode_{mode}' for mode in self.description['other_modes']]
        return tuple(
            Sampling(name or 'own', name, Renoising(), '', 1 if name == ONE else self.steps)
            for name in names
        )

    def network_of(self, sampling: Sampling, b: int = 0) -> Xvla:
        domain = self.tensors['other_domain_id' if sampling.prefix == OTHER else 'domain_id'][b]
        changes: dict[str, Any] = {}
        if sampling.prefix.startswith('mode_'):
            changes = {'action_mode': sampling.prefix.removeprefix('mode_')}
        elif sampling.prefix == UNPADDED:
            changes = {'sees_padding': False}
        return self.in_domain(int(domain), **changes)

    def trajectory(self, sampling: Sampling, b: int) -> Tensor:
        return self.tensors[_tensor_of(sampling.prefix)][b]

    def pixels(self, b: int) -> Tensor:
        return torch.stack([self.tensors[f'image_{i}'][b] for i in self.cameras])

    def visible(self, b: int = 0) -> Tensor:
        return self.tensors['image_mask'][b, : len(self.cameras)]

    def rows(self, b: int) -> dict[str, Tensor]:
        return {name: self.tensors[name][b : b + 1] for name in ('tokens', 'token_mask')}

    def head(self, b: int) -> dict[str, Tensor]:
        if not self.network.dims.state_dim:
            return {}
        return {'state': self.tensors['proprio'][b : b + 1]}

    def noise(self, sampling: Sampling, b: int) -> np.ndarray:
        return self.tensors['noise'][b].numpy()

    def step_noise(self, sampling: Sampling, b: int) -> np.ndarray:
        return Renoising().step_noise(self.noise(sampling, b)[None], sampling.steps)


# Chunks of other settings, by what is other.
ONE, OTHER, UNPADDED = 'one_step', 'other_domain', 'without_text_padding'
OTHERS = ONE, OTHER, UNPADDED


def _tensor_of(name: str) -> str:
    """Tensor of a chunk."""
    if name in (ONE, UNPADDED):
        return f'actions_{name}'
    return f'{name}_actions' if name else 'actions'


def network_of_weights(dims: XvlaDims, weights: Mapping[str, Tensor], domain: int) -> Xvla:
    """Our network in one of the domains of a checkpoint's weights, under our names."""
    own = dict(weights)
    for name, table in domain_tables(weights).items():
        row = table[domain]
        own[name] = row.view(row_shape(name, len(row), weights))
    network = build_network('xvla', dims)
    network.load_state_dict(own)
    assert isinstance(network, Xvla)
    return network.eval().requires_grad_(False)


def dims_of_case(d: Mapping[str, Any]) -> XvlaDims:
    """Our dimensions of a case's description."""
    return XvlaDims(
        vision=DavitDims(
            channels=tuple(d['v_embed']),
            blocks=tuple(d['v_depths']),
            num_heads=tuple(d['v_heads']),
            groups=tuple(d['v_groups']),
            mlp_dim=tuple(int(width * d['v_mlp_ratio']) for width in d['v_embed']),
            kernels=tuple(d['v_patch']),
            strides=tuple(d['v_stride']),
            paddings=tuple(d['v_padding']),
            pre_norms=tuple(d['v_prenorm']),
            window=d['v_window'],
            positions=d['v_positions'],
            qkv_bias=d['v_qkv_bias'],
        ),
        text=BartDims(
            width=d['projection'],
            depth=d['text_layers'],
            num_heads=d['text_heads'],
            mlp_dim=d['text_ffn'],
            positions=d['text_positions'],
            scaled=d['scale_embedding'],
        ),
        head=SoftPromptedDims(
            width=d['hidden'],
            depth=d['depth'],
            num_heads=d['heads'],
            mlp_dim=int(d['hidden'] * d['mlp_ratio']),
            positions=d['max_len_seq'],
            time_width=d['dim_time'],
            soft_prompts=d['soft_prompts'],
            by_domain=d['use_hetero_proj'],
        ),
        vocabulary=d['vocab'],
        image=tuple(d['resize'] or d['images'][0]),
        empty_views=d['views'] - d['cameras'],
        cameras=d['cameras'],
        prompt_length=d['tokens'],
        horizon=d['chunk'],
        action_dim=d['model_action_dim'],
        action_mode=d['action_mode'],
        state_dim=d['max_state_dim'] if d.get('use_proprio', True) else 0,
    )


@lru_cache(maxsize=4)
def load_xvla_case(path: Path) -> XvlaCase:
    description = json.loads(path.read_text())
    tensors = load_file(path.with_suffix('.case.safetensors'))
    weights = our_weights(path, NAMES)
    domain = int(tensors['domain_id'][0])
    network = network_of_weights(dims_of_case(description), weights, domain)
    return XvlaCase(description, tensors, network, weights, {(domain,): network})
