"""Merged products, in one pass and by the public operators."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from vla_runtime.models.blocks import products
from vla_runtime.models.blocks.layers import Linear, gelu_tanh
from vla_runtime.models.blocks.products import FEW, IMAGES, MANY, GatedProduct, Product, one_pass
from vla_runtime.models.blocks.transformer import GatedMlp

ways = pytest.mark.parametrize('way', [MANY, IMAGES, FEW], ids=['many', 'images', 'few'])


@pytest.fixture(params=['one pass', 'public', 'refused'])
def operators(request, monkeypatch):
    """How products are computed here."""

    def refuse(*inputs):
        raise RuntimeError('mkldnn_linear_pointwise: unsupported dtype')

    one_pass.cache_clear()
    if request.param == 'one pass':
        _any_size(monkeypatch)
        if one_pass('cpu', torch.float32) is None:
            pytest.skip('this PyTorch has no such operator')
    elif request.param == 'refused':
        _any_size(monkeypatch)
        monkeypatch.setattr(torch.ops.mkldnn, '_linear_pointwise', refuse, raising=False)
        assert one_pass('cpu', torch.float32) is None
    yield request.param
    one_pass.cache_clear()


def _any_size(monkeypatch):
    for name in ('ONE_PASS_FROM', 'PACKED_FROM'):
        monkeypatch.setattr(products, name, 0)
    _faster(monkeypatch)


def _faster(monkeypatch, faster: bool = True):
    monkeypatch.setattr(products, 'is_faster', lambda dtype: faster)


@pytest.mark.parametrize(('dtype', 'bound'), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize('bias', [False, True])
@ways
def test_a_product_equals_its_layers_one_by_one(operators, dtype, bound, bias, way):
    torch.manual_seed(0)
    layers = [Linear(24, width, bias=bias).to(dtype) for width in (8, 40)]
    x = torch.randn(3, 5, 24)
    with torch.inference_mode():
        expected = torch.cat([layer(x.to(dtype)) for layer in layers], dim=-1)
        product = Product(layers, way)
        for found, wanted in (
            (product(x), expected),
            (product(x, gelu_tanh), F.gelu(expected, approximate='tanh')),
            (product(x, F.silu), F.silu(expected)),
        ):
            assert found.dtype == dtype
            torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
        if not bias:
            out = torch.empty(15, 48, dtype=dtype)
            product.into(x.to(dtype).flatten(0, 1), out)
            torch.testing.assert_close(out.view(3, 5, 48), expected, rtol=bound, atol=bound)
            found = product.matmul_via(torch.empty_like(out), x.to(dtype).flatten(0, 1))
            assert torch.equal(found, out)


@pytest.mark.parametrize(('dtype', 'bound'), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize('activation', [gelu_tanh, F.silu])
@ways
def test_a_gated_product_equals_its_layers_one_by_one(operators, dtype, bound, activation, way):
    torch.manual_seed(0)
    mlp = GatedMlp(24, 40, activation).to(dtype)
    x = torch.randn(3, 5, 24)
    with torch.inference_mode():
        expected = activation(mlp.gate(x)) * mlp.up(x)
        found = GatedProduct(mlp.gate, mlp.up, activation, way)(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
        # The layers' weights are views of the merged ones, and still theirs.
        assert torch.equal(activation(mlp.gate(x)) * mlp.up(x), expected)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('tokens', [1, 4, 7])
def test_a_packed_matrix_serves_any_number_of_tokens(dtype, tokens, monkeypatch):
    _any_size(monkeypatch)
    if one_pass('cpu', dtype) is None:
        pytest.skip('this PyTorch has no such operator')
    torch.manual_seed(0)
    layer = Linear(40, 24, bias=False).to(dtype)
    x = torch.randn(tokens, 40).to(dtype)
    with torch.inference_mode():
        product = Product([layer], FEW)
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(product(x), layer(x), rtol=bound, atol=bound)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_wide_copy_keeps_no_packed_matrix(dtype, monkeypatch):
    _faster(monkeypatch)
    if one_pass('cpu', dtype) is None:
        pytest.skip('this PyTorch has no such operator')
    mlp = GatedMlp(24, 40, gelu_tanh).to(dtype)
    x = torch.randn(3, 5, 24)
    with torch.inference_mode():
        packed = Product([mlp.gate], FEW), GatedProduct(mlp.gate, mlp.up, gelu_tanh, FEW)
        expected = mlp.float().gate(x), gelu_tanh(mlp.gate(x)) * mlp.up(x)
        for product, wanted in zip(packed, expected, strict=True):
            assert any(map(_is_packed, vars(product).values()))
            wide = product.in_float32()
            assert not any(map(_is_packed, vars(wide).values()))
            torch.testing.assert_close(wide(x), wanted, rtol=1e-5, atol=1e-5)


def _is_packed(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_mkldnn


@pytest.mark.parametrize(
    ('device', 'dtype', 'outputs_first'),
    [('cpu', torch.float32, False), ('cpu', torch.bfloat16, True), ('meta', torch.float32, True)],
)
def test_a_matrix_is_turned_round_for_a_cpu_alone(monkeypatch, device, dtype, outputs_first):
    # Without memory this imports seconds of PyTorch's compiler.
    monkeypatch.setattr(torch, 'cat', lambda parts: parts[0])
    # Triton kernels would take a copy of what is turned round.
    layer = Linear(40, 24, bias=False).to(device, dtype)
    assert Product([layer], FEW).weight.is_contiguous() == outputs_first


def test_products_below_the_sizes_do_not_pack(monkeypatch):
    calls = []
    _faster(monkeypatch)
    monkeypatch.setattr(products, 'one_pass', lambda device, dtype: calls.append)
    with torch.inference_mode():
        Product([Linear(40, 24, bias=False)], FEW)(torch.randn(3, 40))
    assert not calls


@pytest.mark.parametrize(
    ('has_mkl', 'capability', 'vendor', 'faster'),
    [
        (True, 'AVX512', 'AuthenticAMD', True),
        (True, 'AVX512_BF16', 'AuthenticAMD', True),
        (True, 'AVX512', 'GenuineIntel', False),
        (True, 'AVX2', 'AuthenticAMD', False),
        (True, 'AVX2', 'GenuineIntel', False),
        (True, 'DEFAULT', 'AuthenticAMD', False),
        # Arm.
        (False, 'DEFAULT', '', True),
        (False, 'SVE256', '', True),
    ],
)
def test_float32_takes_one_pass_by_the_instructions_and_the_maker_of_the_processor(
    monkeypatch, has_mkl, capability, vendor, faster
):
    monkeypatch.setattr(products, 'cpu_vendor', lambda: vendor)
    monkeypatch.setattr(torch.backends.mkl, 'is_available', lambda: has_mkl)
    monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: capability)
    assert products.is_faster(torch.float32) == faster
    assert products.is_faster(torch.bfloat16)


def test_where_one_pass_is_slower_products_are_pytorchs_own_bit_for_bit(monkeypatch):
    _any_size(monkeypatch)
    _faster(monkeypatch, False)
    mlp, layer = GatedMlp(24, 40, gelu_tanh), Linear(24, 40)
    x = torch.randn(3, 5, 24)
    with torch.inference_mode():
        product, gated = Product([layer], FEW), GatedProduct(mlp.gate, mlp.up, gelu_tanh, FEW)
        assert not any(map(_is_packed, (*vars(product).values(), *vars(gated).values())))
        expected = F.linear(x, product.weight, product.bias)
        assert torch.equal(product(x), expected)
        assert torch.equal(product(x, gelu_tanh), gelu_tanh(expected))
        gate, up = F.linear(x, gated.weight).chunk(2, dim=-1)
        assert torch.equal(gated(x), gelu_tanh(gate) * up)


def test_a_gpu_has_no_such_operator():
    assert one_pass('cuda', torch.bfloat16) is None
