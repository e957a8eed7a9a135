"""Matrix products of which both factors are rounded to fewer bits (`eight_bits`, `four_bits`).

With half beside (for TensorRT), matrices with a bias over one input (q, k and v of a vision tower)
are separate products joined by Concat: of one product cut into heads TensorRT moves the scales to
the cut and multiplies by a float32 matrix. With float32 beside (for a CPU) they are one product:
ONNX Runtime computes none of several over one input in 8 bits.

Operands and results are float32.
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
    """A matrix (in, out) of the bundle, or several side by side with names joined by `+`.

    `dtype`: type in the traced network; `make` reads it as float32.
    """

    name: str
    dtype: dtype
    shape: tuple[int, int]
    make: Callable[[], Tensor]


def is_mlp_output(rows: int, columns: int) -> bool:
    """Return whether a matrix (in, out) is an MLP's last, whose inputs have outliers."""
    return rows > _MLP_RATIO * columns


class QuantisedProducts(ABC):
    """The products of a bundle's graphs that are in fewer bits.

    `ranges`: of each product's input by matrix names; `beside`: precision of the other large
    matrices.
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
        """Write the products (…, out) of a float32 value (…, in), rounded once, and matrices.

        `name`: matrix names as in the ranges.
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
