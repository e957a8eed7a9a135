"""Convolutions of the U-Net as matrix products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vla_runtime.declarations.diffusion import PUSHT, UNetDims
from vla_runtime.models.base.flow_network import build_network
from vla_runtime.models.blocks import products
from vla_runtime.models.blocks.products import one_pass
from vla_runtime.models.diffusion import Conv, Grow


@pytest.fixture(params=['packed', 'public'], autouse=True)
def _way(request, monkeypatch):
    """How products are computed here; and no gradients."""
    packed = request.param == 'packed'
    monkeypatch.setattr(products, 'PACKED_FROM', 0)
    monkeypatch.setattr(products, 'is_faster', lambda dtype: packed)
    if packed and one_pass('cpu', torch.float32) is None:
        pytest.skip('this PyTorch has no such operator')
    with torch.inference_mode():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize('places', [2, 4, 7])
@pytest.mark.parametrize(
    'make',
    [
        lambda: Conv(6, 10, 5, padding=2),
        lambda: Conv(6, 10, 3, padding=1),
        lambda: Conv(6, 6, 3, stride=2, padding=1),
        lambda: Conv(6, 10, 1),
        lambda: Grow(6),
    ],
)
def test_a_folded_convolution_equals_pytorchs(make, places):
    layer, x = make(), torch.randn(3, 6, places)
    expected, weight = layer(x), layer.weight.clone()
    layer.fold(torch.float32)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    # The parameter is still the convolution's, whatever order its numbers have in memory.
    assert torch.equal(layer.weight, weight)
    layer.fold(torch.bfloat16)
    assert layer(x).dtype == torch.float32
    torch.testing.assert_close(layer(x), expected, rtol=5e-2, atol=5e-2)


def test_a_folded_network_equals_the_one_that_it_was():
    unet = UNetDims(channels=(16, 32, 64), kernel_size=5, groups=8, time_width=16, scaled=True)
    backbone = replace(PUSHT.backbone, stem=16, channels=(16, 16, 16, 16), blocks=(1, 1, 1, 1))
    network = build_network('diffusion', replace(PUSHT, unet=unet, backbone=backbone)).eval()
    mask, state = torch.ones(2, dtype=torch.bool), torch.rand(3, 2, 2)
    tokens = network.vision(torch.rand(2, 3, 96, 96))
    x, table = torch.randn(3, 16, 2), network.time_conditioning(torch.tensor([50.0]))
    past = network.prefix(tokens, mask, state=state)
    expected = network.velocity(x, past, table)
    network.fold_constants()
    torch.testing.assert_close(network.velocity(x, past, table), expected, rtol=1e-5, atol=1e-5)
