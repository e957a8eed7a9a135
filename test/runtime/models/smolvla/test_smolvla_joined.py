"""The joined network of SmolVLA against its layers one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from joined_networks import in_precision, joined
from network_cases import largest_error, random_network
from tiny_policy import tiny_dims
from torch import Tensor

from vla_runtime.models.blocks import products
from vla_runtime.models.smolvla import SmolVla

pytestmark = pytest.mark.cases

PAST = ('self_key', 'self_value', 'cross_key', 'cross_value')

precisions = pytest.mark.parametrize(
    ('dtype', 'bound'), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)]
)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def tiny_network(dtype: torch.dtype = torch.float32, **changes) -> SmolVla:
    return in_precision(random_network('smolvla', replace(tiny_dims('smolvla'), **changes)), dtype)


def inputs_of(network: SmolVla, rows: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Pixels, of which the first view is absent, prompts of different lengths, and states."""
    torch.manual_seed(1)
    dims = network.dims
    pixels = torch.rand(dims.cameras, 3, dims.image_size, dims.image_size) * 2 - 1
    lengths = torch.tensor([dims.prompt_length - 2 - row for row in range(rows)])
    given = {
        'tokens': torch.randint(0, dims.vocabulary, (rows, dims.prompt_length)),
        'token_mask': torch.arange(dims.prompt_length)[None] < lengths[:, None],
        'state': torch.randn(rows, dims.state_dim),
    }
    return pixels, torch.arange(dims.cameras) > 0, given


@pytest.fixture(params=[2**24, 0], ids=['small', 'large'], autouse=True)
def _sizes(request, monkeypatch):
    """Products as of a small policy and of a large one."""
    for name in ('ONE_PASS_FROM', 'PACKED_FROM'):
        monkeypatch.setattr(products, name, request.param)
    monkeypatch.setattr(products, 'is_faster', lambda dtype: True)


@precisions
@pytest.mark.parametrize('every', [0, 1, 3])
@pytest.mark.parametrize('kv_heads', [1, 6])
def test_other_kinds_and_heads_of_layers_equal_the_layers_one_by_one(every, kv_heads, dtype, bound):
    """Without layers of a kind, and where keys are of all heads or of one."""
    dims = tiny_dims('smolvla')
    stacks = {
        name: replace(getattr(dims, name), num_kv_heads=kv_heads) for name in ('language', 'expert')
    }
    network = tiny_network(dtype, self_attention_every=every, **stacks)
    pixels, image_mask, given = inputs_of(network, 2)
    conditioning = network.time_conditioning(torch.tensor([0.4]))
    x = torch.randn(1, dims.horizon, dims.action_dim)
    images = network.vision(pixels)
    expected = network.velocity(x, network.prefix(images, image_mask, **given), conditioning)
    other = joined(network)
    prepared = other.prepare_prefix(other.prefix(images, image_mask, **given))
    found = other.velocity(x, prepared, other.split_conditioning(conditioning))
    assert largest_error(found, expected) <= bound * max(1.0, float(expected.abs().max()))


def test_images_and_text_do_not_see_the_state():
    """The negative control is the state's own token, which sees all."""
    network = tiny_network()
    pixels, image_mask, given = inputs_of(network, 1)
    network.join()
    images = network.vision(pixels)
    one, other = (
        network.prefix(images, image_mask, **{**given, 'state': state})
        for state in (given['state'], given['state'] + 1.0)
    )
    assert all(torch.equal(one[name][..., :-1, :], other[name][..., :-1, :]) for name in PAST)
    assert all(largest_error(one[name], other[name]) > 1e-2 for name in PAST)
