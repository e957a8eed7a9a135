"""What ACT's networks do to their constants before they run: norms folded, halves converted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from act_cases import load_act_case
from network_cases import each_case, relative_error

from vla_runtime.families.blocks.layers import matrix_names
from vla_runtime.families.flow_network import build_network

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
