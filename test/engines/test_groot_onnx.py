"""GR00T N1.5's reference cases on ONNX Runtime."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from groot_cases import FAMILY, groot_entries, load_groot_case
from network_cases import relative_error
from onnx_bundles import onnx_of_network, run_graph

from vla_runtime.bundle.schema import WEIGHTS_FILE
from vla_runtime.engines.onnx.engine import OnnxEngine
from vla_runtime.engines.protocol import StepInputs
from vla_runtime.families import read_time_table
from vla_runtime.inference.denoise import flow_times

pytestmark = pytest.mark.cases

# Relative to the largest value.
BOUND = 1e-4

entries = pytest.mark.parametrize(
    ('path', 'b'), list(groot_entries()), ids=lambda value: getattr(value, 'stem', value)
)


@lru_cache
def onnx_folder(path: Path, b: int) -> Path:
    """A batch entry's network as ONNX files, with padding behind the prompt."""
    case = load_groot_case(path, b, padding=3)
    return onnx_of_network(FAMILY, case.network, denoise_steps=case.steps)[0]


def step_inputs(path: Path, b: int) -> StepInputs:
    case = load_groot_case(path, b, padding=3)
    dims = case.network.dims
    return StepInputs(
        x=case.tensors['noise'][b].numpy(),
        row_weight=np.ones(1, np.float32),
        plan=np.zeros((dims.horizon, dims.action_dim), np.float32),
        plan_weight=np.zeros((case.steps, dims.horizon), np.float32),
        rows={'state': case.state()['state'].numpy()},
    )


@entries
def test_features_keys_and_values_equal_the_reference(path: Path, b: int):
    case, folder = load_groot_case(path, b, padding=3), onnx_folder(path, b)
    features = np.concatenate(
        [
            run_graph(folder, 'vision', {'pixels': one[None].numpy()})['image_tokens']
            for one in case.pixels
        ]
    )
    cameras = len(features)
    reference = case.tensors['image_features'][b * cameras : (b + 1) * cameras]
    assert relative_error(features, reference) <= BOUND
    if not case.valid.all():
        pytest.skip('the head of the training code does not mask padding')
    rows = {name: value.numpy() for name, value in case.rows().items()}
    values = {'image_tokens': features, 'image_mask': case.visible.numpy(), **rows}
    past = run_graph(folder, 'prefix', values)
    seen = past['prefix_mask'][0]
    assert seen.sum() == case.valid.sum()
    for ours, theirs in (('cross_key', 'cross_keys'), ('cross_value', 'cross_values')):
        found = torch.from_numpy(past[ours][..., seen, :])
        assert relative_error(found, case.tensors[theirs][:, b : b + 1]) <= BOUND, ours


@entries
def test_velocities_and_chunk_equal_the_reference(path: Path, b: int):
    case, folder = load_groot_case(path, b, padding=3), onnx_folder(path, b)
    if not case.valid.all():
        pytest.skip('the head of the training code does not mask padding')
    engine = OnnxEngine(
        FAMILY, case.network.dims, folder, device='cpu', precision='float32', max_rows=1
    )
    engine.set_schedule(flow_times(case.steps), -1 / case.steps)
    for camera, pixels in enumerate(case.pixels):
        engine.encode_image(camera, pixels.numpy())
    engine.encode_prefix(
        case.visible.numpy(), {name: value.numpy() for name, value in case.rows().items()}
    )
    engine.load_step_inputs(step_inputs(path, b))
    for k in range(case.steps):
        engine.step(k)
        velocity = -engine.read_velocity()[0]
        assert relative_error(velocity, case.tensors['v_t'][k, b]) <= BOUND, k
    assert relative_error(engine.read_x(), case.tensors['actions'][b]) <= BOUND
    engine.close()


@entries
def test_the_one_file_gives_the_reference_chunk(path: Path, b: int):
    case, folder = load_groot_case(path, b, padding=3), onnx_folder(path, b)
    if not case.valid.all():
        pytest.skip('the head of the training code does not mask padding')
    inputs, times = step_inputs(path, b), flow_times(case.steps)
    table = read_time_table(FAMILY, case.network.dims, folder / WEIGHTS_FILE)(times)
    values = {
        **{name: value.numpy() for name, value in case.rows().items()},
        **inputs.rows,
        'image_mask': case.visible.numpy(),
        'pixels': case.pixels.numpy(),
        'x': inputs.x[None],
        'row_weight': inputs.row_weight,
        'plan': inputs.plan[None],
        'plan_weight': inputs.plan_weight[:, None, :, None],
        'time_conditioning': table,
        't': times.astype(np.float32),
        'dt': np.asarray(-1 / case.steps, dtype=np.float32),
    }
    chunk = run_graph(folder, 'monolithic', values)['x_next'][0]
    assert relative_error(chunk, case.tensors['actions'][b]) <= BOUND
