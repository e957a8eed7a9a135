"""ACT's reference cases on ONNX Runtime, network by network and as one file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from act_cases import load_act_case
from network_cases import each_entry, relative_error
from onnx_bundles import onnx_of_network, run_graph

from vla_runtime.bundle.onnx_files import vision_names
from vla_runtime.bundle.schema import CameraSpec
from vla_runtime.engines.onnx.engine import OnnxEngine
from vla_runtime.engines.protocol import StepInputs
from vla_runtime.family.declaration import distinct_image_sizes

pytestmark = pytest.mark.cases

# Relative to the largest value.
BOUND = 1e-4

entries = each_entry('act')


@lru_cache
def onnx_folder(path: Path) -> Path:
    """Return the folder of a case's ONNX files."""
    case = load_act_case(path)
    cameras = tuple(CameraSpec(f'camera_{i}') for i in case.cameras)
    return onnx_of_network('act', case.network, cameras=cameras)[0]


@entries
def test_each_network_equals_the_reference(path: Path, b: int):
    case, folder = load_act_case(path), onnx_folder(path)
    dims = case.network.dims
    sizes = distinct_image_sizes(dims)
    names = dict(zip(sizes, vision_names(len(sizes)), strict=True))
    tokens = np.zeros(case.image_tokens(b).shape, np.float32)
    for i, (pixels, (height, width)) in enumerate(zip(case.pixels(b), dims.map_sizes, strict=True)):
        name = names[tuple(pixels.shape[1:])]
        (found,) = run_graph(folder, Path(name).stem, {'pixels': pixels[None].numpy()})[
            'image_tokens'
        ]
        tokens[i, : len(found)] = found
        expected = case.tensors[f'camera_features_{i}'][b]
        assert relative_error(found.T.reshape(-1, height, width), expected) <= BOUND
    given = {'image_mask': case.visible().numpy(), 'state': case.state(b).numpy()}
    past = run_graph(folder, 'prefix', {'image_tokens': tokens, **given})
    for name, expected in case.prefix(b).items():
        assert relative_error(past[name].astype(np.float32), expected.float()) <= BOUND, name


@entries
def test_the_chunk_of_the_engine_equals_the_reference(path: Path, b: int):
    case, folder = load_act_case(path), onnx_folder(path)
    dims = case.network.dims
    engine = OnnxEngine('act', dims, folder, device='cpu', precision='float32', max_rows=1)
    engine.set_schedule(np.ones(1), -1.0)
    for camera, pixels in enumerate(case.pixels(b)):
        engine.encode_image(camera, pixels.numpy())
    engine.encode_prefix(case.visible().numpy(), {'state': case.state(b).numpy()})
    chunk = np.zeros((dims.horizon, dims.action_dim), np.float32)
    engine.load_step_inputs(
        StepInputs(
            x=chunk,
            row_weight=np.ones(1, np.float32),
            plan=chunk,
            plan_weight=np.zeros((1, dims.horizon), np.float32),
        )
    )
    engine.run_steps()
    assert relative_error(engine.read_x(), case.tensors['actions'][b]) <= BOUND
    engine.close()


@entries
def test_the_one_file_gives_the_reference_chunk(path: Path, b: int):
    case, folder = load_act_case(path), onnx_folder(path)
    dims = case.network.dims
    pixels = [image.numpy() for image in case.pixels(b)]
    images = {'pixels': np.stack(pixels)} if len({p.shape for p in pixels}) == 1 else {}
    images = images or {f'pixels_{i}': image[None] for i, image in enumerate(pixels)}
    chunk = np.zeros((1, dims.horizon, dims.action_dim), np.float32)
    values = {
        **images,
        'image_mask': case.visible().numpy(),
        'state': case.state(b).numpy(),
        'x': chunk,
        'time_conditioning': np.zeros((1, 1), np.float32),
        't': np.ones(1, np.float32),
        'dt': np.asarray(-1.0, np.float32),
        'row_weight': np.ones(1, np.float32),
        'plan': chunk,
        'plan_weight': np.zeros((1, 1, dims.horizon, 1), np.float32),
    }
    found = run_graph(folder, 'monolithic', values)['x_next'][0]
    assert relative_error(found, case.tensors['actions'][b]) <= BOUND
