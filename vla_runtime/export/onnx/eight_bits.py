"""Matrix products in 8 bits, written as explicit quantisation: one form for every runtime.

    x ─ QuantizeLinear ─ DequantizeLinear ─┐
                     int8 matrix ─ DequantizeLinear ─ MatMul ─ float32

Invariants:
- both operands are signed with zero point 0, all that TensorRT multiplies; unsigned inputs would
  gain little in ONNX Runtime (benchmark/int8_products.py);
- an input has one scale, from the range that calibration found; a matrix has one a column;
- scales are float32, and so is what enters and leaves: whoever wants half casts afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vla_runtime.engines.onnx.files import Precision
from vla_runtime.export.onnx.graph import GraphWriter, Value

Range = tuple[float, float]
# Of a matrix's name in the graphs.
MATRIX_ENDING = '/int8'
# The largest of both signs; TensorRT's weights have no -128.
_LARGEST = 127.0


class EightBits:
    """The products of a bundle's graphs that are in 8 bits.

    Args:
        ranges: smallest and largest number of each product's input, by the names of its matrices,
            joined as the graphs join them.
        beside: precision of the other large matrices.
    """

    def __init__(self, ranges: Mapping[str, Range], beside: Precision) -> None:
        self.beside = beside
        self._ranges = ranges
        # Of each matrix, once for all graphs.
        self._columns: dict[str, Tensor] = {}

    def __contains__(self, matrix: str) -> bool:
        return matrix in self._ranges

    def product(
        self,
        graph: GraphWriter,
        x: Value,
        matrix: str,
        shape: tuple[int, ...],
        make: Callable[[], Tensor],
    ) -> Value:
        """Write the product of a float32 value (…, in) and a matrix; return (…, out) float32.

        Args:
            graph: graph to write into.
            x: the input.
            matrix: name of the matrix, one of the ranges'.
            shape: shape of the matrix, (in, out).
            make: reads the matrix as float32.
        """
        largest = max(map(abs, self._ranges[matrix]))
        scale = graph.constant(scales_of(torch.tensor(largest)))
        zero = graph.constant(torch.zeros((), dtype=torch.int8))
        rounded = graph.node('QuantizeLinear', [x, scale, zero], x.shape, torch.int8)
        left = graph.node('DequantizeLinear', [rounded, scale, zero], x.shape, torch.float32)
        if matrix not in self._columns:
            self._columns[matrix] = scales_of(make().abs().amax(dim=0))
        columns = self._columns[matrix]
        stored = graph.weights.named(
            f'{matrix}{MATRIX_ENDING}', torch.int8, shape, lambda: round_to_8_bits(make(), columns)
        )
        right = graph.node(
            'DequantizeLinear',
            [
                graph.initializer(stored, torch.int8),
                graph.constant(columns, f'{matrix}/scales'),
                graph.constant(torch.zeros(shape[1], dtype=torch.int8)),
            ],
            shape,
            torch.float32,
            axis=1,
        )
        return graph.node('MatMul', [left, right], (*x.shape[:-1], shape[1]))


def scales_of(largest: Tensor) -> Tensor:
    """Return float32 scales for numbers up to these; 1 where all are zero, as TensorRT takes no 0.

    Args:
        largest: absolute numbers.
    """
    scales = (largest / _LARGEST).to(torch.float32)
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def round_to_8_bits(matrix: Tensor, columns: Tensor) -> Tensor:
    """Return a matrix (in, out) in units of its columns' scales, as int8."""
    return (matrix / columns).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
