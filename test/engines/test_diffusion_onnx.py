"""Reference cases of Diffusion Policy on both engines: networks, and every sampler's chunk."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusion_cases import load_diffusion_case
from network_cases import each_entry, relative_error
from onnx_bundles import onnx_of_network, run_graph
from tiny_policy import tiny_spec

from vla_runtime.bundle.schema import CameraSpec
from vla_runtime.checkpoints.lerobot_folder import with_earlier_frames
from vla_runtime.engines.onnx.engine import OnnxEngine
from vla_runtime.engines.protocol import PolicyEngine, StepInputs
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.families.flow_network import build_network

pytestmark = pytest.mark.cases

# Relative to the largest value.
BOUND = 5e-5

entries = each_entry('diffusion')


@lru_cache
def onnx_folder(path: Path) -> Path:
    """Return the folder of a case's ONNX files."""
    case = load_diffusion_case(path)
    own = tuple(CameraSpec(f'camera_{i}') for i in case.cameras)
    cameras = with_earlier_frames(own, case.network.dims.observation_steps)
    images = tiny_spec('diffusion').images
    return onnx_of_network('diffusion', case.network, cameras=cameras, images=images)[0]


def engine_of(path: Path, backend: str) -> PolicyEngine:
    case = load_diffusion_case(path)
    dims = case.network.dims
    if backend == 'onnxruntime':
        folder = onnx_folder(path)
        return OnnxEngine('diffusion', dims, folder, device='cpu', precision='float32', max_rows=1)
    # A copy: an engine keeps and folds the network that it is given.
    network = build_network('diffusion', dims)
    network.load_state_dict(case.network.state_dict())
    return TorchEngine(network, max_rows=1)


@entries
def test_each_network_equals_the_reference(path: Path, b: int):
    case, folder = load_diffusion_case(path), onnx_folder(path)
    pixels = case.pixels(b)
    found = [run_graph(folder, 'vision', {'pixels': one[None].numpy()}) for one in pixels]
    tokens = np.concatenate([one['image_tokens'] for one in found])
    assert relative_error(tokens, case.image_tokens(b)) <= BOUND
    given = {'image_mask': case.visible().numpy(), 'state': case.state(b).numpy()}
    past = run_graph(folder, 'prefix', {'image_tokens': tokens, **given})
    with torch.inference_mode():
        expected = case.prefix(b)
    assert relative_error(past['modulation'], expected['modulation']) <= BOUND


@pytest.mark.parametrize('backend', ['torch', 'onnxruntime'])
@entries
def test_the_trajectory_of_every_sampler_equals_the_reference(path: Path, b: int, backend: str):
    case, engine = load_diffusion_case(path), engine_of(path, backend)
    for camera, pixels in enumerate(case.pixels(b)):
        engine.encode_image(camera, pixels.numpy())
    engine.encode_prefix(case.visible().numpy(), {'state': case.state(b).numpy()})
    engine.use_prefix(1)
    for sampling in case.samplings:
        scheduler, steps = sampling.scheduler, sampling.steps
        engine.set_schedule(scheduler.timesteps(steps), -1.0, scheduler.updates(steps))
        x = case.tensors[f'{sampling.prefix}x_t'][0, b].numpy()
        engine.load_step_inputs(
            StepInputs(
                x=x,
                row_weight=np.ones(1, np.float32),
                plan=np.zeros_like(x),
                plan_weight=np.zeros((steps, len(x)), np.float32),
                step_noise=case.step_noise(sampling, b),
            )
        )
        engine.run_steps()
        expected = case.tensors[f'{sampling.prefix}trajectory'][b]
        assert relative_error(engine.read_x(), expected) <= BOUND, sampling.name
    engine.close()
