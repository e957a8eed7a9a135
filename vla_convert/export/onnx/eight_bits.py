"""Matrix products in 8 bits, written as explicit quantisation: one form for every runtime.

    x ─ QuantizeLinear ─ DequantizeLinear ─┐
                     int8 matrix ─ DequantizeLinear ─ MatMul ─ float32

Invariants:
- both operands are of one type, int8 or 8-bit floats (e4m3fn), with zero point 0, all that TensorRT
  multiplies; unsigned inputs would gain little in ONNX Runtime, 0.026 of the time
  (benchmark/results/int8_products.json);
- an input has one scale, from the range that calibration found; a matrix has one a column;
- scales are float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vla_convert.export.onnx.graph import GraphWriter, Value
from vla_convert.export.onnx.quantised_products import Matrix, QuantisedProducts, Range
from vla_runtime.bundle.onnx_files import Precision

# Types by precision, and their largest numbers of both signs; TensorRT's weights have no -128.
KINDS: Mapping[Precision, torch.dtype] = {'int8': torch.int8, 'fp8': torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class EightBits(QuantisedProducts):
    """The products of a bundle's graphs that are in 8 bits, `int8` or `fp8`."""

    def __init__(
        self, ranges: Mapping[str, Range], beside: Precision, precision: Precision = 'int8'
    ) -> None:
        super().__init__(ranges, beside, precision)
        self._kind = KINDS[precision]
        # Of each matrix, once for all graphs.
        self._columns: dict[str, Tensor] = {}

    def _rounded(self, graph: GraphWriter, x: Value, largest: float) -> Value:
        scale = graph.constant(scales_of(torch.tensor(largest), self._kind))
        zero = graph.constant(torch.zeros((), dtype=self._kind))
        rounded = graph.node('QuantizeLinear', [x, scale, zero], x.shape, self._kind)
        return graph.node('DequantizeLinear', [rounded, scale, zero], x.shape, torch.float32)

    def _widened(self, graph: GraphWriter, matrix: Matrix) -> Value:
        name, shape, make = matrix.name, matrix.shape, matrix.make
        if name not in self._columns:
            self._columns[name] = scales_of(make().abs().amax(dim=0), self._kind)
        columns = self._columns[name]
        stored = graph.weights.named(
            f'{name}/{self.precision}',
            self._kind,
            shape,
            lambda: round_to_8_bits(make(), columns, self._kind),
        )
        return graph.node(
            'DequantizeLinear',
            [
                graph.initializer(stored, self._kind),
                graph.constant(columns, f'{name}/scales'),
                graph.constant(torch.zeros(shape[1], dtype=self._kind)),
            ],
            shape,
            torch.float32,
            axis=1,
        )


def scales_of(largest: Tensor, kind: torch.dtype = torch.int8) -> Tensor:
    """Return float32 scales for numbers up to these; 1 where all are zero, as TensorRT takes no 0.

    Args:
        largest: absolute numbers.
        kind: type in 8 bits.
    """
    scales = (largest / _LARGEST[kind]).to(torch.float32)
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def round_to_8_bits(matrix: Tensor, columns: Tensor, kind: torch.dtype = torch.int8) -> Tensor:
    """Return a matrix (in, out) in units of its columns' scales, in 8 bits."""
    most = _LARGEST[kind]
    scaled = matrix / columns
    return (scaled if kind.is_floating_point else scaled.round()).clamp(-most, most).to(kind)
