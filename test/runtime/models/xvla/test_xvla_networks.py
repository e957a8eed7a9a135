"""The networks of X-VLA against LeRobot's own numbers, stage by stage and step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from network_cases import each_case, each_entry, random_network, relative_error
from tiny_policy import tiny_dims
from torch import Tensor
from xvla_cases import XvlaCase, load_xvla_case

from vla_runtime.family.noise_schedule import Renoising, advance
from vla_runtime.models.xvla import Xvla, as_map, as_tokens
from vla_runtime.processing.poses import from_matrix, to_matrix

pytestmark = pytest.mark.cases

# Relative to the largest value.
BOUND = 5e-5

entries = each_entry('xvla')
cases = each_case('xvla')


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def network_of(case: XvlaCase, b: int) -> Xvla:
    return case.network_of(case.samplings[0], b)


def past_of(case: XvlaCase, b: int) -> dict[str, Tensor]:
    network = network_of(case, b)
    return dict(network.prefix(network.vision(case.pixels(b)), case.visible(b), **case.rows(b)))


@cases
def test_every_stage_of_the_tower_equals_the_reference(path: Path):
    case = load_xvla_case(path)
    of, tower = case.tensors, case.network.vision
    # Those of the views that are there, sample by sample.
    pixels = torch.cat([case.pixels(b)[case.visible(b)] for b in range(case.batch)])
    x = as_tokens(pixels)
    for stage, convolution in enumerate(tower.convs):
        x = convolution(x, tower.sizes[stage])
        size = tower.sizes[stage + 1]
        assert relative_error(as_map(x, size), of[f'vision_conv_{stage}']) <= BOUND, stage
        if not stage:
            half = tower.stages[0][0]['spatial'](x)
            assert relative_error(as_map(half, size), of['vision_spatial_block']) <= BOUND
        x = tower.stage(x, stage)
        assert relative_error(as_map(x, size), of[f'vision_stage_{stage}']) <= BOUND, stage
    assert relative_error(tower(pixels), of['image_tokens']) <= BOUND


@entries
def test_the_encoder_and_the_further_views_equal_the_reference(path: Path, b: int):
    case = load_xvla_case(path)
    of, network, rows = case.tensors, network_of(case, b), case.rows(b)
    views = network.views(network.vision(case.pixels(b)), case.visible(b))
    x = network.text.embed(views[:1], rows['tokens'])
    assert relative_error(x[0], of['encoder_input'][b]) <= BOUND
    for layer, block in enumerate(network.text.blocks):
        x = block(x)
        assert relative_error(x[0], of['encoder_layers'][layer, b]) <= BOUND, layer
    assert relative_error(x[0], of['encoder_output'][b]) <= BOUND
    assert relative_error(views[1:].flatten(0, 1), of['aux_visual'][b]) <= BOUND
    if network.soft_prompts is not None:
        assert torch.equal(network.soft_prompts, of['soft_prompts'][b])


@entries
def test_every_prediction_equals_the_reference(path: Path, b: int):
    case = load_xvla_case(path)
    of, network, past = case.tensors, network_of(case, b), past_of(case, b)
    grippers = list(network.dims.grippers)
    codes = network.time_conditioning(of['time_embedding_t'])
    assert relative_error(codes, of['time_embedding']) <= 1e-6
    for k in range(case.steps):
        seen, expected = of['x_t'][k, b : b + 1], of['prediction'][k, b].clone()
        assert torch.equal(network.without_grippers(seen)[0], of['x_t_masked'][k, b])
        table = network.time_conditioning(of['t'][k, b : b + 1])
        expected[:, grippers] = expected[:, grippers].sigmoid()
        found = network.velocity(seen, past, table, **case.head(b))
        assert relative_error(found[0], expected) <= BOUND, k


@entries
def test_each_step_goes_back_to_the_noise_as_the_reference_does(path: Path, b: int):
    case = load_xvla_case(path)
    of, network, scheduler = case.tensors, network_of(case, b), Renoising()
    arm = [n for n in range(network.dims.action_dim) if n not in network.dims.grippers]
    noise, none = of['noise'][b].numpy(), np.zeros((network.dims.horizon, 1), np.float32)
    times, updates = scheduler.timesteps(case.steps), scheduler.updates(case.steps)
    assert relative_error(times.astype(np.float32), of['t'][:, b]) <= 1e-7
    for k in range(case.steps - 1):
        shown = of['prediction'][k, b].numpy()
        x = of['x_t'][k, b].numpy()
        moved = advance(x, shown, updates[k], noise, none * x, none)
        expected = of['x_t'][k + 1, b]
        assert relative_error(moved[:, arm], expected[:, arm]) <= 1e-6, k
        # As a flow's step from x alone it is another.
        flow = x + (times[k + 1] - times[k]) * (x - shown) / times[k]
        assert not k or relative_error(flow[:, arm], expected[:, arm]) > 1e-3
    last = advance(x, shown, updates[-1], noise, none * x, none)
    np.testing.assert_array_equal(last, shown)


@cases
def test_poses_are_those_that_libero_is_driven_with(path: Path):
    of = load_xvla_case(path).tensors
    if 'libero_state' not in of:
        pytest.skip('the case has no such poses')
    columns = from_matrix(of['libero_eef_mat'].numpy(), 'rotation_6d')
    assert relative_error(columns, of['libero_state'][:, 3:9]) <= 1e-6
    turned = to_matrix(of['rot6d_actions'][:, 3:9].numpy(), 'rotation_6d')
    expected = to_matrix(of['axis_angle_actions'][:, 3:6].numpy(), 'axis_angle')
    assert relative_error(turned, torch.from_numpy(expected)) <= 1e-4


def test_a_missing_first_camera_makes_the_second_the_first():
    network = random_network('xvla', tiny_dims('xvla'))
    tokens = torch.randn(2, network.dims.image_tokens, network.dims.text.width)
    views = network.views(tokens, torch.tensor([False, True]))
    assert torch.equal(views[0], tokens[1]) and not views[1:].any()
    assert len(views) == network.dims.views
