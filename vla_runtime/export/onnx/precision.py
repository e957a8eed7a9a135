"""Checks that an ONNX graph computes in half only where rounding does no harm.

Numbers alone cannot tell: an index computed in half is right for a short prompt and wrong for a
long one, and a norm in half is lost among the roundings of half matrix products. So the graph
itself is walked, node by node, on the types that ONNX infers; `origins.py` follows every tensor
from where its numbers come from to where they are used. The rules:
- in float16 or bfloat16 there are three products and nothing else that computes: by one of the
  bundle's matrices (`is_half_matrix`), of queries and keys, and of attention weights and values;
- what is rounded for such a product goes into it, or into the past, and is never widened again; so
  norms, softmax, time, guidance mix, plan term and Euler update are in float32;
- no input, position, rotary angle, count or constant is rounded at all;
- no float becomes an integer and no truth value a float: indices are integers from end to end, and
  rotary angles are made of such integers;
- float32, int64, bool and the half that was asked for are the only types, the operators those that
  the export writes, and none of them has a subgraph;
- a graph asked for in float32 has no half in it at all.
`constants.py` checks the numbers that stand in the graph.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto

from vla_runtime.engines.onnx.files import STEP_INPUTS, STEP_OUTPUTS, Precision
from vla_runtime.export.onnx.origins import HALVES, origin_faults, type_name

_PORTS = {
    **dict.fromkeys((*STEP_INPUTS, *STEP_OUTPUTS), TensorProto.FLOAT),
    **dict.fromkeys(('x', 'state', 'pixels', 'image_tokens'), TensorProto.FLOAT),
    **dict.fromkeys(('image_mask', 'token_mask'), TensorProto.BOOL),
    'tokens': TensorProto.INT64,
}
_TYPES = (TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, *HALVES)


def precision_of(path: Path) -> Precision:
    """Return the precision of a graph's matrix products.

    Raises:
        ValueError: no ONNX file, or one whose types contradict each other.
    """
    types = set(_tensor_types(path, load_graph(path)).values())
    for half, name in HALVES.items():
        if half in types:
            return name
    return 'float32'


def precision_faults(path: Path, precision: Precision) -> list[str]:
    """List everything in a graph file that breaks the rules.

    Args:
        path: of the graph; its weights are not read.
        precision: that it is meant to be in.

    Returns:
        A sentence a fault, naming node and tensor; none if all is well.

    Raises:
        ValueError: no ONNX file, or one whose types contradict each other.
    """
    model = load_graph(path)
    types = _tensor_types(path, model)
    # A function of the file's own stands in for the operator of its name.
    faults = [
        f"'{function.name}' is redefined by the file: an inside of its own, which is not walked"
        for function in model.functions
    ]
    faults += _port_faults(model.graph, types)
    faults += [
        f"'{name}' is in {type_name(kind)}, which no part of a policy is computed in"
        for name, kind in types.items()
        if kind not in _TYPES
    ]
    faults += origin_faults(model.graph, types)
    wrong = [
        f"'{name}' is in {type_name(kind)} in a file that is meant to be {precision}"
        for name, kind in types.items()
        if HALVES.get(kind, precision) != precision
    ]
    return faults + wrong[:1]


def load_graph(path: Path) -> onnx.ModelProto:
    """A graph file without the weights that lie beside it.

    Raises:
        ValueError: no ONNX file.
    """
    try:
        return onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own error, which is not re-exported
        raise ValueError(f'{path}: is not an ONNX file: {error}') from None


def _port_faults(graph: onnx.GraphProto, types: dict[str, int]) -> list[str]:
    faults = []
    for port in (*graph.input, *graph.output):
        kind = types[port.name]
        must_be = _PORTS.get(port.name, kind)
        if kind != must_be:
            faults.append(f"'{port.name}' is in {type_name(kind)} and must be {type_name(must_be)}")
    return faults


def _tensor_types(path: Path, model: onnx.ModelProto) -> dict[str, int]:
    try:
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    except onnx.shape_inference.InferenceError as error:
        raise ValueError(f'{path}: has types or shapes that contradict: {error}') from None
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    return types | {item.name: item.data_type for item in inferred.initializer}
