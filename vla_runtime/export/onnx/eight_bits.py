"""Matrix products in 8 bits, written as explicit quantisation: one form for every runtime.

    x ─ QuantizeLinear ─ DequantizeLinear ─┐
                     int8 matrix ─ DequantizeLinear ─ MatMul ─ float32

Matrices side by side with a bias (queries, keys and values of a vision tower) are a product each,
joined by Concat, in files with half beside 8 bits, which are for TensorRT: of one product that is
cut into heads it moves the matrix's scales to where it is cut, and multiplies an int8 input by a
float32 matrix. It joins the products itself. Files with float32 beside are for a CPU, and there one
product it is: of several over one input ONNX Runtime computes none in 8 bits.

Invariants:
- both operands are of one type, int8 or 8-bit floats (e4m3fn), with zero point 0, all that TensorRT
  multiplies; unsigned inputs would gain little in ONNX Runtime (benchmark/int8_products.py);
- an input has one scale, from the range that calibration found; a matrix has one a column;
- scales are float32, and so is what enters and leaves: whoever wants half casts afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_runtime.bundle.onnx_files import Precision
from vla_runtime.export.onnx.graph import GraphWriter, Value

Range = tuple[float, float]
# Types by precision, and their largest numbers of both signs; TensorRT's weights have no -128.
KINDS: Mapping[Precision, torch.dtype] = {'int8': torch.int8, 'fp8': torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True)
class Matrix:
    """A matrix of the bundle, or several side by side.

    Attributes:
        name: name in the bundle; several are joined by `+`.
        dtype: type that the traced network has it in.
        shape: (in, out).
        make: reads it as float32.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, int]
    make: Callable[[], Tensor]


class EightBits:
    """The products of a bundle's graphs that are in 8 bits.

    Args:
        ranges: smallest and largest number of each product's input, by the names of its matrices,
            joined as the graphs join them.
        beside: precision of the other large matrices.
        precision: `int8` or `fp8`.
    """

    def __init__(
        self, ranges: Mapping[str, Range], beside: Precision, precision: Precision = 'int8'
    ) -> None:
        self.beside, self.precision = beside, precision
        self._kind = KINDS[precision]
        self._ranges = ranges
        # Of each matrix, once for all graphs.
        self._columns: dict[str, Tensor] = {}

    @property
    def apart(self) -> bool:
        """Whether matrices side by side with a bias are a product each."""
        return self.beside != 'float32'

    def __contains__(self, matrix: str) -> bool:
        return matrix in self._ranges

    def products(
        self, graph: GraphWriter, x: Value, name: str, matrices: Sequence[Matrix]
    ) -> list[Value]:
        """Write the products of a float32 value (…, in) and matrices, over one rounded input.

        Args:
            graph: graph to write into.
            x: the input.
            name: of the matrices, joined as the ranges' are.
            matrices: the matrices.

        Returns:
            the products (…, out), float32
        """
        largest = max(map(abs, self._ranges[name]))
        scale = graph.constant(scales_of(torch.tensor(largest), self._kind))
        zero = graph.constant(torch.zeros((), dtype=self._kind))
        rounded = graph.node('QuantizeLinear', [x, scale, zero], x.shape, self._kind)
        left = graph.node('DequantizeLinear', [rounded, scale, zero], x.shape, torch.float32)
        return [self._product(graph, left, matrix) for matrix in matrices]

    def _product(self, graph: GraphWriter, left: Value, matrix: Matrix) -> Value:
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
        right = graph.node(
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
        return graph.node('MatMul', [left, right], (*left.shape[:-1], shape[1]))


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
