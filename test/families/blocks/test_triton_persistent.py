"""The expert in one kernel, interpreted on a CPU stage by stage, beside the fused operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_networks import FUSED, prefix_of, tiny, velocity_of
from network_cases import relative_error
from triton_package import interpreted, needs_triton  # noqa: F401

pytestmark = [needs_triton, pytest.mark.usefixtures('interpreted')]

BOUND = 1e-5


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture
def persistent(monkeypatch):
    """The module under test, in small tiles, so that tiny networks have several of each."""
    from vla_runtime.families.blocks import triton_persistent

    for name in (
        'ROWS',
        'INNER',
        'GATE_PAIRS',
        'OUT_OUTPUTS',
        'OUT_INPUTS',
        'DOWN_OUTPUTS',
        'DOWN_INPUTS',
        'QUERIES',
        'KEYS',
        'PART',
    ):
        monkeypatch.setattr(triton_persistent, name, 16)
    return triton_persistent


def both(network: Any, module: Any) -> tuple[Any, Any]:
    """The fused network with operators and in one kernel, on the same weights."""
    kind = FUSED[network.family.name]
    plain, persistent = kind(network, True), kind(network, True)
    persistent.expert_type = module.PersistentExpert
    return plain, persistent


@pytest.mark.parametrize(
    ('family', 'rows', 'dtype', 'bound'),
    [
        ('pi05', 1, torch.float32, BOUND),
        ('pi05', 2, torch.float32, BOUND),
        ('pi05', 1, torch.float16, 5e-3),
        # Plain norms, a mask in the suffix; layers that differ, which run as before.
        ('pi0', 2, torch.float32, BOUND),
        pytest.param('smolvla', 1, torch.float32, BOUND, marks=pytest.mark.slow),
    ],
)
def test_velocities_are_those_of_the_operators(family, rows, dtype, bound, persistent):
    plain, ours = both(tiny(family, dtype), persistent)
    past = prefix_of(plain, rows)
    expected, _ = velocity_of(plain, past)
    found, expert = velocity_of(ours, past)
    assert relative_error(found, expected) <= bound
    assert expert._alike == (family != 'smolvla')
    if expert._alike:
        assert int(expert._failed) == 0
        # The second step finds what the first has left.
        assert torch.equal(velocity_of(ours, past, into=expert)[0], found)


def test_one_program_runs_all_stages_in_one_launch(persistent, monkeypatch):
    plain, ours = both(tiny('pi05'), persistent)
    past = prefix_of(plain, 2)
    monkeypatch.setattr(persistent, '_multiprocessors', lambda device: 1)
    launches = persistent.PersistentExpert._launches
    monkeypatch.setattr(
        persistent.PersistentExpert, '_launches', lambda self, at_once: launches(self, True)
    )
    found, expert = velocity_of(ours, past)
    assert relative_error(found, velocity_of(plain, past)[0]) <= BOUND
    assert len(expert._launches(True)) == 1


def test_a_program_that_waits_in_vain_gives_up_and_nothing_is_a_number(persistent, monkeypatch):
    """Two programs one after the other: the first waits for the second, which has not begun."""
    plain, ours = both(tiny('pi05'), persistent)
    past = prefix_of(plain, 1)
    monkeypatch.setattr(persistent, 'LIMIT', 3)
    monkeypatch.setattr(persistent, '_multiprocessors', lambda device: 2)
    launches = persistent.PersistentExpert._launches
    monkeypatch.setattr(
        persistent.PersistentExpert, '_launches', lambda self, at_once: launches(self, True)
    )
    found, expert = velocity_of(ours, past)
    assert int(expert._failed) > 0
    assert found.isnan().any()
    # The next step begins anew.
    monkeypatch.setattr(persistent, '_multiprocessors', lambda device: 1)
    expert._programs = 1
    again, _ = velocity_of(ours, past, into=expert)
    assert relative_error(again, velocity_of(plain, past)[0]) <= BOUND


def test_actions_with_flow_times_of_their_own_run_in_the_kernels_of_before(persistent):
    plain, ours = both(tiny('pi05'), persistent)
    past, horizon = prefix_of(plain, 1), plain.dims.horizon
    table = plain.time_conditioning(torch.linspace(0.0, 1.0, horizon))[None]
    x = torch.randn(1, horizon, plain.dims.action_dim, generator=torch.Generator().manual_seed(1))
    expected, found = (
        fused.velocity(x, fused.prepare_prefix(past, 1), fused.split_conditioning(table)).clone()
        for fused in (plain, ours)
    )
    assert relative_error(found, expected) <= BOUND
