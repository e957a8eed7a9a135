"""The networks of Multi-Task DiT against LeRobot's own numbers, on both engines to the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from multi_task_dit_cases import load_multi_task_dit_case
from network_cases import each_case, each_entry, relative_error
from sampled_chunks import chunks

from vla_runtime.family.listing import find_family
from vla_runtime.family.step_schedule import stage_times
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
        of, past, own = case.tensors, case.prefix(b), case.samplings[0]
        network = case.network_of(own)
        for k, t in enumerate(of['t']):
            times = t[None].float()
            features = case.network.transformer.time_features(times)
            assert relative_error(features[0], of['time_features'][k]) <= BOUND
            # A flow of ours runs the other way.
            sign, times = (1, times) if own.scheduler is not None else (-1, 1 - times)
            table = network.time_conditioning(times)
            predicted = sign * network.velocity(of['x_t'][k, b][None], past, table)
            assert relative_error(predicted[0], of['model_output'][k, b]) <= BOUND, k


@entries
def test_flow_times_are_the_references(path: Path, b: int):
    case = load_multi_task_dit_case(path)
    for sampling in case.samplings:
        times, dt, updates = sampling.schedule
        seen = stage_times(case.network_of(sampling).dims, times, dt)
        if updates is None:
            # The middle of a Runge-Kutta step is looked at twice.
            seen = 1 - (seen[:, [0, 1, 1, 2]] if seen.shape[1] == 3 else seen)
        expected = case.tensors[f'{sampling.prefix}t']
        assert relative_error(torch.from_numpy(seen.reshape(-1)), expected) <= 1e-6, sampling.name


@pytest.mark.parametrize('backend', ['torch', 'onnxruntime'])
@entries
def test_the_chunk_of_every_sampling_equals_the_reference(path: Path, b: int, backend: str):
    case = load_multi_task_dit_case(path)
    for sampling, chunk in chunks(case, b, backend):
        expected = case.tensors[f'{sampling.prefix}trajectory'][b]
        assert relative_error(chunk, expected) <= BOUND, sampling.name
