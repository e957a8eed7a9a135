"""Sizes of ACT: tensors, tokens, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from family_contracts.act import VARIANTS
from onnx_bundles import copy_bundle, load_graph, save_graph, tiny_onnx_bundle
from onnx_faults import nodes_of, run_in_half

from vla_convert.export.onnx.verification import check_graphs
from vla_convert.export.receipt import VerificationError
from vla_runtime.families.blocks.dimensions import ResNetDims
from vla_runtime.families.flow_network import empty_network
from vla_runtime.families.traced_shapes import trace_shapes


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


@pytest.mark.parametrize('operator', ['Conv', 'MaxPool', 'Relu'])
def test_a_convolution_network_in_half_breaks_the_rules(tmp_path, operator):
    bundle = copy_bundle(tiny_onnx_bundle('act', 'float16'), tmp_path / 'changed')
    model = load_graph(bundle, 'vision.onnx')
    run_in_half(model, nodes_of(model, operator)[0])
    save_graph(model, bundle, 'vision.onnx')
    with pytest.raises(VerificationError, match=rf'\({operator}\) computes .* in float16'):
        check_graphs(bundle)
