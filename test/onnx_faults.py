"""Faults for the exported graphs of a bundle: of precision, and of numbers."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from vla_runtime.engines.onnx_files import ONNX_FOLDER, WEIGHTS_DATA

HALF = TensorProto.FLOAT16


def nodes_of(model: onnx.ModelProto, operator: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == operator]


def run_in_half(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Put one node into float16: its float inputs rounded before it, its output widened after."""
    index = list(model.graph.node).index(node)
    before = []
    inferred = onnx.shape_inference.infer_shapes(model).graph
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {item.name: item.data_type for item in inferred.initializer}
    for place, name in enumerate(node.input):
        if types[name] == TensorProto.FLOAT:
            before.append(helper.make_node('Cast', [name], [f'{name}/planted'], to=HALF))
            node.input[place] = f'{name}/planted'
    out = node.output[0]
    node.output[0] = f'{out}/planted'
    after = helper.make_node('Cast', [node.output[0]], [out], to=TensorProto.FLOAT)
    nodes = list(model.graph.node)
    nodes[index : index + 1] = [*before, node, after]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def norm_in_half(model: onnx.ModelProto) -> None:
    run_in_half(model, nodes_of(model, 'ReduceMean')[0])


def softmax_in_half(model: onnx.ModelProto) -> None:
    run_in_half(model, nodes_of(model, 'Softmax')[-1])


def position_in_half(model: onnx.ModelProto) -> None:
    """Count the mask in float16 instead of in integers."""
    (count,) = nodes_of(model, 'ReduceSum')
    (cast,) = (node for node in model.graph.node if node.output[0] == count.input[0])
    for attribute in cast.attribute:
        attribute.i = HALF
    (use,) = (node for node in model.graph.node if count.output[0] in node.input)
    place = list(use.input).index(count.output[0])
    use.input[place] = 'planted'
    nodes = list(model.graph.node)
    back = helper.make_node('Cast', [count.output[0]], ['planted'], to=TensorProto.INT64)
    nodes.insert(nodes.index(use), back)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def token_index_in_float(model: onnx.ModelProto) -> None:
    """Send the token ids through float32."""
    (gather,) = (node for node in nodes_of(model, 'Gather') if 'tokens' in node.input)
    gather.input[1] = 'planted/index'
    casts = [
        helper.make_node('Cast', ['tokens'], ['planted/float'], to=TensorProto.FLOAT),
        helper.make_node('Cast', ['planted/float'], ['planted/index'], to=TensorProto.INT64),
    ]
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def update_in_half(model: onnx.ModelProto) -> None:
    (update,) = (node for node in model.graph.node if node.output[0] == 'x_next')
    run_in_half(model, update)


def change_weight(bundle, part: str, factor: float) -> None:
    """Multiply one stored matrix: numbers that no walk over the graph can find."""
    for path in sorted((bundle / ONNX_FOLDER).glob('*.onnx')):
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            if part in tensor.name and '.weight' in tensor.name and tensor.external_data:
                place = {entry.key: entry.value for entry in tensor.external_data}
                data = np.memmap(
                    bundle / ONNX_FOLDER / WEIGHTS_DATA,
                    np.float32,
                    'r+',
                    int(place['offset']),
                    (int(place['length']) // 4,),
                )
                data *= factor
                data.flush()
                return
    raise AssertionError(part)
