"""Fused networks of tiny dimensions, and prefixes and velocities of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from network_cases import random_network
from tiny_policy import tiny_dims
from torch import Tensor

from vla_runtime.families.blocks.layers import matrix_names
from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.pi.networks import FusedPi
from vla_runtime.families.smolvla.networks import FusedSmolVla

FUSED: Mapping[str, Any] = {'pi05': FusedPi, 'pi0': FusedPi, 'smolvla': FusedSmolVla}


def tiny(family: str, dtype: torch.dtype = torch.float32) -> FlowNetwork:
    network = random_network(family, tiny_dims(family, horizon=5))
    for name in matrix_names(network):
        parameter = network.get_parameter(name)
        parameter.data = parameter.data.to(dtype)
    return network


def prefix_of(
    fused: Any, rows: int, shares: tuple[float, ...] = (0.7, 0.4), seed: int = 0
) -> dict[str, Tensor]:
    """Prefix of prompts with a share of valid tokens each, with gaps; the first view is absent."""
    generator = torch.Generator().manual_seed(seed)
    dims = fused.dims
    shape = (dims.cameras, 3, dims.image_size, dims.image_size)
    pixels = torch.rand(shape, generator=generator) * 2 - 1
    chances = torch.rand(rows, dims.prompt_length, generator=generator)
    given = {
        'tokens': torch.randint(0, 250, (rows, dims.prompt_length), generator=generator),
        'token_mask': chances < torch.tensor(shares[:rows])[:, None],
    }
    if fused.family.name == 'smolvla':
        given['state'] = torch.randn(rows, dims.state_dim, generator=generator)
    seen = torch.arange(dims.cameras) > 0
    return dict(fused.prefix(fused.vision(pixels), seen, **given))


def velocity_of(fused: Any, past: Mapping[str, Tensor], into: Any = None) -> tuple[Tensor, Any]:
    """Velocity of random actions over a prefix, and what was laid out."""
    generator = torch.Generator().manual_seed(9)
    dims, rows = fused.dims, len(past['prefix_mask'])
    x = torch.randn(rows, dims.horizon, dims.action_dim, generator=generator)
    head = {'state': torch.ones(rows, dims.state_dim)} if fused.family.name == 'pi0' else {}
    prepared = fused.prepare_prefix(past, into)
    step = fused.split_conditioning(fused.time_conditioning(torch.tensor([0.4])))
    return fused.velocity(x, prepared, step, **head).clone(), prepared


def inputs_of_case(case: Any, b: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs of the prefix and of the head, one row."""
    if case.network.family.name == 'smolvla':
        return case.rows(b), {}
    tokens, mask = case.prompt(b)
    return {'tokens': tokens[None], 'token_mask': mask[None]}, case.head_inputs(b)
