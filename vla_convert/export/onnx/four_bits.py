"""Matrix products in NVFP4: 4-bit floats (e2m1) in blocks of 16 with a scale of 8 bits each.

An MLP's last product is in 8-bit floats (`eight_bits`): its few large values would take the range.

    x ─ TRT_FP4DynamicQuantize ─ numbers ──────────────────┐
                     └─ scales ─ DequantizeLinear ─ DequantizeLinear ─┐
          8-bit scales ─ DequantizeLinear ─┐                          │
                 4-bit matrix ─ DequantizeLinear ──────────────── MatMul ─ float32

Scales in e4m3 are in units of one float32 scale, of the whole matrix or (from calibration) input.
TensorRT's own operator computes the input's scales at run time; all else is ONNX opset 23.

Invariants:
- blocks lie along the axis that is summed over; where its length is no multiple of 16, a product
  stays as it is beside;
- numbers are in units of their block's scale as it is stored, so 6, the largest, is the block's
  largest number up to the rounding of that scale; a block of zeros has the scale 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from vla_convert.export.onnx.eight_bits import (
    EightBits,
    eight_bit_faults,
    matrix_faults,
    matrix_of_bundle,
    within_half_a_step,
)
from vla_convert.export.onnx.graph import GraphWriter, Value
from vla_convert.export.onnx.quantised_products import (
    Matrix,
    QuantisedProducts,
    Range,
    is_mlp_output,
)
from vla_convert.export.onnx.weights import ONNX_TYPE, BundleWeights
from vla_runtime.bundle.onnx_files import FP4_BLOCK, FP4_DOMAIN, FP4_ROUNDING, FP4_VALUES, Precision

# --- Rules of products in NVFP4. TensorRT multiplies 4-bit numbers only in this form; of similar
# ones it widens a matrix in every run, or reads other numbers.

_WIDEN = 'DequantizeLinear'
_NUMBERS, _SCALES = TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN
_ROUNDING = {'axis': -1, 'block_size': FP4_BLOCK, 'scale_type': _SCALES}


def is_four_bit_rounding(node: onnx.NodeProto) -> bool:
    """Return whether a node is TensorRT's operator that rounds to 4-bit floats."""
    return (node.domain, node.op_type) == (FP4_DOMAIN, FP4_ROUNDING)


def four_bit_faults(path: Path, model: onnx.ModelProto, types: Mapping[str, int]) -> list[str]:
    """List violations of the rules of NVFP4 products; arguments as for `eight_bit_faults`."""
    graph = FourBitGraph(path, model.graph)
    in_eight = onnx.ModelProto()
    in_eight.graph.initializer.extend(model.graph.initializer)
    faults = []
    for node in model.graph.node:
        if graph.is_in_eight_bits(node):
            in_eight.graph.node.append(node)
        else:
            faults += [_sentence(node, fault) for fault in graph.faults(node, types)]
    return faults + eight_bit_faults(path, in_eight, types)


def four_bit_matrix_faults(
    paths: Iterable[Path], weights: BundleWeights, factors: Mapping[str, float]
) -> list[str]:
    """List the NVFP4 and accompanying 8-bit matrices that are not the bundle's to the nearest."""
    paths = list(paths)
    faults, seen = matrix_faults(paths, weights, factors), set()
    for path in paths:
        graph = FourBitGraph(path, onnx.load(path, load_external_data=False).graph)
        for node in graph.widened_matrices():
            matrix, place = node.input[0], graph.place(node)
            if (matrix, place) in seen:
                continue
            seen.add((matrix, place))
            exact = matrix_of_bundle(matrix, weights, factors)
            if exact is not None:
                numbers, scales = graph.matrix(node)
                steps = steps_of_four_bits(exact, scales)
                if within_half_a_step(numbers * scales, exact, steps):
                    continue
            faults.append(f"{path.name}: '{matrix}' is not the bundle's matrix in 4 bits")
    return faults


def _sentence(node: onnx.NodeProto, fault: str) -> str:
    return f"node '{node.name or node.output[0]}' ({node.op_type}) {fault}"


