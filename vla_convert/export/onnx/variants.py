"""Variants of an exported graph for verification, in memory, with float32 inputs and outputs.

The weights stay in their file, and every rounding to half is kept.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from vla_convert.export.onnx.ternary import code_tensors
from vla_runtime.engines.onnx.four_bit_emulation import emulate

_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def comparable(path: Path, *, widen_bfloat16: bool, show_codes: bool = False) -> bytes:
    """Return a graph with float32 inputs and outputs in place of half ones.

    `widen_bfloat16`: compute bfloat16 products in float32 and round their results, for runtimes
    without them; `show_codes`: also output the codes of tokens that ternary matrices multiply.
    """
    model = onnx.load(path, load_external_data=False)
    emulate(model)
    _widen_ports(model.graph)
    if widen_bfloat16:
        _widen_products(model)
    if show_codes:
        for name in code_tensors(model.graph):
            model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT8, None))
    return model.SerializeToString()


def _widen_ports(graph: onnx.GraphProto) -> None:
    before, after = [], []
    for port in graph.input:
        kind = port.type.tensor_type.elem_type
        if kind in _HALVES:
            inner = _rename(graph, port.name)
            before.append(helper.make_node('Cast', [port.name], [inner], to=kind))
            port.type.tensor_type.elem_type = TensorProto.FLOAT
    for port in graph.output:
        kind = port.type.tensor_type.elem_type
        if kind in _HALVES:
            inner = _rename(graph, port.name)
            after.append(helper.make_node('Cast', [inner], [port.name], to=TensorProto.FLOAT))
            port.type.tensor_type.elem_type = TensorProto.FLOAT
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)


def _rename(graph: onnx.GraphProto, name: str) -> str:
    inner = f'{name}/half'
    for node in graph.node:
        for names in (node.input, node.output):
            for index, other in enumerate(names):
                if other == name:
                    names[index] = inner
    return inner


def _widen_products(model: onnx.ModelProto) -> None:
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    nodes = []
    for node in model.graph.node:
        out = node.output[0]
        if node.op_type not in ('MatMul', 'Attention') or types[out] != TensorProto.BFLOAT16:
            nodes.append(node)
            continue
        wide = [f'{out}/{number}' for number, _ in enumerate(node.input)]
        for source, target in zip(node.input, wide, strict=True):
            nodes.append(helper.make_node('Cast', [source], [target], to=TensorProto.FLOAT))
        single = onnx.NodeProto()
        single.CopyFrom(node)
        del single.input[:], single.output[:]
        single.input.extend(wide)
        single.output.append(f'{out}/product')
        nodes.append(single)
        nodes.append(helper.make_node('Cast', single.output, [out], to=TensorProto.BFLOAT16))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
