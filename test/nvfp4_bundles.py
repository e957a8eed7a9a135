"""Tiny bundles in NVFP4, and faults for their graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from int8_bundles import OBSERVATIONS, numbers_of
from onnx import TensorProto, helper
from onnx_faults import add_constant, nodes_of
from tiny_policy import tiny_spec, write_tiny_policy

from vla_convert.export.onnx.bundle import export_bundle
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import (
    FP4_ROUNDING,
    WEIGHTS_DATA,
    Precision,
)


def nvfp4_bundle(folder: Path, beside: Precision = 'float32', mlp_dim: int = 48) -> Path:
    """Export a tiny pi0.5 in NVFP4; return the bundle's folder.

    One layer of its language, 32 wide, has an MLP; the last product of one of more than 64 is in 8
    bits.
    """
    spec = tiny_spec('pi05')
    language = replace(spec.dims.language, mlp_dim=mlp_dim)
    spec = replace(spec, dims=replace(spec.dims, language=language))
    source = read_bundle(write_tiny_policy(folder / 'source', spec))
    return export_bundle(
        source, folder / 'nvfp4', 'nvfp4', observations=OBSERVATIONS, beside=beside
    ).folder


def products_of(model: onnx.ModelProto) -> list[tuple[onnx.NodeProto, ...]]:
    """(rounding, its scales widened, its numbers widened, the matrix's likewise, product)."""
    made = {name: node for node in model.graph.node for name in node.output}
    found = []
    for product in nodes_of(model, 'MatMul'):
        left, right = (made.get(name) for name in product.input)
        if left is not None and left.op_type == 'DequantizeLinear':
            assert right is not None
            rounding = made[left.input[0]]
            if rounding.op_type != FP4_ROUNDING:
                continue
            scales = [made[node.input[1]] for node in (left, right)]
            found.append((rounding, scales[0], left, scales[1], right, product))
    return found


def _set(node: onnx.NodeProto, **attributes: Any) -> None:
    kept = [item for item in node.attribute if item.name not in attributes]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(*item) for item in attributes.items())])


def input_widened_by_twice_the_scale(model: onnx.ModelProto, folder: Path) -> None:
    rounding, scales, *_ = products_of(model)[0]
    twice = numbers_of(model, rounding.input[1], folder) * 2
    scales.input[1] = add_constant(model, TensorProto.FLOAT, twice)


def input_that_is_not_rounded(model: onnx.ModelProto, folder: Path) -> None:
    """The matrix is widened in every run, and multiplied in float32."""
    rounding, *_, product = products_of(model)[0]
    product.input[0] = rounding.input[0]


def blocks_of_32(model: onnx.ModelProto, folder: Path) -> None:
    rounding, _, left, *_ = products_of(model)[0]
    for node in (rounding, left):
        _set(node, block_size=32)


def blocks_along_the_columns(model: onnx.ModelProto, folder: Path) -> None:
    _set(products_of(model)[0][4], axis=1)


def scale_of_zero(model: onnx.ModelProto, folder: Path) -> None:
    rounding, scales, *_ = products_of(model)[0]
    zero = add_constant(model, TensorProto.FLOAT, np.array(0.0))
    rounding.input[1] = scales.input[1] = zero


def scales_of_another_input(model: onnx.ModelProto, folder: Path) -> None:
    products = products_of(model)
    other = next(one for one in products if one[0].name != products[0][0].name)
    products[0][2].input[1] = other[1].output[0]


def norm_of_rounded_numbers(model: onnx.ModelProto, folder: Path) -> None:
    left = products_of(model)[0][2]
    nodes = list(model.graph.node)
    place = nodes.index(left) + 1
    added = helper.make_node('Add', [left.output[0]] * 2, ['planted'], name='planted')
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:place], added, *nodes[place:]])


def eight_bits_of_twice_the_scale(model: onnx.ModelProto, folder: Path) -> None:
    """The last product of an MLP, as in fp8."""
    _, widening, _, _ = _in_eight_bits(model)
    scale = numbers_of(model, widening.input[1], folder)
    widening.input[1] = add_constant(model, TensorProto.FLOAT, scale * 2)


def eight_bit_input_that_is_not_rounded(model: onnx.ModelProto, folder: Path) -> None:
    """A matrix in 8 bits, and its input not rounded."""
    rounding, _, _, product = _in_eight_bits(model)
    product.input[0] = rounding.input[0]


def eight_bit_matrix_of_twice_the_scale(model: onnx.ModelProto, folder: Path) -> None:
    _, _, matrix, _ = _in_eight_bits(model)
    scales = numbers_of(model, matrix.input[1], folder)
    matrix.input[1] = add_constant(model, TensorProto.FLOAT, scales * 2)


def _in_eight_bits(model: onnx.ModelProto) -> tuple[onnx.NodeProto, ...]:
    """(rounding, widening of the input, widening of the matrix, product) of the first in 8 bits."""
    made = {node.output[0]: node for node in model.graph.node}
    for product in nodes_of(model, 'MatMul'):
        left, right = (made.get(name) for name in product.input)
        if left is not None and left.op_type == 'DequantizeLinear' and len(left.input) > 2:
            assert right is not None
            return made[left.input[0]], left, right, product
    raise AssertionError('no product in 8 bits')


def matrix_of_twice_the_scale(model: onnx.ModelProto, folder: Path) -> None:
    """Well formed, and within the errors that 4 bits may have."""
    scales = products_of(model)[0][3]
    twice = numbers_of(model, scales.input[1], folder) * 2
    scales.input[1] = add_constant(model, TensorProto.FLOAT, twice)


def halves_of_bytes_swapped(model: onnx.ModelProto, folder: Path) -> None:
    """Two numbers a byte in the other order."""
    matrix = products_of(model)[0][4].input[0]
    tensor = next(item for item in model.graph.initializer if item.name == matrix)
    place = {entry.key: entry.value for entry in tensor.external_data}
    shape = (int(place['length']),)
    data = np.memmap(folder / WEIGHTS_DATA, np.uint8, 'r+', int(place['offset']), shape)
    data[:] = data << 4 | data >> 4
    data.flush()
