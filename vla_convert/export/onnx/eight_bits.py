"""Matrix products in 8 bits, written as explicit quantisation: one form for every runtime.

    x ─ QuantizeLinear ─ DequantizeLinear ─┐
                     int8 matrix ─ DequantizeLinear ─ MatMul ─ float32

Both operands are int8, or e4m3fn floats, with zero point 0: all that TensorRT multiplies; unsigned
inputs would save 0.026 of ONNX Runtime's time (benchmark/results/int8_products.json). An input has
one float32 scale, from calibration; a matrix has one a column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from vla_convert.export.onnx.graph import GraphWriter, Value
from vla_convert.export.onnx.quantised_products import Matrix, QuantisedProducts, Range
from vla_convert.export.onnx.ternary import ENDING
from vla_convert.export.onnx.weights import BundleWeights
from vla_runtime.bundle.onnx_files import Precision

# --- Rules of products in 8 bits. TensorRT reads unsigned numbers as signed with a warning, and
# runs a product of one rounded operand in the other's precision: neither shows in the errors.

_QUANTISE, _WIDEN = 'QuantizeLinear', 'DequantizeLinear'
_KINDS = (TensorProto.INT8, TensorProto.FLOAT8E4M3FN)
# What may read a rounded number, by what made it.
_READERS = {_QUANTISE: (_WIDEN,), _WIDEN: ('MatMul',)}


def eight_bit_faults(path: Path, model: onnx.ModelProto, types: Mapping[str, int]) -> list[str]:
    """List violations of the rules of 8-bit products, one sentence each that names the node.

    `path`: scales and zero points beside it are read; `types`: ONNX's type number of every tensor.
    """
    graph = _Graph(path, model.graph)
    faults = _misread(model.graph, types)
    for node in model.graph.node:
        if node.op_type in _READERS:
            faults += [_sentence(node, fault) for fault in graph.scale_faults(node)]
        elif node.op_type == 'MatMul' and (fault := graph.operand_fault(node)):
            faults.append(_sentence(node, fault))
    return faults


def matrix_faults(
    paths: Iterable[Path], weights: BundleWeights, factors: Mapping[str, float]
) -> list[str]:
    """List the 8-bit matrices that are not the bundle's rounded to the nearest step.

    A scale wrong by a factor would stay within the error bounds of 8 bits. `factors`: parameter
    name to the factor in the graphs. One matrix is read at a time.
    """
    faults, seen = [], set()
    for path in paths:
        proto = onnx.load(path, load_external_data=False).graph
        graph = _Graph(path, proto)
        for node in proto.node:
            if not graph.widens_a_matrix(node):
                continue
            matrix, scales = node.input[0], graph.numbers(node.input[1])
            if (matrix, scales.tobytes()) in seen or matrix.endswith(ENDING):
                continue
            seen.add((matrix, scales.tobytes()))
            exact = matrix_of_bundle(matrix, weights, factors)
            if exact is not None:
                found = graph.numbers(matrix).astype(np.float32) * scales
                if within_half_a_step(found, exact, graph.steps(matrix, exact, scales)):
                    continue
            faults.append(f"{path.name}: '{matrix}' is not the bundle's matrix in 8 bits")
    return faults


def matrix_of_bundle(
    stored: str, weights: BundleWeights, factors: Mapping[str, float]
) -> np.ndarray | None:
    """Return the matrix (in, out) that a quantised one is named after, if any.

    `stored`: names in the bundle, joined by `+`, and the precision.
    """
    names = stored.rpartition('/')[0].split('+')
    if not {*names} <= {*weights.names}:
        return None
    parts = [weights.read(one) * factors.get(one, 1.0) for one in names]
    return np.asarray(torch.cat(parts).T)


def within_half_a_step(found: np.ndarray, exact: np.ndarray, steps: np.ndarray) -> bool:
    """Return whether numbers are rounded to the nearest, up to what float32 adds to that."""
    return bool((np.abs(found - exact) <= steps * np.float32(0.501)).all())


def _sentence(node: onnx.NodeProto, fault: str) -> str:
    return f"node '{node.name or node.output[0]}' ({node.op_type}) {fault}"


def _misread(graph: onnx.GraphProto, types: Mapping[str, int]) -> list[str]:
    """List the nodes but matrix products that compute with numbers rounded to 8 bits."""
    rounded = {node.output[0]: node.op_type for node in graph.node if node.op_type in _READERS}
    rounded |= {name: _QUANTISE for name, kind in types.items() if kind in _KINDS}
    reads = {**_READERS, _QUANTISE: (_WIDEN, _QUANTISE)}
    return [
        _sentence(
            node, f"computes with '{name}', which was rounded to 8 bits; only matrix products may"
        )
        for node in graph.node
        for name in node.input
        if name in rounded and node.op_type not in reads[rounded[name]]
    ]


class _Graph:
    """A graph by what its tensors are made of."""

    def __init__(self, path: Path, graph: onnx.GraphProto) -> None:
        self._folder = str(path.parent)
        self._made = {name: node for node in graph.node for name in node.output}
        self._constants = {item.name: item for item in graph.initializer}

    def widens_a_matrix(self, node: onnx.NodeProto) -> bool:
        # In NVFP4 there are no zero points.
        constant = node.op_type == _WIDEN and node.input[0] in self._constants
        return constant and len(node.input) > 2

    def operand_fault(self, product: onnx.NodeProto) -> str:
        """Return what is wrong with a product of which an operand was rounded; empty if nothing."""
        widened = [
            self._made[name] if name in self._made and self._made[name].op_type == _WIDEN else None
            for name in product.input
        ]
        left, right = widened
        if left is None and right is None:
            return ''
        if left is None or right is None:
            return 'multiplies a number in 8 bits by one that is not; both operands must be'
        if left.input[0] not in self._made or right.input[0] not in self._constants:
            return 'must multiply an input, rounded as it comes, by a matrix in 8 bits'
        return ''

    def scale_faults(self, node: onnx.NodeProto) -> list[str]:
        """List what is wrong with scale, zero point and axis of a node that rounds or widens."""
        if len(node.input) < 3 or any(name not in self._constants for name in node.input[1:]):
            return ['needs a scale and a zero point that are constants']
        scales, zeros = (self.numbers(name) for name in node.input[1:])
        faults = []
        kind = self._constants[node.input[2]].data_type
        if kind not in _KINDS or zeros.astype(np.float32).any() or zeros.shape != scales.shape:
            faults.append('needs a signed zero point of 0 for every scale: TensorRT has no other')
        if not (np.isfinite(scales) & (scales > 0)).all():
            faults.append('has a scale that is not above 0')
        matrix = self._constants.get(node.input[0])
        if matrix is not None:
            if _axis(node) != 1 or scales.shape != (matrix.dims[-1],):
                faults.append('needs a scale for every column of its matrix, along axis 1')
        elif scales.size != 1:
            faults.append('needs one scale for the whole input')
        source = self._made.get(node.input[0])
        if node.op_type == _WIDEN and source is not None and len(source.input) > 1:
            given = self._constants.get(source.input[1])
            if given is None or not np.array_equal(self.numbers(given.name), scales):
                faults.append('widens by another scale than the one that its input was rounded by')
        return faults

    def steps(self, matrix: str, exact: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Return the distance of the numbers in 8 bits beside each number of a matrix."""
        if self._constants[matrix].data_type == TensorProto.INT8:
            return scales
        # Three bits after the first, and none below 2^-6.
        exponents = np.frexp(np.maximum(np.abs(exact / scales), 2.0**-6))[1] - 1
        return np.ldexp(scales, exponents - 3)

    def numbers(self, name: str) -> np.ndarray:
        """Return a constant, from the graph or from the file beside it."""
        return numpy_helper.to_array(self._constants[name], self._folder)


def _axis(node: onnx.NodeProto) -> int:
    found = (helper.get_attribute_value(item) for item in node.attribute if item.name == 'axis')
    return next(found, 1)


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
        # By matrix, once for all graphs.
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
    """Return float32 scales for the largest absolute numbers; 1 for 0, as TensorRT takes no 0."""
    scales = (largest / _LARGEST[kind]).to(torch.float32)
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def round_to_8_bits(matrix: Tensor, columns: Tensor, kind: torch.dtype = torch.int8) -> Tensor:
    """Return a matrix (in, out) in units of its columns' scales, in 8 bits."""
    most = _LARGEST[kind]
    scaled = matrix / columns
    return (scaled if kind.is_floating_point else scaled.round()).clamp(-most, most).to(kind)
