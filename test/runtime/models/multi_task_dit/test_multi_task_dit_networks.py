"""The networks of Multi-Task DiT against LeRobot's own numbers, on both engines to the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from multi_task_dit_cases import load_multi_task_dit_case
from network_cases import each_case, each_entry, relative_error

from vla_runtime.family.step_schedule import stage_times

pytestmark = pytest.mark.cases

# Relative to the largest value.
BOUND = 5e-5

entries = each_entry('multi_task_dit')
cases = each_case('multi_task_dit')


@entries
def test_every_prediction_equals_the_reference(path: Path, b: int):
    with torch.inference_mode():
        case = load_multi_task_dit_case(path)
        of, past, own = case.tensors, case.prefix(b), case.samplings[0]
        network = case.network_of(own)
        for k, t in enumerate(of['t']):
            times = t[None].float()
            features = case.network.transformer.time_features(times)
            assert relative_error(features[0], of['time_features'][k]) <= BOUND
            # A flow of ours runs the other way.
            sign, times = (1, times) if own.scheduler is not None else (-1, 1 - times)
            table = network.time_conditioning(times)
            predicted = sign * network.velocity(of['x_t'][k, b][None], past, table)
            assert relative_error(predicted[0], of['model_output'][k, b]) <= BOUND, k


@entries
def test_flow_times_are_the_references(path: Path, b: int):
    case = load_multi_task_dit_case(path)
    for sampling in case.samplings:
        times, dt, updates = sampling.schedule
        seen = stage_times(case.network_of(sampling).dims, times, dt)
        if updates is None:
            # The middle of a Runge-Kutta step is looked at twice.
            seen = 1 - (seen[:, [0, 1, 1, 2]] if seen.shape[1] == 3 else seen)
        expected = case.tensors[f'{sampling.prefix}t']
        assert relative_error(torch.from_numpy(seen.reshape(-1)), expected) <= 1e-6, sampling.name
