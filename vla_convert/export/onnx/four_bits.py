"""Matrix products in NVFP4: 4-bit floats (e2m1) in blocks of 16 with a scale of 8 bits each.

An MLP's last product is in 8-bit floats instead (`eight_bits`), since few large values there take
the range from the others.

    x ─ TRT_FP4DynamicQuantize ─ numbers ──────────────────┐
                     └─ scales ─ DequantizeLinear ─ DequantizeLinear ─┐
          8-bit scales ─ DequantizeLinear ─┐                          │
                 4-bit matrix ─ DequantizeLinear ──────────────── MatMul ─ float32

A scale of 8 bits (e4m3) is itself in units of one float32 scale: of the whole matrix, or of the
whole input, from the range that calibration found. The input's scales of 8 bits are computed as it
comes, by TensorRT's own operator, since ONNX has none; all else is ONNX's, operator set 23.

Invariants:
- blocks lie along the axis that is summed over; where its length is no multiple of 16, a product
  stays as it is beside;
- numbers are in units of their block's scale as it is stored, so 6, the largest, is the block's
  largest number up to the rounding of that scale; a block of zeros has the scale 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vla_convert.export.onnx.eight_bits import EightBits
from vla_convert.export.onnx.graph import GraphWriter, Value
from vla_convert.export.onnx.quantised_products import (
    Matrix,
    QuantisedProducts,
    Range,
    leaves_mlp,
)
from vla_convert.export.onnx.weights import ONNX_TYPE
from vla_runtime.bundle.onnx_files import (
    FP4_BLOCK,
    FP4_DOMAIN,
    FP4_ROUNDING,
    FP4_VALUES,
    Precision,
)

# Two numbers a byte, the first in its lower half, as ONNX stores them.
NUMBERS, SCALES = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
_LARGEST_NUMBER, _LARGEST_SCALE = FP4_VALUES[-1], 448.0


class FourBits(QuantisedProducts):
    """The products of a bundle's graphs that are in NVFP4."""

    def __init__(self, ranges: Mapping[str, Range], beside: Precision) -> None:
        super().__init__(ranges, beside, 'nvfp4')
        self._eight_bits = EightBits(ranges, beside, 'fp8')
        # Of each matrix, once for all graphs.
        self._units: dict[str, Tensor] = {}

    def takes(self, matrix: Matrix) -> bool:
        rows, columns = matrix.shape
        fits = rows % FP4_BLOCK == 0 and columns % 2 == 0
        return super().takes(matrix) and (fits or leaves_mlp(rows, columns))

    def products(
        self, graph: GraphWriter, x: Value, name: str, matrices: Sequence[Matrix]
    ) -> list[Value]:
        if leaves_mlp(*matrices[0].shape):
            return self._eight_bits.products(graph, x, name, matrices)
        return super().products(graph, x, name, matrices)

    def _rounded(self, graph: GraphWriter, x: Value, largest: float) -> Value:
        whole = graph.constant(_whole_scale(torch.tensor(largest)))
        numbers, scales = graph.nodes(
            FP4_ROUNDING,
            [x, whole],
            [x.shape, (*x.shape[:-1], x.shape[-1] // FP4_BLOCK)],
            NUMBERS,
            domain=FP4_DOMAIN,
            axis=-1,
            block_size=FP4_BLOCK,
            scale_type=ONNX_TYPE[SCALES],
        )
        return _widen(graph, numbers, replace(scales, dtype=SCALES), whole, axis=-1)

    def _widened(self, graph: GraphWriter, matrix: Matrix) -> Value:
        name, (rows, columns) = matrix.name, matrix.shape
        if name not in self._units:
            self._units[name] = _whole_scale(matrix.make().abs().amax())
        whole = self._units[name]

        def stored(part: str, kind: torch.dtype, length: int, make: Callable[[], Tensor]) -> Value:
            full = f'{name}/{self.precision}{part}'
            return graph.initializer(graph.weights.named(full, kind, (length, columns), make), kind)

        return _widen(
            graph,
            stored('', NUMBERS, rows, lambda: _packed(matrix.make(), whole)),
            stored('/scales', SCALES, rows // FP4_BLOCK, lambda: _scales(matrix.make(), whole)),
            graph.constant(whole),
            axis=0,
        )


def _widen(graph: GraphWriter, numbers: Value, scales: Value, whole: Value, axis: int) -> Value:
    for value in (numbers, scales):
        graph.declare(value)
    wide = graph.node('DequantizeLinear', [scales, whole], scales.shape, torch.float32)
    return graph.node(
        'DequantizeLinear',
        [numbers, wide],
        numbers.shape,
        torch.float32,
        axis=axis,
        block_size=FP4_BLOCK,
    )


def _whole_scale(largest: Tensor) -> Tensor:
    """Return the unit of the scales of blocks whose numbers are at most so large."""
    scale = (largest / (_LARGEST_NUMBER * _LARGEST_SCALE)).to(torch.float32)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _blocks(matrix: Tensor) -> Tensor:
    """Return a matrix (in, out) as (in / 16, 16, out)."""
    return matrix.reshape(-1, FP4_BLOCK, matrix.shape[1])


def _scales(matrix: Tensor, whole: Tensor) -> Tensor:
    """Return the scales of a matrix's blocks, (in / 16, out), in units of `whole`."""
    largest = _blocks(matrix).abs().amax(dim=1)
    return (largest / (_LARGEST_NUMBER * whole)).clamp(max=_LARGEST_SCALE).to(SCALES)


def _packed(matrix: Tensor, whole: Tensor) -> Tensor:
    """Return a matrix's numbers in units of its blocks' scales, two a byte, (in, out / 2)."""
    steps = _scales(matrix, whole).to(torch.float32) * whole
    # What is rounded to no scale at all is 0 whatever its numbers are.
    units = _blocks(matrix) / torch.where(steps > 0, steps, torch.inf)[:, None]
    codes = four_bit_codes(units).reshape(len(matrix), -1, 2)
    return (codes[..., 0] | codes[..., 1] << 4).view(NUMBERS)


def four_bit_codes(numbers: Tensor) -> Tensor:
    """Round to the nearest 4-bit float, halfway to the even one; return its bits in a byte each."""
    sizes = numbers.abs().clamp(max=_LARGEST_NUMBER)
    steps = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))
    rounded = (sizes / steps).round() * steps
    places = torch.bucketize(rounded.contiguous(), torch.tensor(FP4_VALUES))
    return (places + 8 * (numbers < 0)).to(torch.uint8)
