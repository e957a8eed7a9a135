"""Networks of tiny dimensions with joined products, and prefixes and velocities of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from typing import Any
from unittest import mock

import torch
from network_cases import random_network
from tiny_policy import tiny_dims
from torch import Tensor

from vla_runtime.models.base.expert_network import ExpertNetwork
from vla_runtime.models.base.flow_network import FlowNetwork
from vla_runtime.models.blocks.key_lengths import Kernel
from vla_runtime.models.blocks.layers import matrix_names

# Families whose expert attends to keys and values of a prompt.
EXPERTS = ('pi05', 'pi0', 'smolvla')


def tiny(family: str, dtype: torch.dtype = torch.float32, horizon: int = 5) -> FlowNetwork:
    network = random_network(family, tiny_dims(family, horizon=horizon))
    for name, parameter in network.named_parameters():
        # Of frozen norms.
        if name.endswith('running_var'):
            parameter.abs_()
    return in_precision(network, dtype)


def in_precision(network: FlowNetwork, dtype: torch.dtype) -> FlowNetwork:
    """The network itself, its matrices in this dtype."""
    for name in matrix_names(network):
        parameter = network.get_parameter(name)
        parameter.data = parameter.data.to(dtype)
    return network


def joined(network: Any, static_shapes: bool = False, kernel: Kernel | None = None) -> Any:
    """A joined copy, with this kernel in place of a GPU's; the network itself is the oracle."""
    copy = network.twin().eval() if network.is_joined else deepcopy(network)
    with nullcontext() if kernel is None else kernel_of_lengths(kernel):
        copy.join(static_shapes)
    return copy


def kernel_of_lengths(kernel: Kernel) -> Any:
    """Let networks that are joined meanwhile attend by this kernel."""
    return mock.patch.object(ExpertNetwork, 'lengths_kernel', staticmethod(kernel))


def prefix_of(
    network: Any, rows: int, shares: tuple[float, ...] = (0.7, 0.4), seed: int = 0
) -> dict[str, Tensor]:
    """Prefix of prompts with a share of valid tokens each, with gaps; the first view is absent."""
    generator = torch.Generator().manual_seed(seed)
    dims = network.dims
    shape = (dims.cameras, 3, dims.image_size, dims.image_size)
    pixels = torch.rand(shape, generator=generator) * 2 - 1
    chances = torch.rand(rows, dims.prompt_length, generator=generator)
    given = {
        'tokens': torch.randint(0, 250, (rows, dims.prompt_length), generator=generator),
        'token_mask': chances < torch.tensor(shares[:rows])[:, None],
    }
    if network.family.name == 'smolvla':
        given['state'] = torch.randn(rows, dims.state_dim, generator=generator)
    seen = torch.arange(dims.cameras) > 0
    return dict(network.prefix(network.vision(pixels), seen, **given))


def velocity_of(network: Any, past: Mapping[str, Tensor], into: Any = None) -> tuple[Tensor, Any]:
    """Velocity of random actions over a prefix, and what was laid out."""
    generator = torch.Generator().manual_seed(9)
    dims, rows = network.dims, len(past['prefix_mask'])
    x = torch.randn(rows, dims.horizon, dims.action_dim, generator=generator)
    head = {'state': torch.ones(rows, dims.state_dim)} if network.family.name == 'pi0' else {}
    prepared = network.prepare_prefix(past, into)
    step = network.split_conditioning(network.time_conditioning(torch.tensor([0.4])))
    return network.velocity(x, prepared, step, **head).clone(), prepared


def inputs_of_case(case: Any, b: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs of the prefix and of the head, one row."""
    if case.network.family.name == 'smolvla':
        return case.rows(b), {}
    tokens, mask = case.prompt(b)
    return {'tokens': tokens[None], 'token_mask': mask[None]}, case.head_inputs(b)
