"""Sizes and forms that no reference case has: each gives the numbers that it gave.

Recorded is what two prompts of different lengths become, with all cameras and with one hidden.
Evo-1's and GR00T's second networks were plain PyTorch, one prompt at a time without padding or
cache; ACT's was made of PyTorch's own layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from contract_cases import image_tokens_of, of_cases, result_of, sizes_of
from family_contracts import contract_of
from family_contracts.declaration import Case, FamilyContract
from network_cases import relative_error
from onnx_bundles import onnx_of_network
from recorded_numbers import recorded
from torch import Tensor

from vla_convert.export.onnx.verification import verify_onnx
from vla_runtime.family.declaration import RowInput, image_sizes
from vla_runtime.models.base.flow_network import FlowNetwork, build_network

BOUND = 2e-5
EXPORTED = {
    ('evo1', 'four cameras'),
    ('groot_n15', 'four cameras'),
    ('groot_n16', 'two time steps of the state, three tall images'),
    ('groot_n17', 'three tall images'),
}


def sizes_to_run(contract: FamilyContract) -> Mapping[str, Any]:
    """All but published sizes, of families that have variants."""
    if not contract.variants:
        return {}
    return {name: dims for name, dims in sizes_of(contract).items() if name != 'full'}


def in_recorded_order(network: FlowNetwork) -> list[tuple[str, Tensor]]:
    """Parameters in the order of the recordings: a DiT's modulation before its block's layers."""
    parameters = list(network.named_parameters())
    first: dict[str, int] = {}

    def place(entry: tuple[int, tuple[str, Tensor]]) -> tuple[int, bool, int]:
        index, (name, _) = entry
        if not name.startswith('dit.'):
            return index, False, index
        block = '.'.join(name.split('.')[:2])
        return first.setdefault(block, index), '.modulation.' not in name, index

    return [parameter for _, parameter in sorted(enumerate(parameters), key=place)]


def drawn_network(family: str, dims: Any) -> FlowNetwork:
    """A network whose weights all matter."""
    network = build_network(family, dims).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in in_recorded_order(network):
        table = parameter.ndim == 1 or 'position' in name or 'embedding' in name
        inputs = 4 if table else math.prod(parameter.shape[1:])
        drawn = torch.randn(parameter.shape, generator=generator) * inputs**-0.5
        if name.endswith('running_var'):
            drawn = drawn.abs() + 0.5
        elif 'norm' in name and name.endswith('weight'):
            drawn += 1.0
        parameter.copy_(drawn)
    return network


def two_rows(inputs: Mapping[str, RowInput], dims: Any) -> dict[str, Tensor]:
    """Drawn inputs; the second prompt ends soon behind its last image."""
    generator = torch.Generator().manual_seed(1)
    drawn: dict[str, Tensor] = {}
    for name, given in inputs.items():
        shape = (2, *given.shape)
        if name == 'tokens':
            drawn[name] = torch.randint(0, dims.vocabulary, shape, generator=generator)
        elif name == 'token_mask':
            places = getattr(dims, 'image_places', (0,))
            lengths = torch.tensor([[dims.prompt_length], [places[-1] + 9]])
            drawn[name] = torch.arange(dims.prompt_length)[None] < lengths
        else:
            drawn[name] = torch.randn(shape, generator=generator)
    return drawn


def case_of(family: str, dims: Any) -> Case:
    """Drawn weights and inputs."""
    network, generator = drawn_network(family, dims), torch.Generator().manual_seed(2)
    noise = torch.randn(2, dims.horizon, dims.action_dim, generator=generator)
    noise[..., getattr(dims, 'real_actions', dims.action_dim) :] = 0.0
    return Case(
        network=network,
        steps=1,
        pixels=[torch.randn(3, *size, generator=generator) for size in image_sizes(dims)],
        image_mask=torch.ones(dims.cameras, dtype=torch.bool),
        rows=two_rows(network.family.prefix_inputs(dims), dims),
        head=two_rows(network.family.head_inputs(dims), dims),
        noise=noise,
        actions=None,
    )


@pytest.mark.parametrize(('family', 'variant'), of_cases(sizes_to_run))
def test_a_variant_gives_the_numbers_that_it_gave(family: str, variant: str):
    with torch.inference_mode():
        case = case_of(family, sizes_of(contract_of(family))[variant])
        masks = [case.image_mask]
        if len(case.image_mask) > 1:
            masks += [
                case.image_mask.index_fill(0, torch.tensor(hidden), False) for hidden in (0, -1)
            ]
        # What lies behind the tokens of a smaller image does not matter.
        images = image_tokens_of(case, padding=1e4)
        found = torch.stack(
            [
                result_of(case, case.network.prefix(images, mask, **case.rows), x=case.noise)
                for mask in masks
            ]
        )
    expected = recorded('variants', f'{family}/{variant}', found)
    for mask, ours, numbers in zip(masks, found, expected, strict=True):
        assert relative_error(ours, numbers) <= BOUND, mask
        assert relative_error(ours[0], ours[1]) > 50 * BOUND, 'the prompts differ'
    assert all(relative_error(one, expected[0]) > 50 * BOUND for one in expected[1:])


@pytest.mark.thorough
@pytest.mark.parametrize(('family', 'variant'), sorted(EXPORTED))
def test_exported_files_of_a_variant_are_within_their_bounds(family: str, variant: str):
    with torch.no_grad():
        network = drawn_network(family, contract_of(family).variants[variant])
    folder, spec = onnx_of_network(family, network, denoise_steps=3)
    assert verify_onnx(folder, spec).failures == []
