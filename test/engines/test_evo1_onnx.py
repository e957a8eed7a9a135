"""Evo-1's reference cases on ONNX Runtime, network by network and as one file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from evo1_cases import load_evo1_case
from network_cases import each_entry, relative_error
from onnx_bundles import chunk_of_one_file, onnx_of_network, run_graph, tied_inputs, vision_of_each

from vla_runtime.engines.onnx.engine import OnnxEngine
from vla_runtime.engines.protocol import StepInputs
from vla_runtime.inference.denoise import flow_times

pytestmark = pytest.mark.cases

# Relative to the largest value.
BOUND = 1e-4

entries = each_entry('evo1')


@lru_cache
def onnx_folder(path: Path, b: int) -> Path:
    """Return the folder of a case's ONNX files."""
    case = load_evo1_case(path, b)
    return onnx_of_network('evo1', case.network, denoise_steps=case.steps)[0]


def prefix_values(path: Path, b: int) -> dict[str, np.ndarray]:
    case = load_evo1_case(path, b)
    rows = {name: value.numpy() for name, value in case.rows().items()}
    return {'image_mask': case.image_mask.numpy(), **rows}


def step_inputs(path: Path, b: int, schedule: str | None) -> StepInputs:
    case = load_evo1_case(path, b)
    noise = case.of('noise').clone()
    noise[:, case.network.dims.real_actions :] = 0.0
    previous = case.of('rtc_previous_chunk') if schedule else None
    return tied_inputs(noise, case.steps, previous, schedule)


@pytest.mark.thorough
@entries
def test_features_keys_and_values_equal_the_reference(path: Path, b: int):
    case, folder = load_evo1_case(path, b), onnx_folder(path, b)
    features = vision_of_each(folder, case.pixels)
    views = slice(b * case.views, (b + 1) * case.views)
    assert relative_error(features, case.tensors['image_features'][views]) <= BOUND
    past = run_graph(folder, 'prefix', {'image_tokens': features, **prefix_values(path, b)})
    expected = case.prefix()
    valid = expected['prefix_mask'][0]
    np.testing.assert_array_equal(past['prefix_mask'][0], valid.numpy())
    for name in ('cross_key', 'cross_value'):
        ours = torch.from_numpy(past[name])[..., valid, :]
        assert relative_error(ours, expected[name][..., valid, :]) <= BOUND, name


@entries
@pytest.mark.parametrize('schedule', [None, 'linear', 'exp'])
def test_velocities_and_chunks_equal_the_reference(path: Path, b: int, schedule: str | None):
    case, folder = load_evo1_case(path, b), onnx_folder(path, b)
    if schedule and f'rtc_actions_{schedule}' not in case.tensors:
        pytest.skip('the case has no such chunks')
    engine = OnnxEngine(
        'evo1', case.network.dims, folder, device='cpu', precision='float32', max_rows=1
    )
    engine.set_schedule(flow_times(case.steps), -1 / case.steps)
    for camera in np.flatnonzero(case.image_mask.numpy()):
        engine.encode_image(int(camera), case.pixels[camera].numpy())
    values = prefix_values(path, b)
    engine.encode_prefix(values.pop('image_mask'), values)
    engine.load_step_inputs(step_inputs(path, b, schedule))
    for k in range(case.steps):
        engine.step(k)
        if schedule is None:
            velocity = -engine.read_velocity()[0]
            assert relative_error(velocity, case.tensors['v_t'][k, b]) <= BOUND, k
    recorded = case.of(f'rtc_actions_{schedule}' if schedule else 'actions')
    assert relative_error(engine.read_x(), recorded) <= BOUND
    engine.close()


@entries
def test_the_one_file_gives_the_reference_chunk(path: Path, b: int):
    case, folder = load_evo1_case(path, b), onnx_folder(path, b)
    values = {'pixels': case.pixels.numpy(), **prefix_values(path, b)}
    inputs = step_inputs(path, b, None)
    chunk = chunk_of_one_file(folder, 'evo1', case.network.dims, case.steps, inputs, values)
    assert relative_error(chunk, case.of('actions')) <= BOUND
