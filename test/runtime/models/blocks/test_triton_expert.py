"""The expert in Triton kernels, interpreted on a CPU, beside the operators.

Triton's interpreter multiplies the bits of bfloat16 as integers (3.9), so that dtype is compiled
(test_triton_compile.py) and compared at load alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from joined_networks import EXPERTS, inputs_of_case, joined, prefix_of, tiny, velocity_of
from network_cases import each_entry, load_network_case, relative_error
from smolvla_cases import load_smolvla_case
from triton_package import interpreted, needs_triton  # noqa: F401

from vla_runtime.inference.denoise import flow_times
from vla_runtime.models.base.flow_step import DenoiseStep

pytestmark = [pytest.mark.cases, needs_triton, pytest.mark.usefixtures('interpreted')]

BOUND = 1e-5
families = pytest.mark.parametrize('family', EXPERTS)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture
def layers(monkeypatch):
    """The module under test, in small tiles, so that tiny networks have several of each."""
    from vla_runtime.models.triton import expert as triton_expert

    tiles = dict.fromkeys(
        ('ROWS', 'INNER', 'OUTPUTS', 'PART_INPUTS', 'QUERIES', 'KEYS', 'PART'), 16
    )
    for name, size in tiles.items():
        monkeypatch.setattr(triton_expert, name, size)
    return triton_expert


def both(network: Any, layers: Any) -> tuple[Any, Any]:
    """The joined network with operators and with kernels, on the same weights."""
    plain, by_kernels = joined(network, True), joined(network, True)
    by_kernels.expert_type = layers.TritonExpert
    return plain, by_kernels


def compare_with_the_case(path: Any, b: int, steps: int | None) -> None:
    """Compare the first steps of a reference case, and its chunk after all of them (None)."""
    from vla_runtime.models.triton import expert as triton_expert

    load = load_smolvla_case if 'smolvla' in path.stem else load_network_case
    case: Any = load(path)
    rows, head = inputs_of_case(case, b)
    pixels, image_mask = case.images(b)
    states: list[list[torch.Tensor]] = [[], []]
    for network, found in zip(both(case.network, triton_expert), states, strict=True):
        past = network.prefix(network.vision(pixels), image_mask, **rows)
        x, prepared, step = (
            case.tensors['noise'][b : b + 1],
            network.prepare_prefix(past),
            DenoiseStep(network),
        )
        for t in torch.tensor(flow_times(case.steps)[:steps], dtype=torch.float32):
            conditioning = network.split_conditioning(network.time_conditioning(t[None]))
            dt, weights = torch.tensor(-1.0 / case.steps), torch.zeros(1, x.shape[1], 1)
            x, velocity = step(
                x, prepared, conditioning, t, dt, torch.ones(1), torch.zeros_like(x), weights, head
            )
            found += [x.clone(), velocity.clone()]
    for expected, ours in zip(*states, strict=True):
        assert relative_error(ours, expected) <= BOUND
    if steps is None:
        assert relative_error(states[1][-2][0], case.tensors['actions'][b]) <= 5e-5


@pytest.mark.thorough
@each_entry('pi05', 'pi0', 'smolvla')
def test_the_first_step_of_the_cases_is_that_of_the_operators(path, b):
    compare_with_the_case(path, b, 1)


@pytest.mark.slow
@each_entry('pi05', 'pi0', 'smolvla')
def test_every_step_and_chunk_of_the_cases_is_that_of_the_operators(path, b):
    compare_with_the_case(path, b, None)


@pytest.mark.thorough
@families
@pytest.mark.parametrize(
    ('rows', 'dtype', 'bound'),
    [
        pytest.param(1, torch.float32, BOUND, marks=pytest.mark.slow),
        (2, torch.float32, BOUND),
        pytest.param(2, torch.float16, 5e-3, marks=pytest.mark.slow),
    ],
)
def test_rows_of_different_lengths(family, rows, dtype, bound, layers):
    plain, by_kernels = both(tiny(family, dtype), layers)
    past = prefix_of(plain, rows)
    lengths = past['prefix_mask'].sum(dim=1)
    assert rows == 1 or lengths[0] != lengths[1]
    expected, _ = velocity_of(plain, past)
    ours, _ = velocity_of(by_kernels, past)
    assert relative_error(ours, expected) <= bound


@pytest.mark.thorough
@pytest.mark.parametrize('family', ['pi05', 'smolvla'])
def test_a_prefix_of_fewer_valid_tokens_is_laid_out_over_a_longer_one(family, layers):
    """Down to one token: parts without a key are nothing."""
    plain, by_kernels = both(tiny(family), layers)
    prepared = None
    for seed, shares in enumerate([(1.0, 1.0), (0.1, 0.1)]):
        past = prefix_of(plain, 2, shares, seed)
        found, again = velocity_of(by_kernels, past, into=prepared)
        assert prepared is None or again is prepared
        prepared = again
        assert relative_error(found, velocity_of(plain, past)[0]) <= BOUND


def test_what_is_behind_the_valid_keys_is_not_read(layers):
    plain, by_kernels = both(tiny('pi05'), layers)
    past = prefix_of(plain, 2)
    expected, _ = velocity_of(by_kernels, past)
    for name in ('past_key', 'past_value'):
        past[name] = past[name].clone()
        for row, valid in enumerate(past['prefix_mask']):
            past[name][:, row, :, ~valid] = torch.nan
    assert torch.equal(velocity_of(by_kernels, past)[0], expected)
    assert velocity_of(plain, past)[0].isnan().any()


def test_every_action_may_have_its_own_flow_time(layers):
    plain, by_kernels = both(tiny('pi05'), layers)
    past, horizon = prefix_of(plain, 2), plain.dims.horizon
    table = plain.time_conditioning(torch.linspace(0.0, 1.0, horizon))[None]
    x = torch.randn(2, horizon, plain.dims.action_dim, generator=torch.Generator().manual_seed(1))
    expected, ours = (
        network.velocity(x, network.prepare_prefix(past), network.split_conditioning(table)).clone()
        for network in (plain, by_kernels)
    )
    assert relative_error(ours, expected) <= BOUND
