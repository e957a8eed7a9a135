"""GR00T of other sizes, cameras, masks and prompt lengths, two prompts at once, by an oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from groot_cases import load_groot_case
from groot_oracle import Prompt, chunk
from network_cases import each_entry, random_network, relative_error
from onnx_bundles import onnx_of_network
from tiny_policy import tiny_dims
from torch import Tensor

from vla_convert.export.onnx.verification import verify_onnx
from vla_runtime.families.blocks.dimensions import DecoderDims, VisionDims
from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.groot.dimensions import StackDims
from vla_runtime.families.groot.n16_dimensions import Siglip2Dims
from vla_runtime.families.groot.n17_dimensions import QwenVisionDims
from vla_runtime.inference.denoise import flow_times

N15, N16, N17 = (tiny_dims(f'groot_n{number}') for number in (15, 16, 17))
VARIANTS = {
    'N1.5': ('groot_n15', N15),
    'N1.5, one camera': (
        'groot_n15',
        replace(
            N15,
            vision=VisionDims(
                width=20, depth=2, num_heads=4, mlp_dim=24, patch_size=5, image_size=15
            ),
            pixel_shuffle=1,
            connector_layers=1,
            context=StackDims(depth=2, num_heads=2, head_dim=6, mlp_dim=20),
            cameras=1,
            image_places=(3,),
            future_tokens=1,
        ),
    ),
    'N1.5, four cameras': (
        'groot_n15',
        replace(
            N15,
            vision=VisionDims(
                width=12, depth=1, num_heads=3, mlp_dim=20, patch_size=4, image_size=24
            ),
            pixel_shuffle=3,
            language=DecoderDims(
                width=24, depth=3, mlp_dim=36, num_heads=4, num_kv_heads=4, head_dim=6
            ),
            context=StackDims(depth=1, num_heads=6, head_dim=4, mlp_dim=28),
            dit=StackDims(depth=4, num_heads=2, head_dim=10, mlp_dim=32),
            cameras=4,
            image_places=(0, 2, 2, 7),
            action_dim=9,
            state_dim=11,
        ),
    ),
    'N1.6': ('groot_n16', N16),
    'N1.6, without rotary positions and windows': (
        'groot_n16',
        replace(
            N16,
            vision=replace(N16.vision, rope_base=None, window=None, full_attention=()),
            image=(48, 80),
            cameras=1,
            image_places=(5,),
        ),
    ),
    'N1.6, two time steps of the state, three tall images': (
        'groot_n16',
        replace(
            N16,
            vision=Siglip2Dims(
                width=24,
                depth=3,
                num_heads=3,
                mlp_dim=32,
                patch_size=6,
                merge=3,
                positions=9,
                rope_base=14.0,
                window=4,
                full_attention=(2,),
            ),
            image=(54, 36),
            text_every=3,
            dit=StackDims(depth=8, num_heads=2, head_dim=10, mlp_dim=32),
            cameras=3,
            image_places=(0, 0, 5),
            state_dim=14,
            state_steps=2,
        ),
    ),
    'N1.6, windows without rotary positions': (
        'groot_n16',
        replace(N16, vision=replace(N16.vision, rope_base=None, full_attention=())),
    ),
    'N1.7': ('groot_n17', N17),
    'N1.7, three tall images': (
        'groot_n17',
        replace(
            N17,
            vision=QwenVisionDims(
                width=24,
                depth=3,
                num_heads=3,
                mlp_dim=32,
                patch_size=6,
                merge=2,
                positions=7,
                deepstack=(1, 3),
            ),
            image=(60, 24),
            language=DecoderDims(
                width=24, depth=4, mlp_dim=36, num_heads=4, num_kv_heads=1, head_dim=12
            ),
            rope_sections=(2, 2, 2),
            context=None,
            dit=StackDims(depth=8, num_heads=2, head_dim=10, mlp_dim=32),
            text_every=3,
            cameras=3,
            image_places=(0, 0, 5),
            action_dim=9,
            state_dim=22,
        ),
    ),
    'N1.7, wide images, as many sections as layers': (
        'groot_n17',
        replace(
            N17,
            vision=replace(N17.vision, depth=4, positions=3, merge=3, deepstack=(2, 3, 4)),
            image=(24, 72),
            rope_sections=(3, 3, 2),
            context=StackDims(depth=2, num_heads=2, head_dim=20, mlp_dim=24),
            dit=StackDims(depth=2, num_heads=3, head_dim=8, mlp_dim=32),
            cameras=1,
            image_places=(1,),
        ),
    ),
}
STEPS = 3


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def inputs(dims, lengths: tuple[int, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    height, width = getattr(dims, 'image', None) or (dims.image_size,) * 2
    shape = (2, dims.prompt_length)
    places = torch.arange(dims.prompt_length)[None]
    return {
        'pixels': torch.randn(dims.cameras, 3, height, width, generator=generator),
        'tokens': torch.randint(0, dims.vocabulary, shape, generator=generator),
        'token_mask': places < torch.tensor(lengths)[:, None],
        'state': torch.randn(2, dims.state_dim, generator=generator),
        'noise': torch.randn(2, dims.horizon, dims.action_dim, generator=generator),
    }


def chunks_of(network: FlowNetwork, given: dict[str, Tensor], shown: Tensor) -> Tensor:
    """Chunks (2, H, A) by the cached path, both prompts at once."""
    rows = {name: given[name] for name in ('tokens', 'token_mask')}
    past = network.prefix(network.vision(given['pixels']), shown, **rows)
    x = given['noise']
    for t in torch.tensor(flow_times(STEPS), dtype=torch.float32):
        conditioning = network.time_conditioning(t[None])
        x = x - network.velocity(x, past, conditioning, state=given['state']) / STEPS
    return x


def masks(cameras: int) -> list[list[bool]]:
    every = [True] * cameras
    return [every] if cameras == 1 else [every, [False, *every[1:]], [*every[:-1], False]]


@pytest.mark.parametrize('variant', VARIANTS)
def test_two_prompts_of_different_lengths_equal_the_oracle(variant: str):
    family, dims = VARIANTS[variant]
    network = random_network(family, dims)
    given = inputs(dims, (dims.prompt_length, dims.image_places[-1] + 9))
    weights = network.state_dict()
    for shown in masks(dims.cameras):
        found = chunks_of(network, given, torch.tensor(shown))
        expected = [
            chunk(
                weights,
                dims,
                Prompt(
                    given['tokens'][row, given['token_mask'][row]].tolist(),
                    [
                        image if visible else None
                        for image, visible in zip(given['pixels'], shown, strict=True)
                    ],
                ),
                given['state'][row],
                given['noise'][row],
                STEPS,
            )
            for row in range(2)
        ]
        for row in range(2):
            assert relative_error(found[row], expected[row]) <= 2e-5, (shown, row)
        assert relative_error(expected[0], expected[1]) > 1e-2, 'the prompts differ'


@pytest.mark.thorough
@pytest.mark.parametrize(
    'variant',
    [
        'N1.5, four cameras',
        'N1.6, two time steps of the state, three tall images',
        'N1.7, three tall images',
    ],
)
def test_exported_files_of_a_variant_are_within_their_bounds(variant: str):
    family, dims = VARIANTS[variant]
    with torch.inference_mode(False):
        folder, spec = onnx_of_network(family, random_network(family, dims), denoise_steps=STEPS)
        assert verify_onnx(folder, spec).failures == []


@pytest.mark.cases
@each_entry('groot_n15', 'groot_n16', 'groot_n17')
def test_the_oracle_itself_equals_the_reference(path, b):
    case = load_groot_case(path, b)
    if case.description['kind'] == 'groot_n15' and not case.masks_padding:
        pytest.skip('the head of the training code does not mask padding')
    text = case.rows()['tokens'][0, case.rows()['token_mask'][0]].tolist()
    found = chunk(
        case.network.state_dict(),
        case.network.dims,
        Prompt(text, list(case.pixels)),
        case.state()['state'][0],
        case.tensors['noise'][b],
        case.steps,
    )
    assert relative_error(found, case.actions()) <= 5e-5
