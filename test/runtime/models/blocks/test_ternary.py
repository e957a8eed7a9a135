"""Ternary weights: packed as they are unpacked, and the same product on every path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from vla_runtime.family.ternary_weights import (
    count_invalid,
    pack,
    packed_width,
    scale_of,
    ternary_of,
)
from vla_runtime.models.blocks import ternary
from vla_runtime.models.blocks.ternary import (
    TernaryLinear,
    apply_together,
    multiply_padded,
    quantise_tokens,
    unpack,
)


@pytest.mark.parametrize('inputs', [1, 3, 4, 5, 8, 31, 64])
def test_what_was_packed_is_unpacked(inputs: int):
    weights = np.random.default_rng(inputs).integers(-1, 2, (6, inputs)).astype(np.int8)
    packed = pack(weights)
    assert packed.shape == (6, packed_width(inputs)) and count_invalid(packed) == 0
    assert torch.equal(unpack(torch.from_numpy(packed), inputs), torch.from_numpy(weights))


def test_bytes_that_stand_for_no_weight_are_counted():
    assert count_invalid(np.array([0b10, 0b10_00_00_00, 0b11_01_00_11], np.uint8)) == 2


def test_masters_round_to_even_and_zeros_stay():
    assert ternary_of(np.zeros((2, 4), np.float32)).tolist() == [[0] * 4] * 2
    assert scale_of(np.zeros((2, 4), np.float32)) == np.float32(1e-5)
    # Their mean is 1: a half is even at 0.
    halves = np.array([[0.5, -0.5, 1.5, -1.5]], np.float32)
    assert ternary_of(halves).tolist() == [[0, 0, 1, -1]]


def test_codes_round_halves_to_even_with_a_scale_a_token():
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0], [-1e-6, 1e-6, 0.0, 0.0]])
    codes, scale = quantise_tokens(x)
    assert codes[0].tolist() == [127, 0, 2, -2]
    assert not codes[1].any() and torch.isfinite(scale).all()
    assert codes[2].tolist() == [-13, 13, 0, 0]


def layer_of(inputs: int, outputs: int, bias: bool = True) -> TernaryLinear:
    generator = torch.Generator().manual_seed(inputs)
    layer = TernaryLinear(inputs, outputs, bias)
    weights = torch.randint(-1, 2, (outputs, inputs), generator=generator)
    layer.packed = torch.from_numpy(pack(weights.to(torch.int8).numpy()))
    layer.weight_scale.data.fill_(0.3)
    if layer.bias is not None:
        layer.bias.data = torch.randn(outputs, generator=generator)
    return layer.requires_grad_(False)


def by_definition(layer: TernaryLinear, x: Tensor) -> Tensor:
    """The published form: rounded numbers, divided back, times the scaled weights."""
    scale = 127 / x.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-5)
    rounded = (x * scale).round().clamp(-128, 127) / scale
    weights = unpack(layer.packed, layer.in_features).float() * layer.weight_scale
    product = rounded.double() @ weights.double().t()
    return (product if layer.bias is None else product + layer.bias).float()


@pytest.mark.parametrize('bytes_', [True, False])
@pytest.mark.parametrize(('rows', 'inputs', 'outputs'), [(1, 5, 3), (17, 64, 24), (40, 33, 9)])
def test_both_products_of_a_cpu_are_the_published_layer(
    monkeypatch, bytes_: bool, rows: int, inputs: int, outputs: int
):
    monkeypatch.setattr(ternary, 'multiplies_bytes', lambda: bytes_)
    layer = layer_of(inputs, outputs)
    x = torch.randn(2, rows, inputs, generator=torch.Generator().manual_seed(rows))
    found = layer(x)
    assert found.dtype == torch.float32 and found.shape == (2, rows, outputs)
    torch.testing.assert_close(found, by_definition(layer, x), rtol=1e-5, atol=1e-5)
    first, second = apply_together([layer, layer], x)
    assert torch.equal(first, found) and torch.equal(second, found)


@pytest.mark.parametrize('rows', [1, 16, 17, 33])
@pytest.mark.parametrize(('inputs', 'outputs'), [(8, 8), (5, 3), (24, 20), (40, 8)])
def test_shapes_that_cuda_does_not_take_are_padded(
    monkeypatch, rows: int, inputs: int, outputs: int
):
    random = torch.Generator().manual_seed(rows)
    codes = torch.randint(-128, 128, (rows, inputs), generator=random, dtype=torch.int8)
    weights = torch.randint(-1, 2, (outputs, inputs), generator=random, dtype=torch.int8)
    taken = []

    def as_cuda(a: Tensor, b: Tensor) -> Tensor:
        # Its own conditions (aten/src/ATen/native/cuda/Blas.cpp).
        assert a.shape[0] > 16 and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0
        assert a.dtype == b.dtype == torch.int8 and b.t().is_contiguous()
        taken.append(a.shape)
        return (a.double() @ b.double()).to(torch.int32)

    monkeypatch.setattr(torch, '_int_mm', as_cuda)
    found = multiply_padded(codes, weights)
    assert taken
    assert torch.equal(found, (codes.double() @ weights.double().t()).to(torch.int32))


def test_float32_products_of_the_longest_layers_are_exact(monkeypatch):
    """As many terms as the published MLP's last product has, all of one sign."""
    codes = torch.full((1, 6912), 127, dtype=torch.int8)
    weights = torch.ones(1, 6912, dtype=torch.int8)
    monkeypatch.setattr(ternary, 'multiplies_bytes', lambda: False)
    assert int(ternary._multiply(codes, weights)) == 127 * 6912
