"""Chunks of our engines for everything that a sampled case recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import lru_cache
from pathlib import Path

import numpy as np
from onnx_bundles import onnx_of_network
from sampled_cases import SampledCase, Sampling
from tiny_policy import tiny_spec
from torch import Tensor

from vla_convert.checkpoints.lerobot_folder import with_earlier_frames
from vla_runtime.bundle.schema import CameraSpec
from vla_runtime.engines.onnx.engine import OnnxEngine
from vla_runtime.engines.protocol import PolicyEngine, StepInputs
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.models.base.flow_network import FlowNetwork, build_network


def chunks(case: SampledCase, b: int, backend: str) -> Iterator[tuple[Sampling, np.ndarray]]:
    """Every sampling of batch entry b, and the chunk (H, A) of our engine for it."""
    rows, pixels = arrays(case.rows(b)), case.pixels(b).numpy()
    for network, samplings in _by_network(case, b).items():
        with closing(_engine(network, backend, case.description['cameras'])) as engine:
            for camera, image in enumerate(pixels):
                engine.encode_image(camera, image)
            engine.encode_prefix(case.visible().numpy(), rows)
            engine.use_prefix(1)
            for sampling in samplings:
                yield sampling, _chunk(case, b, sampling, engine)


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in tensors.items()}


def _by_network(case: SampledCase, b: int) -> dict[FlowNetwork, list[Sampling]]:
    found: dict[FlowNetwork, list[Sampling]] = {}
    for sampling in case.samplings:
        found.setdefault(case.network_of(sampling, b), []).append(sampling)
    return found


def _chunk(case: SampledCase, b: int, sampling: Sampling, engine: PolicyEngine) -> np.ndarray:
    engine.set_schedule(*sampling.schedule)
    x, is_flow = case.noise(sampling, b), sampling.scheduler is None
    engine.load_step_inputs(
        StepInputs(
            x=x,
            row_weight=np.ones(1, np.float32),
            plan=np.zeros_like(x),
            plan_weight=np.zeros((sampling.steps, len(x)), np.float32),
            rows=arrays(case.head(b)),
            step_noise=None if is_flow else case.step_noise(sampling, b),
        )
    )
    engine.run_steps()
    return engine.read_x()


def _engine(network: FlowNetwork, backend: str, cameras: int) -> PolicyEngine:
    name, dims = network.family.name, network.dims
    if backend == 'onnxruntime':
        folder = onnx_files(network, cameras)
        return OnnxEngine(name, dims, folder, device='cpu', precision='float32', max_rows=1)
    # A copy: an engine keeps and folds the network that it is given.
    own = build_network(name, dims)
    own.load_state_dict(network.state_dict())
    return TorchEngine(own, max_rows=1)


@lru_cache
def onnx_files(network: FlowNetwork, cameras: int) -> Path:
    """Return the folder of a network's ONNX files, of so many cameras with their history."""
    own = tuple(CameraSpec(f'camera_{i}') for i in range(cameras))
    steps = network.dims.cameras // cameras
    images = tiny_spec(network.family.name).images
    return onnx_of_network(
        network.family.name, network, cameras=with_earlier_frames(own, steps), images=images
    )[0]
