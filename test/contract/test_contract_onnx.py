"""What every family's exported files must satisfy: the training code's numbers on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from contract_cases import Entry, assert_close, bound_of, each_entry, image_tokens_of, load, visible
from family_contracts.declaration import Case
from network_cases import relative_error
from onnx_bundles import onnx_of_network, run_graph, tied_inputs

from vla_runtime.bundle.onnx_files import vision_names
from vla_runtime.bundle.schema import WEIGHTS_FILE, CameraSpec
from vla_runtime.engines.onnx.engine import OnnxEngine
from vla_runtime.engines.protocol import StepInputs
from vla_runtime.family.declaration import distinct_image_sizes
from vla_runtime.family.listing import find_family, read_time_table
from vla_runtime.inference.denoise import flow_times
from vla_runtime.models.base.flow_network import FlowNetwork

pytestmark = pytest.mark.cases


def bound(entry: Entry) -> float:
    return max(5e-5, 2 * bound_of(entry))


def folder_of(entry: Entry) -> Path:
    """The case's network as ONNX files."""
    case = load(entry)
    return _files_of(entry[0], case.network, len(case.pixels), case.steps)


@lru_cache
def _files_of(family: str, network: FlowNetwork, cameras: int, steps: int) -> Path:
    """Entries of a case may share a network."""
    names = tuple(CameraSpec(f'camera_{i}') for i in range(cameras))
    return onnx_of_network(family, network, cameras=names, denoise_steps=steps)[0]


def given(case: Case) -> dict[str, np.ndarray]:
    """Mask of the images and the prefix's rows."""
    return {
        'image_mask': case.image_mask.numpy(),
        **{name: value.numpy() for name, value in case.rows.items()},
    }


def step_inputs(case: Case, schedule: str | None = None) -> StepInputs:
    dims = case.network.dims
    noise = torch.zeros(dims.horizon, dims.action_dim) if case.noise is None else case.noise
    tied = case.tied[schedule] if schedule else None
    of_plan = (tied.previous, schedule, tied.overlap) if tied else ()
    found = tied_inputs(noise, case.steps, *of_plan)
    rows = {name: value.numpy() for name, value in case.head.items()}
    return StepInputs(found.x, found.row_weight, found.plan, found.plan_weight, rows)


def times_of(entry: Entry) -> np.ndarray:
    case = load(entry)
    return flow_times(case.steps) if find_family(entry[0]).head == 'flow' else np.ones(1)


@pytest.fixture
def engine(entry: Entry) -> Iterator[OnnxEngine]:
    """The case's network on ONNX Runtime, its prefix encoded."""
    case, dims = load(entry), load(entry).network.dims
    opened = OnnxEngine(
        entry[0], dims, folder_of(entry), device='cpu', precision='float32', max_rows=1
    )
    with closing(opened) as engine:
        engine.set_schedule(times_of(entry), -1 / case.steps)
        for camera in np.flatnonzero(case.image_mask.numpy()):
            engine.encode_image(int(camera), case.pixels[camera].numpy())
        rows = given(case)
        engine.encode_prefix(rows.pop('image_mask'), rows)
        yield engine


@each_entry()
def test_vision_and_prefix_equal_the_network_and_the_reference(entry: Entry):
    case, folder = load(entry), folder_of(entry)
    sizes = distinct_image_sizes(case.network.dims)
    names = dict(zip(sizes, vision_names(len(sizes)), strict=True))
    tokens = image_tokens_of(case).numpy().copy()
    for camera, pixels in enumerate(case.pixels):
        graph = Path(names[tuple(pixels.shape[1:])]).stem
        (found,) = run_graph(folder, graph, {'pixels': pixels[None].numpy()})['image_tokens']
        tokens[camera, : len(found)] = found
    for camera, expected in enumerate(case.image_tokens):
        found = tokens[camera, : len(expected), : expected.shape[1]]
        assert relative_error(found, expected) <= bound(entry), camera
    files = run_graph(folder, 'prefix', {'image_tokens': tokens, **given(case)})
    past = {name: torch.from_numpy(value) for name, value in files.items()}
    own = case.network.prefix(image_tokens_of(case), case.image_mask, **case.rows)
    assert past.keys() == own.keys()
    for name, value in own.items():
        if value.dtype == torch.bool:
            assert torch.equal(past[name], value), name
        else:
            assert_close(visible(past, name), visible(own, name), bound(entry), name)
    for name, expected in case.past.items():
        assert_close(visible(past, name), expected, bound(entry), name)


@each_entry('flow', 'single')
def test_velocities_and_chunks_of_the_engine_equal_the_reference(entry: Entry, engine: OnnxEngine):
    case = load(entry)
    if case.actions is None:
        pytest.skip('the training code sees padding in this case')
    chunks = {None: case.actions} | {name: tied.actions for name, tied in case.tied.items()}
    for schedule, expected in chunks.items():
        engine.load_step_inputs(step_inputs(case, schedule))
        if find_family(entry[0]).head != 'flow':
            engine.run_steps()
        else:
            for k in range(case.steps):
                engine.step(k)
                if schedule is None and case.velocities is not None:
                    error = relative_error(engine.read_velocity()[0], case.velocities[k])
                    assert error <= bound(entry), k
        assert relative_error(engine.read_x(), expected) <= bound(entry), schedule


@each_entry('flow', 'single')
def test_the_one_file_gives_the_reference_chunk(entry: Entry):
    case, folder = load(entry), folder_of(entry)
    if case.actions is None:
        pytest.skip('the training code sees padding in this case')
    pixels = [image.numpy() for image in case.pixels]
    images = {'pixels': np.stack(pixels)} if len({p.shape for p in pixels}) == 1 else {}
    images = images or {f'pixels_{i}': image[None] for i, image in enumerate(pixels)}
    times, inputs = times_of(entry), step_inputs(case)
    values = {
        **images,
        **given(case),
        **inputs.rows,
        'x': inputs.x[None],
        'row_weight': inputs.row_weight,
        'plan': inputs.plan[None],
        'plan_weight': inputs.plan_weight[:, None, :, None],
        'time_conditioning': read_time_table(entry[0], case.network.dims, folder / WEIGHTS_FILE)(
            times
        ),
        't': times.astype(np.float32),
        'dt': np.asarray(-1 / case.steps, dtype=np.float32),
    }
    found = run_graph(folder, 'monolithic', values)['x_next'][0]
    assert relative_error(found, case.actions) <= bound(entry)
