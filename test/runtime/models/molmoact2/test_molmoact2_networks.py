"""The networks of MolmoAct2 against LeRobot's own numbers, stage by stage and step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from molmoact2_cases import MolmoAct2Case, load_molmoact2_case
from network_cases import each_case, each_entry, relative_error
from torch import Tensor
from torch.nn import functional as F

from vla_runtime.declarations.molmoact2 import time_code
from vla_runtime.models.blocks.resize import bicubic_weights
from vla_runtime.processing.tiles import resized_levels

pytestmark = pytest.mark.cases

# Relative to the largest value.
BOUND = 1e-5

entries = each_entry('molmoact2')
cases = each_case('molmoact2')


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def crops(case: MolmoAct2Case) -> Tensor:
    return torch.cat([case.network.vision.crops(one[None]) for one in case.pixels()])


@cases
def test_pixels_and_every_layer_of_the_tower_equal_the_reference(path: Path):
    case = load_molmoact2_case(path, 0)
    of, vision = case.tensors, case.network.vision
    # Of the first entry; those of the others follow.
    pixels = crops(case)
    count, edge = len(pixels), case.network.dims.vision.patch_size
    patches = F.unfold(pixels, edge, stride=edge).unflatten(1, (3, -1)).permute(0, 3, 2, 1)
    assert torch.equal(patches.flatten(2), of['pixel_values'][:count])
    x = vision.patch_embedding(pixels)
    assert relative_error(x, of['patch_embeddings'].flatten(0, -3)[:count]) <= BOUND
    x = x + vision.positions()
    assert relative_error(x, of['vision_input'].flatten(0, -3)[:count]) <= BOUND
    for layer, block in enumerate(vision.blocks):
        x = block(x)
        expected = of['vision_layers'][layer].flatten(0, -3)[:count]
        assert relative_error(x, expected) <= BOUND, layer
    pooled = torch.cat([vision.pooled(one[None])[0] for one in case.pixels()])
    assert relative_error(pooled, of['pooled'][: len(pooled)]) <= BOUND


@entries
def test_the_language_model_equals_the_reference(path: Path, b: int):
    case = load_molmoact2_case(path, b)
    if case.first:
        pytest.skip('padding in front moves the positions')
    network = case.network
    seen = torch.ones(network.dims.cameras, dtype=torch.bool)
    x, mask = network.embed_prefix(case.image_tokens(), seen, **case.rows())
    length = case.length
    assert relative_error(x[0, :length], case.of('input_embeddings')) <= BOUND
    layers = network.layers(x, mask)
    for layer, (key, value, x) in enumerate(layers):
        for found, name in ((key, 'keys'), (value, 'values')):
            expected = case.tensors[name][layer, b]
            assert (
                relative_error(found[0, :, :length].transpose(0, 1).flatten(1), expected) <= BOUND
            )
        if layer < len(layers) - 1:
            expected = case.tensors['language_layers'][layer, b]
            assert relative_error(x[0, :length], expected) <= BOUND, layer
    shown = case.prefix()['prefix_mask'][0, :length]
    assert torch.equal(shown, case.of('context_mask'))


@entries
def test_every_step_from_its_recorded_actions_equals_the_reference(path: Path, b: int):
    case = load_molmoact2_case(path, b)
    if case.first:
        pytest.skip('padding in front moves the positions')
    past, of = case.prefix(), case.tensors
    for k in range(case.steps):
        row = case.network.time_conditioning(1.0 - of['t'].reshape(case.steps, -1)[k, :1])
        found = case.network.velocity(of['x_t'][k, b : b + 1], past, row)
        assert relative_error(-found[0], of['v_t'][k, b]) <= BOUND, k
    codes = time_code(of['time_embedding_t'].numpy(), case.network.dims.expert.time_width)
    assert relative_error(torch.from_numpy(codes), of['time_embedding']) <= 1e-6


@pytest.mark.parametrize('size', [(42, 42), (98, 154), (30, 200)])
def test_images_are_resized_to_the_levels_of_pytorch(size: tuple[int, int]):
    image = np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    planes = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    expected = F.interpolate(planes, size=size, mode='bilinear')[0].permute(1, 2, 0).round()
    # PyTorch's order of sums is its processor's: a half may be rounded either way.
    difference = np.abs(resized_levels(image, size).astype(int) - expected.numpy().astype(int))
    assert difference.max() <= 1 and difference.mean() <= 1e-3


@pytest.mark.parametrize(('before', 'after'), [(5, 8), (8, 5), (24, 27)])
def test_positions_are_resized_as_pytorch_does(before: int, after: int):
    table = torch.randn(1, 3, before, before, generator=torch.Generator().manual_seed(0))
    expected = F.interpolate(table, (after, after), mode='bicubic', antialias=True)
    weights = bicubic_weights(before, after, table.device)
    assert relative_error(weights @ table @ weights.T, expected) <= 1e-6
