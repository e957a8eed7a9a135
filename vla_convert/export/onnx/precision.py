"""Types in an exported ONNX graph: half precision where it was asked for, and nowhere else.

Types are those that ONNX infers for every tensor. The rules:
- float32, int64, bool and the half type that was asked for are the only types;
- inputs and outputs other than the past are never in half;
- 8- and 4-bit numbers are in matrix products alone, by the rules in `eight_bits` and
  `four_bits`; ternary matrices (`ternary`) are in 8 bits in files of any precision;
- in half there are matrix products and moves of numbers, and nothing else that computes: norms,
  softmax, time, masks and the update are in float32;
- no float becomes an integer, no truth value a float, and no integer half: indices, counts and
  masks are exact;
- no operator is redefined or has a subgraph, whose types would not be inferred.

Numbers are compared elsewhere (`verification.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import TensorProto

from vla_convert.export.onnx.eight_bits import eight_bit_faults
from vla_convert.export.onnx.four_bits import four_bit_faults, is_four_bit_rounding
from vla_convert.export.onnx.ternary import has_ternary
from vla_runtime.bundle.onnx_files import (
    PRECISION_KEY,
    QUANTISED,
    SCHEDULER_INPUTS,
    STEP_INPUTS,
    STEP_OUTPUTS,
    Precision,
)

HALVES: Mapping[int, Precision] = {
    TensorProto.FLOAT16: 'float16',
    TensorProto.BFLOAT16: 'bfloat16',
}
# Types of what is rounded, that of the factors first.
_ROUNDED: Mapping[Precision, tuple[int, ...]] = {
    'nvfp4': (TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN),
    'fp8': (TensorProto.FLOAT8E4M3FN,),
    'int8': (TensorProto.INT8,),
}
_PORTS = {
    **dict.fromkeys((*STEP_INPUTS, *SCHEDULER_INPUTS, *STEP_OUTPUTS), TensorProto.FLOAT),
    **dict.fromkeys(('x', 'state', 'pixels', 'image_tokens'), TensorProto.FLOAT),
    **dict.fromkeys(('image_mask', 'token_mask'), TensorProto.BOOL),
    'tokens': TensorProto.INT64,
}
# Operators that may compute in half.
_PRODUCTS = ('MatMul', 'Attention')
# Operators that only move numbers.
MOVES = (
    'Concat',
    'Expand',
    'Gather',
    'Identity',
    'Reshape',
    'Slice',
    'Split',
    'Squeeze',
    'Transpose',
    'Unsqueeze',
)
_TYPES = (TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, *HALVES)


def precision_of(path: Path) -> Precision:
    """Return the precision of a graph's matrix products, from its matrices and ports.

    Half inside a graph of float32 matrices is a fault. Raises ValueError: no ONNX file, or
    contradictory types.
    """
    model = load_graph(path)
    types = {one.data_type for one in model.graph.initializer}
    stated = {one.value for one in model.metadata_props if one.key == PRECISION_KEY}
    # A file with ternary matrices has numbers in int8 whatever its precision.
    own = {'int8'} - stated if has_ternary(model.graph) else set()
    rounded = (name for name, kinds in _ROUNDED.items() if kinds[0] in types and name not in own)
    return next(rounded, None) or beside_int8(path)


def beside_int8(path: Path) -> Precision:
    """Return the precision of a graph's matrix products that are not in int8; errors as above."""
    graph = load_graph(path).graph
    types = {tensor.data_type for tensor in graph.initializer}
    types |= {port.type.tensor_type.elem_type for port in (*graph.input, *graph.output)}
    return next((name for half, name in HALVES.items() if half in types), 'float32')


