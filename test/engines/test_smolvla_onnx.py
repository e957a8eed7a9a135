"""SmolVLA's reference cases on ONNX Runtime, network by network and as one file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from network_cases import each_entry, relative_error
from onnx_bundles import chunk_of_one_file, onnx_of_network, run_graph, tied_inputs, vision_of_each
from smolvla_cases import load_smolvla_case

from vla_runtime.engines.onnx.engine import OnnxEngine
from vla_runtime.engines.protocol import StepInputs
from vla_runtime.inference.denoise import flow_times

pytestmark = pytest.mark.cases

# Relative to the largest value.
BOUND = 5e-5

entries = each_entry('smolvla')


@lru_cache
def onnx_folder(path: Path) -> Path:
    """Return the folder of a case's ONNX files."""
    case = load_smolvla_case(path)
    return onnx_of_network('smolvla', case.network, denoise_steps=case.steps)[0]


def prefix_values(path: Path, b: int) -> dict[str, np.ndarray]:
    case = load_smolvla_case(path)
    _, image_mask = case.images(b)
    rows = {name: value.numpy() for name, value in case.rows(b).items()}
    return {'image_mask': image_mask.numpy(), **rows}


def step_inputs(path: Path, b: int, schedule: str | None) -> StepInputs:
    tensors = load_smolvla_case(path).tensors
    previous = tensors['rtc_previous_chunk'][b] if schedule else None
    return tied_inputs(tensors['noise'][b], load_smolvla_case(path).steps, previous, schedule)


@entries
def test_features_keys_and_values_equal_the_reference(path: Path, b: int):
    case, folder = load_smolvla_case(path), onnx_folder(path)
    pixels, _ = case.images(b)
    features = vision_of_each(folder, pixels)
    for i, ours in enumerate(features):
        assert relative_error(ours, case.tensors[f'image_features_{i}'][b]) <= BOUND
    past = run_graph(folder, 'prefix', {'image_tokens': features, **prefix_values(path, b)})
    valid = case.tensors['prefix_valid'][b]
    np.testing.assert_array_equal(past['prefix_mask'][0], valid.numpy())
    own = list(case.network.dims.self_layers)
    for name, theirs in (('self_key', 'prefix_keys'), ('self_value', 'prefix_values')):
        if own:
            reference = case.tensors[theirs][own][:, b : b + 1][..., valid, :]
            ours = torch.from_numpy(past[name])[..., valid, :]
            assert relative_error(ours, reference) <= BOUND, name
    expected = case.prefix(b)
    for name in ('cross_key', 'cross_value'):
        if name in expected:
            ours = torch.from_numpy(past[name])[..., valid, :]
            assert relative_error(ours, expected[name][..., valid, :]) <= BOUND, name


@entries
@pytest.mark.parametrize('schedule', [None, 'linear', 'exp'])
def test_velocities_and_chunks_equal_the_reference(path: Path, b: int, schedule: str | None):
    case, folder = load_smolvla_case(path), onnx_folder(path)
    engine = OnnxEngine(
        'smolvla', case.network.dims, folder, device='cpu', precision='float32', max_rows=1
    )
    pixels, image_mask = case.images(b)
    engine.set_schedule(flow_times(case.steps), -1 / case.steps)
    for camera in np.flatnonzero(image_mask.numpy()):
        engine.encode_image(int(camera), pixels[camera].numpy())
    values = prefix_values(path, b)
    engine.encode_prefix(values.pop('image_mask'), values)
    engine.load_step_inputs(step_inputs(path, b, schedule))
    for k in range(case.steps):
        engine.step(k)
        if schedule is None:
            velocity = engine.read_velocity()[0]
            assert relative_error(velocity, case.tensors['v_t'][k, b]) <= BOUND, k
    recorded = case.tensors[f'rtc_actions_{schedule}' if schedule else 'actions'][b]
    assert relative_error(engine.read_x(), recorded) <= BOUND
    engine.close()


@entries
def test_the_one_file_gives_the_reference_chunk(path: Path, b: int):
    case, folder = load_smolvla_case(path), onnx_folder(path)
    pixels, _ = case.images(b)
    values = {'pixels': pixels.numpy(), **prefix_values(path, b)}
    inputs = step_inputs(path, b, None)
    chunk = chunk_of_one_file(folder, 'smolvla', case.network.dims, case.steps, inputs, values)
    assert relative_error(chunk, case.tensors['actions'][b]) <= BOUND
