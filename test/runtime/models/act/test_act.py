"""ACT: constants folded before it runs, sizes of maps, convolutions in half."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from act_cases import load_act_case
from family_contracts.act import VARIANTS
from network_cases import each_case, relative_error
from onnx_bundles import copy_bundle, load_graph, save_graph, tiny_onnx_bundle
from onnx_faults import nodes_of, run_in_half

from vla_convert.export.onnx.verification import check_graphs
from vla_convert.export.receipt import VerificationError
from vla_runtime.family.dimensions import ResNetDims
from vla_runtime.models.base.flow_network import build_network, empty_network
from vla_runtime.models.blocks.layers import matrix_names
from vla_runtime.models.shapes.traced_shapes import trace_shapes

# Relative to the largest value: float32's own noise is up to 7e-6 in the actions.
BOUND = 5e-5

cases = each_case('act')


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.cases
@cases
def test_norms_folded_into_convolutions_stay_within_the_bound(path: Path):
    case = load_act_case(path)
    dims = case.network.dims
    folded = build_network('act', dims).eval().requires_grad_(False)
    folded.load_state_dict(case.network.state_dict())
    folded.fold_constants()
    for b in range(case.batch):
        past = folded.prefix(case.image_tokens(b), case.visible(), state=case.state(b))
        tokens = [folded.vision(pixels[None])[0] for pixels in case.pixels(b)]
        for ours, expected in zip(tokens, case.image_tokens(b), strict=True):
            assert relative_error(ours, expected[: len(ours)]) <= 1e-6
        assert relative_error(folded.actions(past)[0], case.tensors['actions'][b]) <= BOUND


@pytest.mark.cases
@cases
def test_convolutions_follow_the_matrices_into_bfloat16_alone(path: Path):
    case = load_act_case(path)
    for precision, expected, bound in (
        (torch.bfloat16, torch.bfloat16, 4e-2),
        (torch.float16, torch.float32, 1e-5),
    ):
        network = build_network('act', case.network.dims).eval().requires_grad_(False)
        network.load_state_dict(case.network.state_dict())
        matrices = matrix_names(network)
        for name, parameter in network.named_parameters():
            if name in matrices:
                parameter.data = parameter.data.to(precision)
        network.fold_constants()
        pixels = case.pixels(0)[0]
        assert network.vision.backbone(pixels[None]).dtype == expected
        tokens = network.vision(pixels[None])[0]
        assert tokens.dtype == torch.float32
        assert relative_error(tokens, case.image_tokens(0)[0][: len(tokens)]) <= bound


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
