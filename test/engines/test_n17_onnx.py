"""GR00T N1.7's reference cases on ONNX Runtime."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from groot_n17_cases import FAMILY, load_n17_case, n17_entries
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
    ('path', 'b'), list(n17_entries()), ids=lambda value: getattr(value, 'stem', value)
)


@lru_cache
def onnx_folder(path: Path, b: int) -> Path:
    """A batch entry's network as ONNX files, with padding behind the prompt."""
    case = load_n17_case(path, b, padding=3)
    return onnx_of_network(FAMILY, case.network, denoise_steps=case.steps)[0]


def step_inputs(path: Path, b: int) -> StepInputs:
    case = load_n17_case(path, b, padding=3)
    dims = case.network.dims
    return StepInputs(
        x=case.tensors['noise'][b].numpy(),
        row_weight=np.ones(1, np.float32),
        plan=np.zeros((dims.horizon, dims.action_dim), np.float32),
        plan_weight=np.zeros((case.steps, dims.horizon), np.float32),
        rows={'state': case.state()['state'].numpy()},
    )


@entries
def test_velocities_and_chunk_equal_the_reference(path: Path, b: int):
    case, folder = load_n17_case(path, b, padding=3), onnx_folder(path, b)
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
        if case.valid.all():
            velocity = -engine.read_velocity()[0]
            assert relative_error(velocity, case.tensors['v_t'][k, b]) <= BOUND, k
    assert relative_error(engine.read_x(), case.actions()) <= BOUND
    engine.close()


@entries
def test_vision_and_prefix_equal_the_network_s(path: Path, b: int):
    case, folder = load_n17_case(path, b, padding=3), onnx_folder(path, b)
    tokens = np.concatenate(
        [
            run_graph(folder, 'vision', {'pixels': one[None].numpy()})['image_tokens']
            for one in case.pixels
        ]
    )
    width, cameras = case.network.dims.language.width, case.description['cameras']
    features = case.tensors['image_features'].unflatten(0, (-1, tokens.shape[1]))
    reference = features[b * cameras : (b + 1) * cameras]
    assert relative_error(tokens[..., :width], reference) <= BOUND
    rows = {name: value.numpy() for name, value in case.rows().items()}
    past = run_graph(
        folder, 'prefix', {'image_tokens': tokens, 'image_mask': case.visible.numpy(), **rows}
    )
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
def test_the_one_file_gives_the_reference_chunk(path: Path, b: int):
    case, folder = load_n17_case(path, b, padding=3), onnx_folder(path, b)
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
    assert relative_error(chunk, case.actions()) <= BOUND
