"""Linear layers of ternary weights, and activations in 8 bits with a scale a token.

    codes = round(x * 127 / max|x|), one scale a token, halves to even
    y = (codes . weights) * (scale of the weights / scale of the token) + bias

The product is one of whole numbers, exact in whatever order it is summed. Weights stay packed, two
bits each, and are unpacked for a product. On a CPU that multiplies bytes (VNNI) and on CUDA it is
`torch._int_mm`; elsewhere float32, whose sums stay below 2^24 and so are exact. Both halves are
operators of their own, each one node of a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from vla_runtime.family.ternary_weights import PER_BYTE, packed_width
from vla_runtime.models.blocks.layers import QueryScale

# Smallest of the largest numbers that a scale is made of, and largest code.
SMALLEST, LARGEST_CODE = 1e-5, 127
# torch._int_mm on CUDA takes more rows than this, and columns in multiples.
_CUDA_ROWS, _CUDA_MULTIPLE = 16, 8

_library = torch.library.Library('vla_runtime', 'DEF')
_library.define('quantise_tokens(Tensor x) -> (Tensor, Tensor)')
_library.define(
    'ternary_product(Tensor codes, Tensor token_scale, Tensor packed, Tensor scale, Tensor? bias) '
    '-> Tensor'
)


def quantise_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round every token (..., K), any float dtype, to 8 bits.

    Returns codes (..., K) int8 and scales (..., 1) float32: codes divided by the scale are x,
    rounded.
    """
    codes, scale = torch.ops.vla_runtime.quantise_tokens(x)
    return codes, scale


def unpack(packed: Tensor, inputs: int) -> Tensor:
    """Unpack (N, bytes) uint8 into (N, inputs) int8 of -1, 0 and 1."""
    outputs, width = packed.shape
    signed = packed.view(torch.int8)
    unpacked = torch.empty(outputs, PER_BYTE, width, dtype=torch.int8, device=packed.device)
    for place in range(PER_BYTE):
        # To the highest two bits, and down again with their sign.
        part = unpacked[:, place]
        torch.bitwise_left_shift(signed, 6 - 2 * place, out=part)
        part.bitwise_right_shift_(6)
    return unpacked.view(outputs, -1)[:, :inputs]


class TernaryLinear(nn.Module):
    """A linear layer of ternary weights: (..., inputs), any float, to (..., outputs) float32.

    Attributes:
        packed: (outputs, bytes) uint8, as `ternary_weights.pack` writes it.
        weight_scale: () float32.
        bias: (outputs,) float32, or None.
    """

    packed: Tensor

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.register_buffer(
            'packed', torch.zeros(outputs, packed_width(inputs), dtype=torch.uint8)
        )
        self.weight_scale = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.product(*quantise_tokens(x))

    def product(self, codes: Tensor, token_scale: Tensor) -> Tensor:
        """Multiply tokens that `quantise_tokens` has rounded."""
        return torch.ops.vla_runtime.ternary_product(
            codes, token_scale, self.packed, self.weight_scale, self.bias
        )


class TernaryQuery(TernaryLinear, QueryScale):
    """The query projection of an attention with scores scaled by 1/sqrt(head_dim)."""

    def __init__(self, inputs: int, outputs: int, head_dim: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.query_scale = head_dim**-0.5


def apply_together(layers: Sequence[TernaryLinear], x: Tensor) -> list[Tensor]:
    """Return the output of each layer for the same tokens, which are rounded once."""
    rounded = quantise_tokens(x)
    return [layer.product(*rounded) for layer in layers]


@torch.library.impl(_library, 'quantise_tokens', 'CompositeExplicitAutograd')
def _quantise_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    largest = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True)
    # As published: the reciprocal, times 127.
    scale = largest.clamp_(min=SMALLEST).reciprocal_().mul_(float(LARGEST_CODE))
    return (x * scale).round_().clamp_(-LARGEST_CODE - 1, LARGEST_CODE).to(torch.int8), scale


@torch.library.impl(_library, 'ternary_product', 'CompositeExplicitAutograd')
def _ternary_product(
    codes: Tensor, token_scale: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    rows = codes.reshape(-1, codes.shape[-1])
    whole = _multiply(rows, unpack(packed, rows.shape[1]))
    result = whole.to(torch.float32).mul_(scale / token_scale.reshape(-1, 1))
    if bias is not None:
        result.add_(bias)
    return result.view(*codes.shape[:-1], packed.shape[0])


@torch.library.impl(_library, 'ternary_product', 'Meta')
def _product_shape(
    codes: Tensor, token_scale: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    # Of operators with a gradient, from which a network's parameters are found.
    result = (scale / token_scale).expand(*codes.shape[:-1], packed.shape[0])
    return result.clone() if bias is None else result + bias


@register_flop_formula(torch.ops.vla_runtime.ternary_product)
def _operations(codes: Any, token_scale: Any, packed: Any, *_: Any, **__: Any) -> int:
    """Count multiply-adds as two operations; PyTorch passes shapes."""
    count = 2 * packed[0]
    for size in codes:
        count *= size
    return count


@cache
def multiplies_bytes() -> bool:
    """Return whether PyTorch multiplies bytes on this CPU faster than floats."""
    has_vnni = getattr(torch.cpu, '_is_vnni_supported', lambda: False)()
    return bool(torch.backends.mkldnn.is_available() and has_vnni)


def _multiply(rows: Tensor, weights: Tensor) -> Tensor:
    """Product (M, N) of rows (M, K) and weights (N, K), both int8, in whole numbers."""
    if rows.is_cuda:
        return multiply_padded(rows, weights)
    if multiplies_bytes():
        return torch._int_mm(rows, weights.t())
    return rows.float() @ weights.float().t()


def multiply_padded(rows: Tensor, weights: Tensor) -> Tensor:
    """Product (M, N) int32 of rows (M, K) and weights (N, K), padded with zeros as CUDA wants."""
    count, (outputs, inputs) = rows.shape[0], weights.shape
    more_rows = max(0, _CUDA_ROWS + 1 - count)
    more_in, more_out = -inputs % _CUDA_MULTIPLE, -outputs % _CUDA_MULTIPLE
    if more_rows or more_in:
        rows = nn.functional.pad(rows, (0, more_in, 0, more_rows))
    if more_in or more_out:
        weights = nn.functional.pad(weights, (0, more_in, 0, more_out))
    return torch._int_mm(rows, weights.t())[:count, :outputs]
