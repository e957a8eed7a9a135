"""Evo-1's networks against LeRobot's own numbers, and against themselves without a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from evo1_cases import load_evo1_case
from network_cases import (
    each_case,
    each_entry,
    largest_error,
)

from vla_runtime.families.evo1 import declaration
from vla_runtime.families.evo1.networks import time_rows
from vla_runtime.inference.denoise import flow_times

pytestmark = pytest.mark.cases


entries = each_entry('evo1')
cases = each_case('evo1')


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@entries
def test_padded_actions_stay_out(path: Path, b: int):
    case = load_evo1_case(path, b)
    network, real = case.network, case.network.dims.real_actions
    if real == network.dims.action_dim:
        pytest.skip('no padded action dimensions')
    x = case.of('noise')[None].clone()
    conditioning = network.time_conditioning(torch.tensor([0.5]))
    velocity = network.velocity(x, case.prefix(), conditioning)
    x[..., real:] = float('nan')
    assert torch.equal(network.velocity(x, case.prefix(), conditioning), velocity)
    assert not velocity[..., real:].any()


@cases
def test_time_rows_and_embedding_equal_the_reference(path: Path):
    case = load_evo1_case(path, 0)
    times = torch.tensor(flow_times(case.steps), dtype=torch.float32)
    assert torch.equal(1 - times, case.tensors['t'].float())
    assert torch.equal(time_rows(times), case.tensors['t_index'])
    assert largest_error(case.network.time_conditioning(times), case.tensors['time_embedding']) == 0


def test_time_rows_of_every_schedule_are_computed_as_from_whole_numbers():
    for steps in range(1, 101):
        times = flow_times(steps)
        expected = [min(int(i / steps * 999), 999) for i in range(steps)]
        assert declaration.time_rows(times).tolist() == expected, steps
        found = time_rows(torch.tensor(times, dtype=torch.float32))
        assert found.tolist() == expected, steps
    # Known actions are at flow time 0: the last row.
    assert declaration.time_rows(torch.zeros(1).numpy()).tolist() == [999]
    assert time_rows(torch.zeros(1)).tolist() == [999]
