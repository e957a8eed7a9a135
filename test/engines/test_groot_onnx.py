"""Reference cases of every GR00T on ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from groot_cases import N15, N16, N17, GrootCase, load_groot_case
from network_cases import each_entry, relative_error
from onnx_bundles import chunk_of_one_file, onnx_of_network, run_graph, tied_inputs, vision_of_each

from vla_runtime.engines.onnx.engine import OnnxEngine
from vla_runtime.engines.protocol import StepInputs
from vla_runtime.inference.denoise import flow_times

pytestmark = pytest.mark.cases

# Relative to the largest value.
BOUND = 5e-5

entries = each_entry(N15, N16, N17)


def padded_case(path: Path, b: int) -> GrootCase:
    """A case with padding behind the prompt."""
    return load_groot_case(path, b, padding=3)


@lru_cache
def onnx_folder(path: Path, b: int) -> Path:
    """A batch entry's network as ONNX files."""
    case = padded_case(path, b)
    return onnx_of_network(case.description['kind'], case.network, denoise_steps=case.steps)[0]


def prefix_values(case: GrootCase) -> dict[str, np.ndarray]:
    rows = {name: value.numpy() for name, value in case.rows().items()}
    return {'image_mask': case.visible.numpy(), **rows}


def step_inputs(case: GrootCase) -> StepInputs:
    inputs = tied_inputs(case.tensors['noise'][case.b], case.steps)
    return replace(inputs, rows={'state': case.state()['state'].numpy()})


@each_entry(N15)
def test_features_keys_and_values_equal_the_reference(path: Path, b: int):
    case, folder = padded_case(path, b), onnx_folder(path, b)
    features = vision_of_each(folder, case.pixels)
    cameras = len(features)
    reference = case.tensors['image_features'][b * cameras : (b + 1) * cameras]
    assert relative_error(features, reference) <= BOUND
    if not case.masks_padding:
        pytest.skip('the head of the training code does not mask padding')
    past = run_graph(folder, 'prefix', {'image_tokens': features, **prefix_values(case)})
    seen = past['prefix_mask'][0]
    assert seen.sum() == case.valid.sum()
    for ours, theirs in (('cross_key', 'cross_keys'), ('cross_value', 'cross_values')):
        found = torch.from_numpy(past[ours][..., seen, :])
        assert relative_error(found, case.tensors[theirs][:, b : b + 1]) <= BOUND, ours


@pytest.mark.thorough
@each_entry(N16, N17)
def test_vision_and_prefix_equal_the_network_s(path: Path, b: int):
    case, folder = padded_case(path, b), onnx_folder(path, b)
    tokens = vision_of_each(folder, case.pixels)
    width, cameras = case.network.dims.language.width, case.description['cameras']
    features = case.tensors['image_features']
    if features.ndim == 2:
        # N1.7's are those of all cameras in a row.
        features = features.unflatten(0, (-1, tokens.shape[1]))
    reference = features[b * cameras : (b + 1) * cameras]
    assert relative_error(tokens[..., :width], reference) <= BOUND
    past = run_graph(folder, 'prefix', {'image_tokens': tokens, **prefix_values(case)})
    expected = case.prefix()
    assert set(past) == set(expected)
    seen = {part: expected[f'{part}_seen'][0].numpy() for part in ('text', 'images')}
    for name, tensor in expected.items():
        if name.endswith('_seen'):
            np.testing.assert_array_equal(past[name], tensor.numpy())
            continue
        keep = seen[name.partition('_')[0]]
        found, wanted = past[name][..., keep, :], tensor[..., keep, :]
        assert relative_error(found, wanted) <= BOUND, name


@entries
def test_velocities_and_chunk_equal_the_reference(path: Path, b: int):
    case, folder = padded_case(path, b), onnx_folder(path, b)
    if case.description['kind'] == N15 and not case.masks_padding:
        pytest.skip('the head of the training code does not mask padding')
    kind, dims = case.description['kind'], case.network.dims
    engine = OnnxEngine(kind, dims, folder, device='cpu', precision='float32', max_rows=1)
    engine.set_schedule(flow_times(case.steps), -1 / case.steps)
    for camera, pixels in enumerate(case.pixels):
        engine.encode_image(camera, pixels.numpy())
    engine.encode_prefix(
        case.visible.numpy(), {name: value.numpy() for name, value in case.rows().items()}
    )
    engine.load_step_inputs(step_inputs(case))
    for k in range(case.steps):
        engine.step(k)
        if case.masks_padding:
            velocity = -engine.read_velocity()[0]
            assert relative_error(velocity, case.tensors['v_t'][k, b]) <= BOUND, k
    assert relative_error(engine.read_x(), case.actions()) <= BOUND
    engine.close()


@entries
def test_the_one_file_gives_the_reference_chunk(path: Path, b: int):
    case, folder = padded_case(path, b), onnx_folder(path, b)
    if case.description['kind'] == N15 and not case.masks_padding:
        pytest.skip('the head of the training code does not mask padding')
    values = {'pixels': case.pixels.numpy(), **prefix_values(case)}
    kind, dims = case.description['kind'], case.network.dims
    chunk = chunk_of_one_file(folder, kind, dims, case.steps, step_inputs(case), values)
    assert relative_error(chunk, case.actions()) <= BOUND
