"""Tiny bundles in int8, and faults for their graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_faults import add_constant, nodes_of
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_convert.export.onnx.bundle import export_bundle
from vla_convert.export.onnx.calibration import LEAST_OBSERVATIONS
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import Precision
from vla_runtime.engines import devices

OBSERVATIONS = [observation(seed) for seed in range(LEAST_OBSERVATIONS)]
GUIDED = {'advantage': 'task_newline'}
needs_int8 = pytest.mark.skipif(
    not devices._INT8 & devices.cpu_flags(),
    reason='this CPU has no instructions for 8-bit products',
)


def int8_bundle(
    folder: Path, family: str = 'pi05', beside: Precision = 'float32', **facts: str
) -> Path:
    """Export a tiny policy in int8; return the bundle's folder.

    pi0.5's language has an MLP that is wide enough for its last product to be left out of int8.
    """
    spec = tiny_spec(family, **facts)
    if family == 'pi05':
        language = replace(spec.dims.language, mlp_dim=72)
        spec = replace(spec, dims=replace(spec.dims, language=language))
    source = read_bundle(write_tiny_policy(folder / 'source', spec))
    return export_bundle(
        source, folder / 'int8', 'int8', observations=OBSERVATIONS, beside=beside
    ).folder


def products_of(model: onnx.ModelProto) -> list[tuple[onnx.NodeProto, ...]]:
    """(rounding, widening of the input, widening of the matrix, product) of all in int8."""
    made = {node.output[0]: node for node in model.graph.node}
    found = []
    for product in nodes_of(model, 'MatMul'):
        left, right = (made.get(name) for name in product.input)
        if left is not None and left.op_type == 'DequantizeLinear':
            assert right is not None
            found.append((made[left.input[0]], left, right, product))
    return found


def widened_by_twice_the_scale(model: onnx.ModelProto, folder: Path) -> None:
    """The input's numbers come back twice as large."""
    _, widening, _, _ = products_of(model)[0]
    scale = numbers_of(model, widening.input[1], folder)
    widening.input[1] = add_constant(model, TensorProto.FLOAT, scale * 2)


def zero_point_of_one(model: onnx.ModelProto, folder: Path) -> None:
    rounding, widening, _, _ = products_of(model)[0]
    rounding.input[2] = widening.input[2] = add_constant(model, TensorProto.INT8, np.array(1))


def unsigned_input(model: onnx.ModelProto, folder: Path) -> None:
    """Zero point 0, but unsigned: TensorRT reads such numbers as signed ones, with a warning."""
    rounding, widening, _, _ = products_of(model)[0]
    rounding.input[2] = widening.input[2] = add_constant(model, TensorProto.UINT8, np.array(0))


def scales_along_the_rows(model: onnx.ModelProto, folder: Path) -> None:
    _, _, widening, _ = products_of(model)[0]
    del widening.attribute[:]
    widening.attribute.append(helper.make_attribute('axis', 0))


def input_that_is_not_rounded(model: onnx.ModelProto, folder: Path) -> None:
    """The pair is missing at one operand: such a product runs in float32."""
    rounding, _, _, product = products_of(model)[0]
    product.input[0] = rounding.input[0]


def norm_of_rounded_numbers(model: onnx.ModelProto, folder: Path) -> None:
    nodes = list(model.graph.node)
    rounded = next(node.output[0] for node in nodes if node.op_type == 'DequantizeLinear')
    place = max(i for i, node in enumerate(nodes) if rounded in node.output) + 1
    added = helper.make_node('Add', [rounded, rounded], ['planted'], name='planted')
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:place], added, *nodes[place:]])


def scale_of_zero(model: onnx.ModelProto, folder: Path) -> None:
    rounding, widening, _, _ = products_of(model)[0]
    rounding.input[1] = widening.input[1] = add_constant(model, TensorProto.FLOAT, np.array(0.0))


def one_scale_for_a_matrix(model: onnx.ModelProto, folder: Path) -> None:
    _, _, widening, _ = products_of(model)[0]
    widening.input[1] = add_constant(model, TensorProto.FLOAT, np.array(0.01))
    widening.input[2] = add_constant(model, TensorProto.INT8, np.array(0))


def matrix_of_twice_the_scale(model: onnx.ModelProto, folder: Path) -> None:
    """Well formed, and within the errors that 8 bits may have."""
    _, _, widening, _ = products_of(model)[0]
    scales = numbers_of(model, widening.input[1], folder)
    widening.input[1] = add_constant(model, TensorProto.FLOAT, scales * 2)


def numbers_of(model: onnx.ModelProto, name: str, folder: Path) -> np.ndarray:
    """A constant's numbers, from the graph or from the file beside it."""
    (tensor,) = (item for item in model.graph.initializer if item.name == name)
    return numpy_helper.to_array(tensor, str(folder))
