"""The networks of Multi-Task DiT against LeRobot's own numbers, on both engines to the end."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from multi_task_dit_cases import load_multi_task_dit_case
from network_cases import each_case, each_entry, relative_error
from onnx_bundles import onnx_of_network
from tiny_policy import tiny_spec

from vla_runtime.bundle.schema import CameraSpec
from vla_runtime.checkpoints.lerobot_folder import with_earlier_frames
from vla_runtime.engines.onnx.engine import OnnxEngine
from vla_runtime.engines.protocol import PolicyEngine, StepInputs
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.families.flow_network import build_network
from vla_runtime.family.listing import find_family
from vla_runtime.processing.tokenizer import Tokenizer

pytestmark = pytest.mark.cases

# Relative to the largest value.
BOUND = 5e-5

entries = each_entry('multi_task_dit')
cases = each_case('multi_task_dit')


@cases
def test_prompts_are_tokenised_as_in_training(path: Path):
    case = load_multi_task_dit_case(path)
    (layout,) = find_family('multi_task_dit').templates.values()
    vocabulary = Tokenizer.load(
        path.with_suffix('.tokenizer.json'), bos=layout.bos, closing=layout.closing
    )
    for b, task in enumerate(case.description['tasks']):
        tokens, mask = vocabulary.encode(task, case.network.dims.prompt_length)
        expected = case.tensors['token_mask'][b].numpy()
        assert np.array_equal(mask, expected)
        assert np.array_equal(tokens[mask], case.tensors['tokens'][b].numpy()[expected])


@entries
def test_images_and_prompt_equal_the_reference_layer_by_layer(path: Path, b: int):
    with torch.inference_mode():
        case = load_multi_task_dit_case(path)
        network, of = case.network, case.tensors
        rows, steps = case.rows(b), case.description['n_obs_steps']
        vision, text = network.vision, network.text
        own = case.description['cameras']
        for place, at in enumerate(reversed(range(steps))):
            framed = vision.framing(case.pixels(b)[place * own][None])
            assert relative_error(framed[0], of['model_image_0'][b, at]) <= BOUND
            first = vision.class_embedding[None, None]
            x = torch.cat([first, vision.patch_embedding(framed)], dim=1)
            x = vision.norm(x + vision.position_embedding)
            assert relative_error(x[0], of['vision_embeddings_0'][b, at]) <= BOUND
            for layer, block in enumerate(vision.blocks):
                x = block(x)
                assert relative_error(x[0], of['vision_layers_0'][layer, b, at]) <= BOUND
        features = network.image_features(vision(case.pixels(b)), case.visible())
        expected = [of[f'camera_features_{camera}'][b] for camera in case.cameras]
        assert relative_error(features, torch.cat(expected, dim=1)) <= BOUND
        said = text(rows['tokens'], rows['token_mask'])
        assert relative_error(said[0], of['text_features'][b]) <= BOUND
        observed = network.observation(features, rows['state'], said)
        assert relative_error(observed[0], of['conditioning'][b]) <= BOUND


@entries
def test_every_prediction_equals_the_reference(path: Path, b: int):
    with torch.inference_mode():
        case = load_multi_task_dit_case(path)
        of, past = case.tensors, case.prefix(b)
        for k, t in enumerate(of['t']):
            times = t[None].float()
            features = case.network.transformer.time_features(times)
            assert relative_error(features[0], of['time_features'][k]) <= BOUND
            table = case.network.time_conditioning(times)
            predicted = case.network.velocity(of['x_t'][k, b][None], past, table)
            assert relative_error(predicted[0], of['model_output'][k, b]) <= BOUND, k


@lru_cache
def onnx_folder(path: Path) -> Path:
    """Return the folder of a case's ONNX files."""
    case = load_multi_task_dit_case(path)
    own = tuple(CameraSpec(f'camera_{i}') for i in case.cameras)
    cameras = with_earlier_frames(own, case.network.dims.observation_steps)
    images = tiny_spec('multi_task_dit').images
    return onnx_of_network('multi_task_dit', case.network, cameras=cameras, images=images)[0]


def engine_of(path: Path, backend: str) -> PolicyEngine:
    case = load_multi_task_dit_case(path)
    dims, name = case.network.dims, 'multi_task_dit'
    if backend == 'onnxruntime':
        folder = onnx_folder(path)
        return OnnxEngine(name, dims, folder, device='cpu', precision='float32', max_rows=1)
    # A copy: an engine keeps and folds the network that it is given.
    network = build_network(name, dims)
    network.load_state_dict(case.network.state_dict())
    return TorchEngine(network, max_rows=1)


@pytest.mark.parametrize('backend', ['torch', 'onnxruntime'])
@entries
def test_the_trajectory_of_every_sampler_equals_the_reference(path: Path, b: int, backend: str):
    case, engine = load_multi_task_dit_case(path), engine_of(path, backend)
    for camera, pixels in enumerate(case.pixels(b)):
        engine.encode_image(camera, pixels.numpy())
    rows = {name: value.numpy() for name, value in case.rows(b).items()}
    engine.encode_prefix(case.visible().numpy(), rows)
    engine.use_prefix(1)
    for sampling in case.samplings:
        scheduler, steps = sampling.scheduler, sampling.steps
        engine.set_schedule(scheduler.timesteps(steps), -1.0, scheduler.updates(steps))
        x = case.tensors['noise'][b].numpy()
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
