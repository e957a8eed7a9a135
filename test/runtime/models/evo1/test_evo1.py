"""Evo-1: padded actions, rows of flow times, what stays in float32."""

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
from tiny_policy import tiny_dims

from vla_runtime.declarations import evo1 as declaration
from vla_runtime.declarations.evo1 import EVO1
from vla_runtime.inference.denoise import flow_times
from vla_runtime.models.base.flow_network import empty_network
from vla_runtime.models.blocks.layers import matrix_names
from vla_runtime.models.evo1 import Evo1, time_rows
from vla_runtime.models.shapes.operation_counts import count_operations

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


def test_operations_of_the_published_policy_are_counted():
    counts = count_operations('evo1', EVO1)
    network = empty_network('evo1', EVO1)
    assert counts.matrices + counts.others == sum(p.numel() for p in network.parameters())
    # 1025 places of the tower: 2 operations a weight and place, and the scores.
    tower = sum(p.numel() for name, p in network.named_parameters() if 'vision.blocks' in name)
    scores = 4 * 24 * 1025**2 * 1024
    assert counts.vision.work(4).flops == pytest.approx(2 * 1025 * tower + scores, rel=0.02)


def test_what_is_not_a_large_matrix_stays_in_float32():
    network = empty_network('evo1', tiny_dims('evo1'))
    assert isinstance(network, Evo1)
    exact = set(dict(network.named_parameters())) - matrix_names(network)
    for name in (
        *('time_rows', 'action_positions', 'vision.class_token', 'vision.patch_embedding.weight'),
        *('state_encoder.fc1.weight', 'action_encoder.fc3.weight', 'velocity_head.fc2.weight'),
        *('vision.blocks.0.scale1', 'language.norm.weight', 'norm.weight'),
    ):
        assert name in exact, name
    assert {'pool.weight', 'blocks.0.attention.q.weight', 'blocks.0.mlp.fc1.weight'}.isdisjoint(
        exact
    )
