"""ACT's networks against LeRobot's own numbers, and against PyTorch's own layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from act_cases import ActCase, load_act_case
from act_oracle import actions, sine_positions, their_weights
from network_cases import each_case, each_entry, relative_error
from tiny_policy import tiny_dims

from vla_runtime.families.act.checkpoint import NAMES
from vla_runtime.families.act.dimensions import ActDims
from vla_runtime.families.act.networks import Act
from vla_runtime.families.act.positions import map_positions
from vla_runtime.families.blocks.layers import matrix_names
from vla_runtime.families.blocks.resnet_dimensions import ResNetDims
from vla_runtime.families.flow_network import build_network

# Relative to the largest value: float32's own noise is up to 7e-6 in the actions.
BOUND = 5e-5

entries = each_entry('act')
cases = each_case('act')


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def embedded(case: ActCase, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    return case.network.embed(case.image_tokens(b), case.visible(), case.state(b))


@pytest.mark.cases
@entries
def test_the_backbone_equals_the_reference_stage_by_stage(path: Path, b: int):
    case = load_act_case(path)
    backbone = case.network.vision.backbone
    for i, pixels in enumerate(case.pixels(b)):
        x = backbone.stem_map(pixels[None])
        assert relative_error(x[0], case.tensors[f'backbone_stem_{i}'][b]) <= BOUND
        for number, stage in enumerate(backbone.stages, start=1):
            for block in stage:
                x = block(x)
            reference = case.tensors[f'backbone_layer{number}_{i}'][b]
            assert relative_error(x[0], reference) <= BOUND, f'camera {i}, stage {number}'


@pytest.mark.cases
@entries
def test_image_tokens_and_positions_equal_the_reference(path: Path, b: int):
    case = load_act_case(path)
    dims = case.network.dims
    for i, (pixels, size) in enumerate(zip(case.pixels(b), dims.map_sizes, strict=True)):
        (tokens,) = case.network.vision(pixels[None])
        reference = case.tensors[f'camera_features_{i}'][b]
        assert tuple(reference.shape[1:]) == size
        assert relative_error(tokens.T.reshape(reference.shape), reference) <= BOUND
        positions = map_positions(*size, dims.width, torch.device('cpu'))
        reference = case.tensors[f'camera_position_{i}'].reshape(-1, dims.width, *size)[0]
        assert relative_error(positions.T.reshape(reference.shape), reference) <= 1e-6
    assert relative_error(case.network.positions(), case.tensors['encoder_position']) <= 1e-6


@pytest.mark.cases
@entries
def test_encoder_and_decoder_equal_the_reference_layer_by_layer(path: Path, b: int):
    case = load_act_case(path)
    network, tensors = case.network, case.tensors
    tokens, mask = embedded(case, b)
    assert mask.all()
    # (B, T, W), as PyTorch's own order is (T, B, W) elsewhere: told by the number of tokens.
    assert relative_error(tokens[0], _entry(tensors['encoder_input'], b, tokens)) <= BOUND
    x, positions = tokens, network.positions()
    for number, layer in enumerate(network.encoder):
        x = layer(x, positions, mask[:, None])
        reference = _entry(tensors['encoder_layers'][number], b, tokens)
        assert relative_error(x[0], reference) <= BOUND, f'encoder layer {number}'
    output = network.encode(tokens, mask)
    assert relative_error(output[0], _entry(tensors['encoder_output'], b, tokens)) <= BOUND
    past = case.prefix(b)
    decoded = network.decode(past)
    assert relative_error(decoded[0], _entry(tensors['decoder_layers'][-1], b, decoded)) <= BOUND
    normed = network.decoder_norm(decoded)
    assert relative_error(normed[0], _entry(tensors['decoder_output'], b, decoded)) <= BOUND
    assert relative_error(network.actions(past)[0], tensors['actions'][b]) <= BOUND


def _entry(reference: torch.Tensor, b: int, like: torch.Tensor) -> torch.Tensor:
    """Batch entry b of (B, T, W) or (T, B, W)."""
    return reference[b] if reference.shape[1] == like.shape[1] else reference[:, b]


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


TINY: ActDims = tiny_dims('act')
VARIANTS = {
    'basic blocks': TINY,
    'norms first': replace(TINY, pre_norm=True),
    'gelu': replace(TINY, activation='gelu'),
    'environment': replace(TINY, state_dim=5, environment_dim=2),
    'odd images of two sizes': replace(TINY, images=((45, 67), (33, 100))),
    'four cameras of three sizes': replace(
        TINY, cameras=4, images=((45, 67), (33, 100), (33, 100), (64, 32)), horizon=3
    ),
    'one camera': replace(TINY, cameras=1, images=((50, 50),)),
    'bottlenecks': replace(
        TINY, backbone=ResNetDims(6, (4, 4, 6, 8), (1, 2, 1, 2), bottleneck=True)
    ),
    'dilated': replace(
        TINY, backbone=ResNetDims(6, (4, 4, 6, 8), (1, 1, 1, 3), bottleneck=True, dilated=True)
    ),
}


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
