"""Matrix products of which both factors are rounded to fewer bits (`eight_bits`, `four_bits`).

Matrices side by side with a bias (queries, keys and values of a vision tower) are a product each,
joined by Concat, in files with half beside, which are for TensorRT: of one product that is cut into
heads it moves the matrix's scales to where it is cut, and multiplies a rounded input by a float32
matrix. It joins the products itself. Files with float32 beside are for a CPU, and there one product
it is: of several over one input ONNX Runtime computes none in 8 bits.

Invariant: what enters and leaves is float32; whoever wants half casts afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, dtype

from vla_convert.export.onnx.graph import GraphWriter, Value
from vla_runtime.bundle.onnx_files import Precision

Range = tuple[float, float]
# A matrix that shrinks its input by more than this is an MLP's last.
_MLP_RATIO = 2


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
    dtype: dtype
    shape: tuple[int, int]
    make: Callable[[], Tensor]


def leaves_mlp(rows: int, columns: int) -> bool:
    """Return whether a matrix (in, out) is an MLP's last, whose inputs have outliers."""
    return rows > _MLP_RATIO * columns


class QuantisedProducts(ABC):
    """The products of a bundle's graphs that are in fewer bits.

    Args:
        ranges: smallest and largest number of each product's input, by the names of its matrices,
            joined as the graphs join them.
        beside: precision of the other large matrices.
        precision: one of `QUANTISED`.
    """

    def __init__(
        self, ranges: Mapping[str, Range], beside: Precision, precision: Precision
    ) -> None:
        self.beside, self.precision = beside, precision
        self._ranges = ranges

    @property
    def apart(self) -> bool:
        """Whether matrices side by side with a bias are a product each."""
        return self.beside != 'float32'

    def takes(self, matrix: Matrix) -> bool:
        """Return whether the product with a matrix, or several side by side, is one of these."""
        return matrix.name in self._ranges

    def products(
        self, graph: GraphWriter, x: Value, name: str, matrices: Sequence[Matrix]
    ) -> list[Value]:
        """Write the products of a float32 value (…, in) and matrices, over one rounded input.

        Args:
            name: of the matrices, joined as the ranges' are.

        Returns:
            the products (…, out), float32
        """
        left = self._rounded(graph, x, max(map(abs, self._ranges[name])))
        return [self._product(graph, left, matrix) for matrix in matrices]

    def _product(self, graph: GraphWriter, left: Value, matrix: Matrix) -> Value:
        shape = (*left.shape[:-1], matrix.shape[1])
        return graph.node('MatMul', [left, self._widened(graph, matrix)], shape)

    @abstractmethod
    def _rounded(self, graph: GraphWriter, x: Value, largest: float) -> Value:
        """Round an input whose numbers are at most so large, and widen it again."""

    @abstractmethod
    def _widened(self, graph: GraphWriter, matrix: Matrix) -> Value:
        """Store a matrix in fewer bits, and widen it."""
