"""ACT's networks against LeRobot's own numbers, and against PyTorch's own layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from act_cases import load_act_case
from act_oracle import actions, sine_positions, their_weights
from family_contracts.act import VARIANTS
from network_cases import each_case, relative_error

from vla_convert.readers.act import NAMES
from vla_runtime.families.act.declaration import ActDims
from vla_runtime.families.act.networks import Act, map_positions
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


def with_weights(dims: ActDims, theirs: dict[str, torch.Tensor]) -> Act:
    network = build_network('act', dims)
    assert isinstance(network, Act)
    ours = {}
    for name, tensor in theirs.items():
        if not NAMES.is_unused(name):
            parts = NAMES.parts(name)
            ours |= dict(zip(parts, tensor.chunk(len(parts)), strict=True))
    network.load_state_dict(ours)
    return network.eval().requires_grad_(False)


def inputs(dims: ActDims, rows: int = 1) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    pixels = [torch.randn(1, 3, *size, generator=generator) for size in dims.image_sizes]
    return pixels, torch.randn(rows, dims.state_dim, generator=generator)


def image_tokens(network: Act, pixels: list[torch.Tensor]) -> torch.Tensor:
    found = [network.vision(image)[0] for image in pixels]
    tokens = torch.zeros(len(found), max(map(len, found)), network.dims.width)
    for camera, of_image in enumerate(found):
        tokens[camera, : len(of_image)] = of_image
    return tokens


@pytest.mark.parametrize('variant', VARIANTS)
def test_every_variant_equals_pytorchs_own_layers(variant: str):
    dims = VARIANTS[variant]
    theirs = their_weights(dims)
    network = with_weights(dims, theirs)
    pixels, state = inputs(dims, rows=2)
    shown = torch.ones(dims.cameras, dtype=torch.bool)
    past = network.prefix(image_tokens(network, pixels), shown, state=state)
    batch = [image.expand(2, -1, -1, -1) for image in pixels]
    expected = actions(theirs, batch, state, dims)
    assert relative_error(network.actions(past), expected) <= 1e-5
    assert relative_error(expected[0], expected[1]) > 1e-2, 'the rows differ'


@pytest.mark.parametrize(
    ('variant', 'changed'),
    [('norms first', {'pre_norm': False}), ('gelu', {'activation': 'relu'})],
)
def test_a_variant_is_another_policy(variant: str, changed: dict[str, object]):
    dims = VARIANTS[variant]
    theirs = their_weights(dims)
    without = replace(dims, **changed)
    kept = their_weights(without).keys()
    network = with_weights(without, {name: theirs[name] for name in kept})
    pixels, state = inputs(dims)
    past = network.prefix(
        image_tokens(network, pixels), torch.ones(2, dtype=torch.bool), state=state
    )
    assert relative_error(network.actions(past), actions(theirs, pixels, state, dims)) > 1e-3


@pytest.mark.parametrize(('height', 'width'), [(1, 1), (2, 3), (5, 4)])
def test_positions_of_a_map_equal_a_loop_over_its_places(height: int, width: int):
    positions = map_positions(height, width, 24, torch.device('cpu'))
    assert relative_error(positions, sine_positions(height, width, 24)) <= 1e-6


@pytest.mark.parametrize('poison', [1e4, float('nan')])
def test_a_hidden_camera_does_not_matter(poison: float):
    dims = VARIANTS['odd images of two sizes']
    network = with_weights(dims, their_weights(dims))
    pixels, state = inputs(dims)
    tokens = image_tokens(network, pixels)
    mask = torch.tensor([True, False])
    clean = network.actions(network.prefix(tokens, mask, state=state))
    tokens[1] = poison
    poisoned = network.actions(network.prefix(tokens, mask, state=state))
    assert torch.equal(clean, poisoned)
    alone = replace(dims, cameras=1, images=dims.images[:1])
    one = build_network('act', alone).eval()
    one.load_state_dict(network.state_dict())
    past = one.prefix(tokens[:1], mask[:1], state=state)
    assert relative_error(one.actions(past), clean) <= 1e-5, 'as if it were not there'


def test_what_lies_behind_a_smaller_images_tokens_does_not_matter():
    dims = VARIANTS['odd images of two sizes']
    network = with_weights(dims, their_weights(dims))
    pixels, state = inputs(dims)
    tokens, mask = image_tokens(network, pixels), torch.ones(2, dtype=torch.bool)
    counts = [height * width for height, width in dims.map_sizes]
    smaller = counts.index(min(counts))
    assert counts[0] != counts[1]
    expected = network.actions(network.prefix(tokens, mask, state=state))
    tokens[smaller, min(counts) :] = 1e4
    assert torch.equal(network.actions(network.prefix(tokens, mask, state=state)), expected)