def type_faults(path: Path, precision: Precision, beside: Precision = 'float32') -> list[str]:
    """List violations of the type rules, one sentence each that names node or tensor.

    `beside`: precision of the products that int8 leaves out. Of the weights only 8-bit scales are
    read. Raises ValueError: no ONNX file, or contradictory types.
    """
    model = load_graph(path)
    types = tensor_types(path, model)
    # A function of the file's own stands in for the operator of its name.
    faults = [f"'{function.name}' is redefined by the file" for function in model.functions]
    for node in model.graph.node:
        if fault := node_fault(node, types):
            faults.append(f"node '{node.name or node.output[0]}' ({node.op_type}) {fault}")
    faults += _port_faults(model.graph, types)
    ternary = (TensorProto.INT8,) if has_ternary(model.graph) else ()
    faults += [
        f"'{name}' is in {type_name(kind)}, which no part of a policy is computed in"
        for name, kind in types.items()
        if kind not in (*_TYPES, *_ROUNDED.get(precision, ()), *ternary)
    ]
    rules = four_bit_faults if precision == 'nvfp4' else eight_bit_faults
    faults += rules(path, model, types)
    half = beside if precision in QUANTISED else precision
    wrong = [
        f"'{name}' is in {type_name(kind)} in a file that is meant to be {half}"
        for name, kind in types.items()
        if HALVES.get(kind, half) != half
    ]
    return faults + wrong[:1]


def node_fault(node: onnx.NodeProto, types: Mapping[str, int]) -> str:
    """The rule that a node breaks, as the end of a sentence; empty if none."""
    own = node.domain in ('', 'ai.onnx') or is_four_bit_rounding(node)
    if not own or any(part.HasField('g') or part.graphs for part in node.attribute):
        return "is no operator of ONNX's own, or has a subgraph"
    if node.op_type == 'Cast':
        return _cast_fault(node.input[0], node.output[0], types)
    if node.op_type == 'Gather' and types.get(node.input[1]) != TensorProto.INT64:
        return f'has the index {in_words(node.input[1], types)}, which must be int64'
    if node.op_type in _PRODUCTS or node.op_type in MOVES:
        return ''
    half = next((name for name in (*node.input, *node.output) if types.get(name) in HALVES), None)
    if half is None:
        return ''
    return (
        f"computes '{node.output[0]}' in {type_name(types[half])}; everything but matrix products "
        'must be float32, and indices integers'
    )


def in_words(name: str, types: Mapping[str, int]) -> str:
    """A tensor's name and type, for a message."""
    return f"'{name}' ({type_name(types.get(name, TensorProto.UNDEFINED))})"


def type_name(kind: int) -> str:
    """ONNX's name for a type, such as `float16`."""
    return TensorProto.DataType.Name(kind).lower()


def load_graph(path: Path) -> onnx.ModelProto:
    """A graph file without the weights that lie beside it; ValueError: no ONNX file."""
    try:
        return onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own error, which is not re-exported
        raise ValueError(f'{path}: is not an ONNX file: {error}') from None


def tensor_types(path: Path, model: onnx.ModelProto) -> dict[str, int]:
    """Return the ONNX number of each tensor's inferred type; ValueError: contradictions."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    except onnx.shape_inference.InferenceError as error:
        raise ValueError(f'{path}: has types or shapes that contradict: {error}') from None
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    return types | {item.name: item.data_type for item in inferred.initializer}


def _cast_fault(source: str, target: str, types: Mapping[str, int]) -> str:
    floats = (TensorProto.FLOAT, TensorProto.DOUBLE, *HALVES)
    kind, made = types.get(source), types.get(target)
    change = f'{in_words(source, types)} to {in_words(target, types)}'
    if made in HALVES and kind not in floats:
        return f'rounds {change}: an index, mask or count must not be in half'
    if made not in floats and kind in floats:
        return f'turns {change}: an index must be computed in integers throughout'
    if made in floats and kind == TensorProto.BOOL:
        return f'turns {change}: what is counted must be counted in integers'
    return ''


def _port_faults(graph: onnx.GraphProto, types: dict[str, int]) -> list[str]:
    faults = []
    for port in (*graph.input, *graph.output):
        kind = types[port.name]
        must_be = _PORTS.get(port.name, kind)
        if kind != must_be:
            faults.append(f"'{port.name}' is in {type_name(kind)} and must be {type_name(must_be)}")
    return faults
