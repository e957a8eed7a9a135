"""Evo-1 of other sizes, cameras, masks and prompt lengths, two prompts at once, by an oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from evo1_cases import load_evo1_case
from evo1_oracle import chunk
from network_cases import each_entry, random_network, relative_error
from onnx_bundles import onnx_of_network
from tiny_policy import tiny_dims
from torch import Tensor

from vla_convert.export.onnx.verification import verify_onnx
from vla_runtime.families.blocks.dimensions import DecoderDims, VisionDims
from vla_runtime.families.evo1.declaration import Evo1Dims, HeadDims
from vla_runtime.inference.denoise import flow_times

TINY: Evo1Dims = tiny_dims('evo1')
VARIANTS = {
    'two cameras': TINY,
    'one camera, weights of several embodiments': replace(
        TINY,
        vision=VisionDims(width=20, depth=2, num_heads=4, mlp_dim=24, patch_size=5, image_size=15),
        pixel_shuffle=3,
        cameras=1,
        image_places=(1,),
        action_dim=9,
        real_actions=9,
        state_dim=11,
        input_major=True,
    ),
    'four cameras': replace(
        TINY,
        vision=VisionDims(width=12, depth=1, num_heads=3, mlp_dim=20, patch_size=4, image_size=16),
        pixel_shuffle=4,
        language=DecoderDims(
            width=24, depth=3, mlp_dim=36, num_heads=4, num_kv_heads=4, head_dim=6
        ),
        head=HeadDims(depth=1, num_heads=3, mlp_dim=30, state_hidden=8, velocity_hidden=12),
        cameras=4,
        image_places=(2, 3, 3, 5),
        rope_base=1e4,
    ),
}
STEPS = 7


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def inputs(dims: Evo1Dims, lengths: tuple[int, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape, size = (2, dims.prompt_length), dims.image_size
    noise = torch.rand(2, dims.horizon, dims.action_dim, generator=generator) * 2 - 1
    noise[..., dims.real_actions :] = 0.0
    return {
        'pixels': torch.randn(dims.cameras, 3, size, size, generator=generator),
        'tokens': torch.randint(0, dims.vocabulary, shape, generator=generator),
        'token_mask': torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None],
        'state': torch.randn(2, dims.state_dim, generator=generator),
        'noise': noise,
    }


@pytest.mark.parametrize('variant', VARIANTS)
def test_two_prompts_of_different_lengths_equal_the_oracle(variant: str):
    dims = VARIANTS[variant]
    network = random_network('evo1', dims)
    given = inputs(dims, (dims.prompt_length, dims.image_places[-1] + 9))
    every = [True] * dims.cameras
    for shown in (every, [False, *every[1:]], [*every[:-1], False]):
        rows = {name: given[name] for name in ('tokens', 'token_mask', 'state')}
        past = network.prefix(network.vision(given['pixels']), torch.tensor(shown), **rows)
        x = given['noise']
        for t in torch.tensor(flow_times(STEPS), dtype=torch.float32):
            x = x - network.velocity(x, past, network.time_conditioning(t[None])) / STEPS
        expected = [
            chunk(
                network.state_dict(),
                dims,
                list(given['pixels']),
                shown,
                given['tokens'][row, given['token_mask'][row]].tolist(),
                given['state'][row],
                given['noise'][row],
                STEPS,
            )
            for row in range(2)
        ]
        for row in range(2):
            assert relative_error(x[row], expected[row]) <= 2e-5, (shown, row)
        assert relative_error(expected[0], expected[1]) > 1e-2, 'the prompts differ'


@pytest.mark.thorough
def test_exported_files_of_a_variant_are_within_their_bounds():
    with torch.inference_mode(False):
        network = random_network('evo1', VARIANTS['four cameras'])
        folder, spec = onnx_of_network('evo1', network, denoise_steps=STEPS)
        assert verify_onnx(folder, spec).failures == []


@pytest.mark.cases
@each_entry('evo1')
def test_the_oracle_itself_equals_the_reference(path, b):
    case = load_evo1_case(path, b)
    rows = case.rows()
    noise = case.of('noise').clone()
    noise[:, case.network.dims.real_actions :] = 0.0
    found = chunk(
        case.network.state_dict(),
        case.network.dims,
        list(case.pixels),
        case.image_mask.tolist(),
        rows['tokens'][0, rows['token_mask'][0]].tolist(),
        rows['state'][0],
        noise,
        case.steps,
    )
    assert relative_error(found, case.of('actions')) <= 5e-5
