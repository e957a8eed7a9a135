"""Whether an ONNX graph computes what must be exact in the precision that keeps it exact.

Numbers alone cannot tell: an index computed in half is right for a short prompt and wrong for a
long one, and a norm in half is lost among the roundings of half matrix products. So the graph
itself is walked, node by node, on the types that ONNX infers. The rules:
- only matrix products and what merely moves numbers are in float16 or bfloat16; norms, softmax,
  time, guidance mix, plan term and Euler update are in float32;
- nothing but float32 is rounded to half, so no position, count or mask ever is;
- no float becomes an integer and no truth value a float: indices are integers from end to end;
- what is asked for in float32 has no half in it at all.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto

from vla_runtime.engines.onnx_files import EXPERT_INPUTS, EXPERT_OUTPUTS, Precision

_HALVES: dict[int, str] = {TensorProto.FLOAT16: 'float16', TensorProto.BFLOAT16: 'bfloat16'}
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, *_HALVES)
_INTEGERS = (
    TensorProto.INT8,
    TensorProto.INT16,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.UINT8,
    TensorProto.UINT16,
    TensorProto.UINT32,
    TensorProto.UINT64,
)
_MAY_BE_HALF = (
    'MatMul',
    'Cast',
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
_SINGLE_PORTS = (*EXPERT_INPUTS[4:], *EXPERT_OUTPUTS, 'x', 'pixels', 'image_tokens')


def precision_of(path: Path) -> Precision:
    """What a graph's matrix products are in.

    Raises:
        ValueError: no ONNX file.
    """
    types = set(_tensor_types(_load(path)).values())
    for half, name in ((TensorProto.FLOAT16, 'float16'), (TensorProto.BFLOAT16, 'bfloat16')):
        if half in types:
            return name  # type: ignore[return-value]
    return 'float32'


def precision_faults(path: Path, precision: Precision) -> list[str]:
    """Everything in a graph file that breaks the rules.

    Args:
        path: of the graph; its weights are not read.
        precision: that it is meant to be in.

    Returns:
        A sentence a fault, naming node and tensor; none if all is well.

    Raises:
        ValueError: no ONNX file.
    """
    model = _load(path)
    types = _tensor_types(model)
    faults = [
        f"'{port.name}' is in {_name(types[port.name])} and must be float32"
        for port in (*model.graph.input, *model.graph.output)
        if port.name in _SINGLE_PORTS and types[port.name] != TensorProto.FLOAT
    ]
    for node in model.graph.node:
        faults += _faults_of(node, types)
    wrong = {
        name: kind for name, kind in types.items() if kind in _HALVES and _HALVES[kind] != precision
    }
    if wrong:
        name, kind = next(iter(wrong.items()))
        faults.append(f"'{name}' is in {_name(kind)} in a file that is meant to be {precision}")
    return faults


def _faults_of(node: onnx.NodeProto, types: dict[str, int]) -> list[str]:
    def kind(name: str) -> int:
        return types.get(name, TensorProto.UNDEFINED)

    where = f"node '{node.name or node.output[0]}' ({node.op_type})"
    if node.domain not in ('', 'ai.onnx') or any(a.HasField('g') for a in node.attribute):
        return [f'{where} has an inside of its own, which is not walked']
    if node.op_type == 'Cast':
        return _cast_faults(where, kind(node.input[0]), kind(node.output[0]), node)
    faults = []
    unknown = [name for name in (*node.input, *node.output) if name and not kind(name)]
    if unknown:
        faults.append(f"{where}: the type of '{unknown[0]}' is unknown")
    if node.op_type not in _MAY_BE_HALF:
        for name in (*node.input, *node.output):
            if kind(name) in _HALVES:
                faults.append(
                    f"{where} computes '{node.output[0]}' in {_name(kind(name))}; everything but "
                    'matrix products must be float32, and indices integers'
                )
                break
    if node.op_type == 'Gather' and kind(node.input[1]) not in _INTEGERS:
        faults.append(f"{where}: the index '{node.input[1]}' is {_name(kind(node.input[1]))}")
    return faults


def _cast_faults(where: str, source: int, target: int, node: onnx.NodeProto) -> list[str]:
    change = f"'{node.input[0]}' ({_name(source)}) to '{node.output[0]}' ({_name(target)})"
    if target in _HALVES and source != TensorProto.FLOAT:
        return [f'{where} rounds {change}: an index, mask or count must not be in half']
    if target in _INTEGERS and source in _FLOATS:
        return [f'{where} turns {change}: an index must be computed in integers throughout']
    if source == TensorProto.BOOL and target in _FLOATS:
        return [f'{where} turns {change}: what is counted must be counted in integers']
    if source == TensorProto.UNDEFINED:
        return [f"{where}: the type of '{node.input[0]}' is unknown"]
    return []


def _tensor_types(model: onnx.ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    return types | {item.name: item.data_type for item in inferred.initializer}


def _load(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own error, which is not re-exported
        raise ValueError(f'{path}: is not an ONNX file: {error}') from None


def _name(kind: int) -> str:
    return TensorProto.DataType.Name(kind).lower()