class FourBitGraph:
    """A graph with products in NVFP4, by what its tensors are made of."""

    def __init__(self, path: Path, graph: onnx.GraphProto) -> None:
        self._folder = str(path.parent)
        self._made = {name: node for node in graph.node for name in node.output}
        self._constants = {item.name: item for item in graph.initializer}

    def is_in_eight_bits(self, node: onnx.NodeProto) -> bool:
        """Return whether a node is of the products in 8 bits that stand beside."""
        if node.op_type == 'MatMul':
            makers = [self._made.get(name) for name in node.input]
            return all(maker is not None and _has_zero_point(maker) for maker in makers)
        return node.op_type == 'QuantizeLinear' or _has_zero_point(node)

    def faults(self, node: onnx.NodeProto, types: Mapping[str, int]) -> list[str]:
        """List what is wrong with a node."""
        if is_four_bit_rounding(node):
            return [*self._rounding_faults(node), *self._misread(node, types)]
        if node.op_type == _WIDEN:
            if types.get(node.input[0]) == _SCALES:
                return self._scale_faults(node)
            return self._number_faults(node)
        if node.op_type == 'MatMul':
            return self._product_faults(node, types)
        return self._misread(node, types)

    def widened_matrices(self) -> list[onnx.NodeProto]:
        """List the nodes that widen a matrix."""
        return [
            node
            for node in self._made.values()
            if node.op_type == _WIDEN
            and node.input[0] in self._constants
            and self._constants[node.input[0]].data_type == _NUMBERS
        ]

    def place(self, node: onnx.NodeProto) -> tuple[str, bytes]:
        """Return what tells the scales of a widened matrix from others."""
        scales = self._made[node.input[1]]
        return scales.input[0], self._numbers(scales.input[1]).tobytes()

    def matrix(self, node: onnx.NodeProto) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers (in, out) of a widened matrix, and the scale of each."""
        scales = self._made[node.input[1]]
        wide = self._numbers(scales.input[0]) * self._numbers(scales.input[1])
        return self._numbers(node.input[0]), wide.repeat(FP4_BLOCK, axis=0)

    def _rounding_faults(self, node: onnx.NodeProto) -> list[str]:
        if (stated := _attributes(node)) != _ROUNDING:
            return [f'is to round the last axis in blocks of {FP4_BLOCK}, and states {stated}']
        return self._unit_faults(node.input[1])

    def _unit_faults(self, name: str) -> list[str]:
        """List what is wrong with the scale of the scales."""
        constant = self._constants.get(name)
        if constant is None or constant.data_type != TensorProto.FLOAT or constant.dims:
            return ['needs one float32 scale of the scales that is a constant']
        unit = self._numbers(name)
        return [] if np.isfinite(unit) and unit > 0 else ['has a scale that is not above 0']

    def _scale_faults(self, node: onnx.NodeProto) -> list[str]:
        """List what is wrong with a node that widens the scales of blocks."""
        if len(node.input) != 2 or _attributes(node):
            return ['is to widen the scales of blocks by one scale, along no axis']
        if faults := self._unit_faults(node.input[1]):
            return faults
        maker = self._made.get(node.input[0])
        if maker is None:
            return []
        if not is_four_bit_rounding(maker) or maker.output[1] != node.input[0]:
            return ['widens scales that are neither constants nor those of a rounded input']
        given = self._constants.get(maker.input[1])
        if given is None or self._numbers(given.name) != self._numbers(node.input[1]):
            return ['widens by another scale than the one that its input was rounded by']
        return []

    def _number_faults(self, node: onnx.NodeProto) -> list[str]:
        """List what is wrong with a node that widens numbers in 4 bits."""
        scale = self._made.get(node.input[1])
        if scale is None or scale.op_type != _WIDEN or len(node.input) != 2:
            return ['needs scales of blocks in 8 bits, and no zero points']
        stated = _attributes(node)
        maker, constant = (held.get(node.input[0]) for held in (self._made, self._constants))
        if constant is not None and constant.data_type == _NUMBERS:
            rows, columns = constant.dims
            blocks = self._constants.get(scale.input[0])
            if stated != {'axis': 0, 'block_size': FP4_BLOCK}:
                return [f'needs blocks of {FP4_BLOCK} rows of its matrix, and states {stated}']
            if blocks is None or [*blocks.dims] != [rows // FP4_BLOCK, columns] or rows % FP4_BLOCK:
                return [f'needs a scale for every {FP4_BLOCK} rows of every column of its matrix']
            return []
        if maker is None or not is_four_bit_rounding(maker) or maker.output[0] != node.input[0]:
            return ['widens numbers that are neither a matrix nor a rounded input in 4 bits']
        if stated != {'axis': -1, 'block_size': FP4_BLOCK}:
            return [f'needs blocks of {FP4_BLOCK} along the last axis, and states {stated}']
        if scale.input[0] != maker.output[1]:
            return ['widens by the scales of another input']
        return []

    def _product_faults(self, product: onnx.NodeProto, types: Mapping[str, int]) -> list[str]:
        left, right = (self._source(name) for name in product.input)
        if left is None and right is None:
            return self._misread(product, types)
        if left is None or right is None:
            return ['multiplies a number in 4 bits by one that is not; both operands must be']
        if left in self._constants or right not in self._constants:
            return ['must multiply an input, rounded as it comes, by a matrix in 4 bits']
        return []

    def _source(self, name: str) -> str | None:
        """Return the tensor in 4 bits that a tensor is widened from."""
        node = self._made.get(name)
        if node is None or node.op_type != _WIDEN or self._widens_scales(node):
            return None
        return str(node.input[0])

    def _widens_scales(self, node: onnx.NodeProto) -> bool:
        source, maker = self._constants.get(node.input[0]), self._made.get(node.input[0])
        if source is not None:
            return bool(source.data_type == _SCALES)
        return maker is not None and [*maker.output].index(node.input[0]) == 1

    def _misread(self, node: onnx.NodeProto, types: Mapping[str, int]) -> list[str]:
        """List the rounded numbers that a node computes with, which is no product."""
        return [
            f"computes with '{name}', which was rounded to 4 bits; only matrix products may"
            for name in node.input
            if types.get(name) in (_NUMBERS, _SCALES)
            or (name in self._made and self._made[name].op_type == _WIDEN)
        ]

    def _numbers(self, name: str) -> np.ndarray:
        """Return a constant as float32, from the graph or from the file beside it."""
        array = numpy_helper.to_array(self._constants[name], self._folder)
        return array.astype(np.float32)


def _has_zero_point(node: onnx.NodeProto) -> bool:
    return node.op_type == _WIDEN and len(node.input) > 2


def steps_of_four_bits(exact: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the distance of the 4-bit numbers beside each number of a matrix."""
    sizes = np.abs(exact) / np.where(scales > 0, scales, np.float32(np.inf))
    values = np.array(FP4_VALUES, np.float32)
    places = np.clip(np.searchsorted(values, sizes), 1, len(values) - 1)
    return np.where(scales > 0, np.diff(values)[places - 1] * scales, np.abs(exact) * 2)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {item.name: helper.get_attribute_value(item) for item in node.attribute}


# Two numbers a byte, the first in its lower half, as ONNX stores them.
NUMBERS, SCALES = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
_LARGEST_NUMBER, _LARGEST_SCALE = FP4_VALUES[-1], 448.0


class FourBits(QuantisedProducts):
    """The products of a bundle's graphs that are in NVFP4."""

    def __init__(self, ranges: Mapping[str, Range], beside: Precision) -> None:
        super().__init__(ranges, beside, 'nvfp4')
        self._eight_bits = EightBits(ranges, beside, 'fp8')
        # By matrix, once for all graphs.
        self._units: dict[str, Tensor] = {}

    def takes(self, matrix: Matrix) -> bool:
        rows, columns = matrix.shape
        fits = rows % FP4_BLOCK == 0 and columns % 2 == 0
        return super().takes(matrix) and (fits or is_mlp_output(rows, columns))

    def products(
        self, graph: GraphWriter, x: Value, name: str, matrices: Sequence[Matrix]
    ) -> list[Value]:
        if is_mlp_output(*matrices[0].shape):
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
    # With scale 0 all codes are 0.
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
