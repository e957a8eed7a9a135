"""Products in 8-bit floating point: rounding, scales, and what the tensor cores are given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from vla_runtime.families.blocks import float8
from vla_runtime.families.blocks.float8 import E4M3, by_definition, multiply, quantise

# Every finite number of the format that is not negative, in the order of its bits: 4 bits of
# exponent with bias 7, 3 of mantissa, exponent 0 without the leading one, all ones no number.
GRID = np.array(
    [
        m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
        for e in range(16)
        for m in range(8)
        if (e, m) != (15, 7)
    ]
)
SHAPES = [(1, 16, 16), (50, 96, 24), (7, 40, 64), (3, 24, 8)]


def nearest(x: np.ndarray) -> np.ndarray:
    """The nearest number of the format; of two, the one whose last bit is 0."""
    above = np.searchsorted(GRID, np.abs(x)).clip(max=len(GRID) - 1)
    below = (above - 1).clip(min=0)
    up, down = GRID[above] - np.abs(x), np.abs(x) - GRID[below]
    takes_above = (up < down) | ((up == down) & (above % 2 == 0))
    return np.copysign(np.where(takes_above, GRID[above], GRID[below]), x)


def layer(outputs: int, inputs: int, bias: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights with columns of very different sizes, their scales, and a bias."""
    torch.manual_seed(1)
    sizes = torch.logspace(-3, 2, outputs)[:, None]
    weight, scale = quantise(torch.randn(outputs, inputs) * sizes)
    return weight, scale.squeeze(-1), torch.randn(outputs).bfloat16() if bias else None


def definition(rows, scales, weight, scale, bias) -> np.ndarray:
    """Product, scales and bias in float64."""
    wide = [tensor.double().numpy() for tensor in (rows, scales, weight, scale)]
    product = (wide[0] @ wide[2].T) * wide[1] * wide[3]
    return product + (0.0 if bias is None else bias.double().numpy())


def test_the_format_ends_at_448():
    assert GRID[-1] == float8.LARGEST == 448.0
    assert len(GRID) == 127 and (np.diff(GRID) > 0).all()


def test_numbers_are_rounded_to_the_nearest_and_ties_to_even():
    middles = (GRID[1:] + GRID[:-1]) / 2
    near = np.concatenate([GRID, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), [1e-12]])
    # With 448 as its largest number the row's scale is one.
    row = np.concatenate([near, -near]).astype(np.float32)
    found, scale = quantise(torch.from_numpy(row))
    assert scale.item() == 1.0
    np.testing.assert_array_equal(found.float().numpy(), nearest(row.astype(np.float64)))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_every_row_has_the_scale_of_its_largest_number(dtype):
    torch.manual_seed(0)
    x = (torch.randn(40, 64) * torch.logspace(-4, 4, 40)[:, None]).to(dtype)
    found, scale = quantise(x)
    wide = x.float().numpy()
    expected = np.abs(wide).max(axis=1, keepdims=True) / np.float32(448.0)
    assert scale.shape == (40, 1) and scale.dtype == torch.float32
    np.testing.assert_array_equal(scale.numpy(), expected)
    np.testing.assert_array_equal(found.float().numpy(), nearest((wide / expected).astype(float)))
    # Nothing saturates, and the largest number is kept whole.
    assert (found.float().abs().amax(dim=1) == 448.0).all()


def test_a_row_of_zeros_stays_zeros_and_one_of_tiny_numbers_becomes_that():
    found, scale = quantise(torch.tensor([[0.0, 0.0], [1e-44, -1e-40], [1.0, 0.0]]))
    assert found.float().tolist() == [[0.0, 0.0], [0.0, 0.0], [448.0, 0.0]]
    assert torch.isfinite(scale).all() and (scale > 0).all()


@pytest.mark.parametrize('number', [float('nan'), float('inf'), -float('inf')])
def test_what_is_no_number_spoils_its_own_row_and_no_other(number):
    x = torch.ones(3, 16)
    x[1, 5] = number
    weight, scale, _ = layer(8, 16)
    found = multiply(x, weight, scale, None)
    assert found[1].isnan().all()
    assert torch.isfinite(found[[0, 2]]).all() and torch.equal(found[0], found[2])


@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize(('tokens', 'inputs', 'outputs'), SHAPES)
def test_a_layer_is_its_definition_rounded_once(tokens, inputs, outputs, bias):
    weight, scale, added = layer(outputs, inputs, bias)
    x = torch.randn(2, tokens, inputs) * torch.logspace(-2, 2, tokens)[:, None]
    found = multiply(x, weight, scale, added)
    assert found.dtype == torch.bfloat16 and found.shape == (2, tokens, outputs)
    rows, scales = quantise(x.bfloat16().flatten(0, 1))
    expected = definition(rows, scales, weight, scale, added)
    off = np.abs(found.flatten(0, 1).double().numpy() - expected)
    # Half of bfloat16's last bit, and float32's error where a bias takes most of a sum away.
    terms = definition(rows.float().abs(), scales, weight.float().abs(), scale, None)
    assert (off <= 2.0**-8 * np.abs(expected) + 1e-5 * terms).all()
    # The rounding to 8 bits shows: the numbers are not those of the layer in float32.
    whole = x.flatten(0, 1).double().numpy() @ (weight.double() * scale[:, None]).numpy().T
    assert np.abs(expected - whole).max() > 1e-3 * np.abs(whole).max() or added is not None


