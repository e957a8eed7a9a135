"""Sizes of ACT: tensors, tokens, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_act_networks import VARIANTS
from tiny_policy import tiny_spec

from vla_runtime.bundle.rules import dump_spec, parse_spec
from vla_runtime.families.act.dimensions import ACT, ActDims
from vla_runtime.families.blocks.resnet_dimensions import ResNetDims
from vla_runtime.families.flow_network import empty_network
from vla_runtime.families.traced_shapes import trace_shapes


def test_the_published_policy_has_its_published_size():
    count = sum(value.numel() for value in empty_network('act', ACT).parameters())
    # LeRobot's ACT has 51.6 million with its encoder of actions, which is for training alone: four
    # encoder layers, their projections and positions.
    layer = 4 * (512 * 512 + 512) + 2 * 512 * 3200 + 3200 + 512 + 4 * 512
    assert round((count + 4 * layer) / 1e6) == 52
    assert ACT.backbone.depth == 18 and ACT.map_sizes[0] == (15, 20)


@pytest.mark.parametrize('variant', VARIANTS)
def test_image_tokens_are_the_places_of_the_maps(variant: str):
    dims = VARIANTS[variant]
    shapes = trace_shapes(empty_network('act', dims))
    counts = dict(zip(dims.image_sizes, dims.map_sizes, strict=True))
    assert shapes.token_counts == {size: h * w for size, (h, w) in counts.items()}
    assert shapes.image_tokens == (max(shapes.token_counts.values()), dims.width)
    assert shapes.past['prefix_mask'].shape == (1, dims.prefix_length)


@pytest.mark.parametrize('dilated', [False, True])
@pytest.mark.parametrize('size', [(1, 1), (45, 67), (64, 96), (97, 33)])
def test_the_map_of_an_image_is_as_large_as_the_backbone_makes_it(size, dilated):
    backbone = ResNetDims(4, (2, 2, 2, 2), (1, 1, 1, 1), bottleneck=True, dilated=dilated)
    dims = replace(VARIANTS['basic blocks'], backbone=backbone)
    network = empty_network('act', dims)
    found = network.vision.backbone(torch.zeros(1, 3, *size, device='meta'))
    assert tuple(found.shape[-2:]) == backbone.map_size(size)


def test_dimensions_come_back_from_policy_yaml():
    for images in (((48, 64),), ((48, 64), (33, 100))):
        spec = tiny_spec('act')
        spec = replace(spec, dims=replace(spec.dims, images=images))
        assert parse_spec(dump_spec(spec)) == spec


REFUSED = {
    'images has 3 sizes': {'images': ((8, 8), (9, 9), (10, 10))},
    'encoder.width is 24 but decoder.width 28': {'decoder': {'width': 28}},
    'not a multiple of 4': {'encoder': {'width': 30}, 'decoder': {'width': 30}},
    'not a multiple of num_heads 5': {'decoder': {'num_heads': 5}},
    'leaves nothing of the state_dim': {'environment_dim': 3},
}


@pytest.mark.parametrize('message', REFUSED)
def test_sizes_that_do_not_fit_are_refused(message: str):
    tiny: ActDims = VARIANTS['basic blocks']
    changes = {
        name: replace(getattr(tiny, name), **value) if isinstance(value, dict) else value
        for name, value in REFUSED[message].items()
    }
    with pytest.raises(ValueError, match=message):
        replace(tiny, **changes)
    with pytest.raises(ValueError, match='dilated is for bottleneck blocks'):
        ResNetDims(4, (2, 2, 2, 2), (1, 1, 1, 1), dilated=True)
