"""Matrix products in 8-bit floating point (float8_e4m3fn), with a scale a row of both sides.

A layer's weights have one scale an output. Activations get one a token when they come: its largest
number becomes 448, the format's largest. So nothing is calibrated, and nothing saturates. Products
are added up in float32, scaled, and leave in bfloat16. On CUDA `torch._scaled_mm` multiplies;
elsewhere float32 products give the same numbers, slowly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
# Of the activations, the results, and all else that a layer in 8 bits holds.
BESIDE = torch.bfloat16
# Rows of smaller numbers become zeros: their scale would leave float32's range.
_SMALLEST = 2.0**-100
# Both sides of the weights, as the tensor cores take them.
_MULTIPLE = 16
# Tokens that a product is compared on: a state, the actions of a chunk, a prompt with images.
_COMPARED_TOKENS = (1, 50, 800)
# Rounding to bfloat16 is 2^-9 of a result; tensor cores add with fewer bits than float32 has.
_OF_RESULT, _OF_TERMS = 2.0**-7, 2.0**-11

_compared: set[tuple[Any, ...]] = set()


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to 8 bits, to the nearest, ties to even.

    Args:
        x: (..., K), any float dtype. A number that is none makes its whole row so.

    Returns:
        (..., K) in `E4M3` and (..., 1) float32; their product is x up to rounding
    """
    scale = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
    scale = scale.clamp_(min=_SMALLEST).div_(LARGEST)
    return (x / scale).to(E4M3), scale


def multiply(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer whose weights are in 8 bits.

    Args:
        x: (..., K), any float dtype. Its gradient, where it has one, is that of the layer without
            the rounding of x.
        weight: (N, K) in `E4M3`; scale: (N,) float32, of `quantise`.
        bias: (N,) in `BESIDE`, or None.

    Returns:
        (..., N) in `BESIDE`
    """
    if x.requires_grad:
        return _Differentiable.apply(x, weight, scale, bias)
    rows, scales = quantise(x.to(BESIDE).reshape(-1, x.shape[-1]))
    product = _by_tensor_cores if rows.is_cuda else by_definition
    return product(rows, scales, weight, scale, bias).view(*x.shape[:-1], -1)


def by_definition(
    rows: Tensor, scales: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply in float32, on any device.

    Args:
        rows, scales: result of `quantise`, (M, K) and (M, 1).
        weight, scale, bias: weight, scale and bias, as for `multiply`.
    """
    product = (rows.float() @ weight.float().t()).mul_(scales).mul_(scale)
    return (product if bias is None else product.add_(bias)).to(BESIDE)


def _by_tensor_cores(
    rows: Tensor, scales: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """As `by_definition`, up to rounding, on CUDA."""
    outputs, inputs = weight.shape
    more_out, more_in = -outputs % _MULTIPLE, -inputs % _MULTIPLE
    if more_out or more_in:
        rows, weight = _pad(rows, 0, more_in), _pad(weight, more_out, more_in)
        scale = torch.nn.functional.pad(scale, (0, more_out))
        bias = None if bias is None else torch.nn.functional.pad(bias, (0, more_out))
    result = torch._scaled_mm(
        rows,
        weight.t(),
        scale_a=scales,
        scale_b=scale[None],
        bias=bias,
        out_dtype=BESIDE,
        use_fast_accum=False,
    )
    return result[:, :outputs] if more_out else result


def _pad(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Append rows and columns of zeros."""
    as_bytes = torch.nn.functional.pad(matrix.view(torch.uint8), (0, columns, 0, rows))
    return as_bytes.view(E4M3)


class _Differentiable(torch.autograd.Function):
    """`multiply` with a gradient for x."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        context.save_for_backward(weight, scale)
        context.dtype = x.dtype
        return multiply(x.detach(), weight, scale, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        weight, scale = context.saved_tensors
        of_rows = (gradient * scale).to(BESIDE) @ weight.to(BESIDE)
        return of_rows.to(context.dtype), None, None, None


def require_equal(weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    """Refuse a CUDA device on which a layer's products are not those of `by_definition`.

    Compared once a process and device for each shape, on random activations.

    Args:
        weight, scale, bias: weight, scale and bias, as for `multiply`.

    Raises:
        ValueError: other numbers, or a device that cannot multiply them; says what to use instead.
    """
    key = (weight.device, weight.shape, bias is not None)
    if not weight.is_cuda or key in _compared:
        return
    for tokens in _COMPARED_TOKENS:
        _compare(tokens, weight, scale, bias)
    _compared.add(key)


def _compare(tokens: int, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    """Compare one product of tensor cores with `by_definition`; raises as `require_equal`."""
    outputs, inputs = weight.shape
    what = f"precision 'fp8': {tokens}x{inputs} by {inputs}x{outputs} in 8 bits on {weight.device}"
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(tokens, inputs, generator=generator, device=weight.device)
    # Tokens of different sizes, so that each needs its own scale.
    rows, scales = quantise(x.mul_(torch.logspace(-2, 2, tokens, device=x.device)[:, None]))
    try:
        found = _by_tensor_cores(rows, scales, weight, scale, bias).float()
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{what}: PyTorch {torch.__version__} cannot multiply them there: {error}; use bfloat16'
        ) from error
    expected = by_definition(rows, scales, weight, scale, bias).float()
    terms = (rows.float().abs() @ weight.float().abs().t()).mul_(scales).mul_(scale)
    off = (found - expected).abs()
    if not (off <= _OF_RESULT * expected.abs() + _OF_TERMS * terms).all():
        raise ValueError(
            f'{what}: other numbers than in float32, by up to {off.max():.2g} where the largest '
            f'is {expected.abs().max():.2g}; use bfloat16'
        )
