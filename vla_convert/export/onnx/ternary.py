"""Products of ternary weights and tokens in 8 bits (`blocks.ternary`), as explicit quantisation.

    x ─ times the token's scale ─ QuantizeLinear ─ DequantizeLinear ─┐
                               int8 matrix of -1, 0, 1 ─ DequantizeLinear ─ MatMul ─ by the scale

Invariants:
- the token's scale makes whole numbers, so QuantizeLinear with scale 1 rounds (halves to even) and
  clamps;
- the matrix's scale is in its DequantizeLinear, once a column; query projections include
  attention's;
- layers over one input are one product. Runtimes give the same whole numbers in 8 bits and in
  float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

from vla_convert.export.onnx.graph import GraphWriter, Value
from vla_convert.export.onnx.weights import BundleWeights
from vla_runtime.bundle.schema import PACKED
from vla_runtime.engines.recorded_cases import BOUNDS
from vla_runtime.models.blocks.ternary import LARGEST_CODE, SMALLEST, unpack
from vla_runtime.models.shapes.meta_shapes import DispatchMode

# End of the name of a ternary matrix in a graph.
ENDING = '/ternary'
# Distance from the edge between two codes within which a number may go either way in float32.
_EDGE = 0.02


class TernaryMatrix(NamedTuple):
    """Packed weights' name and scale () float32, which includes attention's in queries."""

    name: str
    outputs: int
    scale: Tensor


def write_rounded(graph: GraphWriter, x: Value) -> tuple[Value, Value]:
    """Round tokens (…, K) to 8 bits; return them in whole numbers, float32, and (…, 1) scales."""
    row = (*x.shape[:-1], 1)
    largest = graph.largest(graph.node('Abs', [x], x.shape), row)
    floor = graph.constant(torch.tensor(SMALLEST))
    reciprocal = graph.node('Reciprocal', [graph.node('Max', [largest, floor], row)], row)
    most = graph.constant(torch.tensor(float(LARGEST_CODE)))
    scale = graph.node('Mul', [reciprocal, most], row)
    one = graph.constant(torch.ones(()))
    zero = graph.constant(torch.zeros((), dtype=torch.int8))
    scaled = graph.node('Mul', [x, scale], x.shape)
    rounded = graph.node('QuantizeLinear', [scaled, one, zero], x.shape, torch.int8)
    whole = graph.node('DequantizeLinear', [rounded, one, zero], x.shape, torch.float32)
    return whole, scale


def write_products(
    graph: GraphWriter,
    weights: BundleWeights,
    whole: Value,
    token_scale: Value,
    layers: Sequence[TernaryMatrix],
) -> Value:
    """Write the product of rounded tokens and matrices side by side, (…, outputs of all)."""
    inputs, outputs = whole.shape[-1], sum(layer.outputs for layer in layers)
    name = '+'.join(layer.name.removesuffix(PACKED) for layer in layers)
    stored = graph.weights.named(
        name + ENDING,
        torch.int8,
        (inputs, outputs),
        lambda: _matrix([weights.read(layer.name) for layer in layers], inputs),
    )
    scales = torch.cat([layer.scale.expand(layer.outputs) for layer in layers])
    widened = graph.node(
        'DequantizeLinear',
        [
            graph.initializer(stored, torch.int8),
            graph.constant(scales, f'{name}/scales'),
            graph.constant(torch.zeros(outputs, dtype=torch.int8)),
        ],
        (inputs, outputs),
        torch.float32,
        axis=1,
    )
    shape = (*whole.shape[:-1], outputs)
    return graph.node('Div', [graph.node('MatMul', [whole, widened], shape), token_scale], shape)


def has_ternary(graph: onnx.GraphProto) -> bool:
    """Return whether a graph multiplies by ternary matrices."""
    return any(item.name.endswith(ENDING) for item in graph.initializer)


def code_tensors(graph: onnx.GraphProto) -> list[str]:
    """Name the codes of the rounded tokens that ternary matrices multiply, in order."""
    readers = {
        node.input[0]: node.output[0] for node in graph.node if node.op_type == 'DequantizeLinear'
    }
    widened = {matrix: found for matrix, found in readers.items() if matrix.endswith(ENDING)}
    read = {node.input[0] for node in graph.node if {*node.input} & {*widened.values()}}
    return [
        node.output[0]
        for node in graph.node
        if node.op_type == 'QuantizeLinear' and readers.get(node.output[0]) in read
    ]


class GivenCodes(DispatchMode):
    """Context in which PyTorch's networks continue from a graph's codes, in the layers' order.

    A number between two codes follows the last bit of a sum and changes a whole token. With the
    graph's codes all else compares to the last bits. `faults` counts codes that do not match
    PyTorch's.
    """

    def __init__(self, codes: Sequence[np.ndarray], precision: str) -> None:
        super().__init__()
        self._codes = iter([torch.from_numpy(one) for one in codes])
        # A quarter of what a number may be off by.
        self._farthest = 0.5 + max(_EDGE, LARGEST_CODE * BOUNDS[precision].tensor / 4.0)
        self.faults = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.vla_runtime.quantise_tokens.default:
            return result
        (own, scale), given = result, next(self._codes, None)
        if given is None or given.shape != own.shape:
            # Another network than the graph's.
            self.faults += own.numel()
            return result
        distance = (args[0].float() * scale - given).abs()
        self.faults += int((distance > self._farthest).sum())
        return given, scale


def ternary_faults(
    paths: Iterable[Path], weights: BundleWeights, factors: Mapping[str, float]
) -> list[str]:
    """List the ternary matrices that are not the bundle's; arguments as for `matrix_faults`."""
    faults, seen = [], set()
    for path in paths:
        graph = onnx.load(path, load_external_data=False).graph
        constants = {item.name: item for item in graph.initializer}
        for node in graph.node:
            matrix = constants.get(node.input[0]) if node.op_type == 'DequantizeLinear' else None
            if matrix is None or not matrix.name.endswith(ENDING):
                continue
            scales = numpy_helper.to_array(constants[node.input[1]], str(path.parent))
            key = (matrix.name, scales.tobytes())
            if key not in seen and not _is_of_bundle(path, matrix, scales, weights, factors):
                faults.append(f"{path.name}: '{matrix.name}' is not the bundle's ternary matrix")
            seen.add(key)
    return faults


def _is_of_bundle(
    path: Path,
    matrix: onnx.TensorProto,
    scales: np.ndarray,
    weights: BundleWeights,
    factors: Mapping[str, float],
) -> bool:
    names = matrix.name.removesuffix(ENDING).split('+')
    if not {f'{name}{PACKED}' for name in names} <= {*weights.names}:
        return False
    packed = [weights.read(f'{name}{PACKED}') for name in names]
    columns = []
    for name, one in zip(names, packed, strict=True):
        scale = f'{name}.weight_scale'
        columns.append((weights.read(scale) * factors.get(scale, 1.0)).expand(len(one)))
    exact = _matrix(packed, matrix.dims[0]).numpy()
    found = numpy_helper.to_array(matrix, str(path.parent))
    return np.array_equal(found, exact) and np.allclose(scales, torch.cat(columns), 1e-6, 0.0)


def _matrix(packed: Sequence[Tensor], inputs: int) -> Tensor:
    """Matrices side by side as ONNX multiplies them, (in, out) int8."""
    return torch.cat([unpack(one, inputs) for one in packed]).T.contiguous()