def test_powers_of_two_pass_through_both_scales_exactly():
    weight, scale, _ = layer(24, 48)
    x = torch.randn(5, 48)
    powers, of_outputs = 2.0 ** torch.arange(-2, 3), 2.0 ** (torch.arange(24) % 7 - 3)
    plain = multiply(x, weight, scale, None)
    of_rows = multiply(x * powers[:, None], weight, scale, None)
    assert torch.equal(of_rows.float(), plain.float() * powers[:, None])
    found = multiply(x, weight, scale * of_outputs, None)
    assert torch.equal(found.float(), plain.float() * of_outputs)


def test_the_gradient_is_that_of_the_layer_without_rounding_of_its_input():
    weight, scale, bias = layer(24, 48, bias=True)
    x = torch.randn(3, 48, requires_grad=True)
    found = multiply(x, weight, scale, bias)
    assert torch.equal(found, multiply(x.detach(), weight, scale, bias))
    given = torch.randn(3, 24).bfloat16()
    (gradient,) = torch.autograd.grad(found, x, given)
    matrix = weight.double() * scale.double()[:, None]
    terms = given.abs().double() @ matrix.abs()
    assert gradient.dtype == torch.float32
    # Products of bfloat16, as a layer's gradient is in that precision.
    assert ((gradient.double() - given.double() @ matrix).abs() <= 2.0**-7 * terms).all()


def scaled_mm(a, b, *, scale_a, scale_b, bias, out_dtype, use_fast_accum):
    """`torch._scaled_mm` on CUDA with row-wise scales: its checks, and its product in float64."""
    assert a.dtype == b.dtype == E4M3 and a.dim() == b.dim() == 2
    (m, k), n = a.shape, b.shape[1]
    assert b.shape[0] == k and k % 16 == n % 16 == 0
    assert a.stride() == (k, 1), 'the first operand is row-major'
    assert b.stride() == (1, k), 'the second operand is column-major'
    assert scale_a.shape == (m, 1) and scale_b.shape == (1, n)
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert scale_a.is_contiguous() and scale_b.is_contiguous() and scale_b.stride(1) == 1
    # Row-wise scales come with no other result on Ada and Blackwell, and that with no other bias.
    assert out_dtype == torch.bfloat16
    assert bias is None or (bias.dtype == torch.bfloat16 and bias.shape == (n,))
    assert bias is None or bias.is_contiguous()
    assert use_fast_accum is False
    result = torch.from_numpy(definition(a, scale_a, b.t(), scale_b[0], bias))
    return result.to(out_dtype)


@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize(('tokens', 'inputs', 'outputs'), SHAPES)
def test_tensor_cores_get_what_they_take_and_give_the_definition(
    monkeypatch, tokens, inputs, outputs, bias
):
    monkeypatch.setattr(torch, '_scaled_mm', scaled_mm)
    weight, scale, added = layer(outputs, inputs, bias)
    rows, scales = quantise(torch.randn(tokens, inputs))
    found = float8._by_tensor_cores(rows, scales, weight, scale, added)
    expected = by_definition(rows, scales, weight, scale, added)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=1e-5)
    float8._compare(tokens, weight, scale, added)


def of_one_token(a, b, **given):
    scales = given['scale_a'].flip(0).contiguous()
    return scaled_mm(a, b, **{**given, 'scale_a': scales})


def of_one_output(a, b, **given):
    mean = torch.full_like(given['scale_b'], given['scale_b'].mean())
    return scaled_mm(a, b, **{**given, 'scale_b': mean})


def in_few_bits(a, b, *, scale_a, scale_b, bias, **given):
    sums = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16)
    for k in range(a.shape[1]):
        sums = (sums + (a[:, k : k + 1].float() @ b[k : k + 1].float()).half() / 256).half()
    return (sums.float() * 256 * scale_a * scale_b).bfloat16()


def nothing(a, b, **given):
    return torch.full((a.shape[0], b.shape[1]), torch.nan).bfloat16()


@pytest.mark.parametrize('wrong', [of_one_token, of_one_output, in_few_bits, nothing])
def test_a_device_with_other_numbers_is_refused_and_what_to_use_instead_is_said(monkeypatch, wrong):
    weight, scale, _ = layer(48, 1024)
    monkeypatch.setattr(torch, '_scaled_mm', wrong)
    with pytest.raises(
        ValueError, match=r"'fp8': 50x1024 by 1024x48 .*other numbers.*use bfloat16"
    ):
        float8._compare(50, weight, scale, None)


@pytest.mark.parametrize(
    'error', [RuntimeError('CUTLASS cannot run'), TypeError('missing arguments')], ids=str
)
def test_a_pytorch_that_cannot_multiply_is_quoted(monkeypatch, error):
    def refuse(*args, **given):
        raise error

    monkeypatch.setattr(torch, '_scaled_mm', refuse)
    with pytest.raises(ValueError, match=f'cannot multiply them there: {error}; use bfloat16'):
        float8._compare(1, *layer(16, 16))


def test_too_little_memory_is_no_fault_of_the_product(monkeypatch):
    def refuse(*args, **given):
        raise torch.cuda.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(torch, '_scaled_mm', refuse)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        float8._compare(1, *layer(16, 16))
