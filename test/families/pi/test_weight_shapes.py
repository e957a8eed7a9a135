"""Shapes counted from dimensions are those of the networks in PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_policy import tiny_dims

from vla_runtime.families import find_family
from vla_runtime.families.flow_network import empty_network
from vla_runtime.families.pi.dimensions import PiDims


def uneven(dims: PiDims) -> PiDims:
    """No two sizes alike, so that none can stand for another."""
    stack = replace(dims.language, depth=3, num_heads=6, num_kv_heads=2, head_dim=10)
    return replace(
        dims,
        vision=replace(dims.vision, width=44, depth=2, num_heads=4, mlp_dim=52, image_size=42),
        language=replace(stack, width=34, mlp_dim=70),
        expert=replace(stack, width=18, mlp_dim=38),
        vocabulary=301,
        horizon=5,
        action_dim=7,
        state_dim=9 if dims.state_dim else 0,
    )


@pytest.mark.parametrize('family', ['pi05', 'pi0'])
@pytest.mark.parametrize('size', ['tiny', 'uneven', 'full'])
def test_they_are_those_of_the_network_in_its_order(family, size) -> None:
    dims = {
        'tiny': tiny_dims(family),
        'uneven': uneven(tiny_dims(family)),
        'full': find_family(family).presets[family],
    }[size]
    state = empty_network(family, dims).state_dict()
    in_torch = [(name, tuple(tensor.shape)) for name, tensor in state.items()]
    assert list(find_family(family).weight_shapes(dims).items()) == in_torch
