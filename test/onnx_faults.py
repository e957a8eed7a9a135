"""Faults for the exported graphs of a bundle: of precision, and of numbers.

Faults of precision use the half that the graph is in, float16 in a graph that has none.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from vla_runtime.bundle.onnx_files import ONNX_FOLDER, WEIGHTS_DATA

FLOAT, INTEGER = TensorProto.FLOAT, TensorProto.INT64
Fault = Callable[[onnx.ModelProto], None]


def nodes_of(model: onnx.ModelProto, operator: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == operator]


def half_of(model: onnx.ModelProto) -> int:
    kinds = {tensor.data_type for tensor in model.graph.initializer}
    return TensorProto.BFLOAT16 if TensorProto.BFLOAT16 in kinds else TensorProto.FLOAT16


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(model).graph
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    return types | {item.name: item.data_type for item in inferred.initializer}


def _value_of(model: onnx.ModelProto, name: str) -> onnx.ValueInfoProto:
    inferred = onnx.shape_inference.infer_shapes(model).graph
    (value,) = (value for value in inferred.value_info if value.name == name)
    return value


def cast(source: str, target: str, kind: int) -> onnx.NodeProto:
    return helper.make_node('Cast', [source], [target], to=kind)


def put_in_place_of(
    model: onnx.ModelProto, old: Sequence[onnx.NodeProto], new: Sequence[onnx.NodeProto]
) -> None:
    """Replace some nodes by others, where the first of them stood."""
    nodes = list(model.graph.node)
    at = nodes.index(old[0])
    nodes = [*nodes[:at], *new, *(node for node in nodes[at:] if node not in old)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def run_in_half(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Put one node into half: its float inputs rounded before it, its output widened after."""
    types, half, before = types_of(model), half_of(model), []
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    for place, name in enumerate(node.input):
        if types[name] == FLOAT:
            before.append(cast(name, f'{name}/planted', half))
            inner.input[place] = f'{name}/planted'
    out = node.output[0]
    inner.output[0] = f'{out}/planted'
    put_in_place_of(model, [node], [*before, inner, cast(inner.output[0], out, FLOAT)])


def round_tensor(model: onnx.ModelProto, name: str, kind: int | None = None) -> None:
    """Send one tensor through half (or another type) and back on its way to all its readers."""
    source, target = name, f'{name}/planted'
    makers = [node for node in model.graph.node if name in node.output]
    if any(port.name == name for port in model.graph.output):
        source, target = f'{name}/exact', name
        for node in makers:
            node.output[list(node.output).index(name)] = source
    else:
        for node in model.graph.node:
            for place, other in enumerate(node.input):
                if other == name:
                    node.input[place] = target
    half = kind or half_of(model)
    casts = [cast(source, f'{name}/half', half), cast(f'{name}/half', target, FLOAT)]
    if makers:
        put_in_place_of(model, makers, [*makers, *casts])
    else:
        first = model.graph.node[0]
        put_in_place_of(model, [first], [*casts, first])


def rounded(name: str) -> Fault:
    """The fault of a graph's input or output that is rounded inside."""

    def fault(model: onnx.ModelProto) -> None:
        round_tensor(model, name)

    fault.__name__ = f'{name}_rounded'
    return fault


def add_constant(model: onnx.ModelProto, kind: int, values: np.ndarray) -> str:
    name = f'planted_{len(model.graph.initializer)}'
    model.graph.initializer.append(
        helper.make_tensor(name, kind, values.shape, values.reshape(-1).tolist())
    )
    return name


# --- norms ------------------------------------------------------------------------------------


def norm_in_half(model: onnx.ModelProto) -> None:
    run_in_half(model, nodes_of(model, 'ReduceMean')[0])


def query_norm_in_half(model: onnx.ModelProto) -> None:
    """The norm of query heads, behind that of the block's input."""
    run_in_half(model, nodes_of(model, 'ReduceMean')[1])


def layer_norm_in_half(model: onnx.ModelProto) -> None:
    run_in_half(model, nodes_of(model, 'LayerNormalization')[0])


def layer_norm_in_half_inside(model: onnx.ModelProto) -> None:
    """All tensors in float32, but mean and variance are computed in half."""
    nodes_of(model, 'LayerNormalization')[0].attribute.append(
        helper.make_attribute('stash_type', half_of(model))
    )


def layer_norm_redefined(model: onnx.ModelProto) -> None:
    """A function of the file stands in for the operator: no node looks different."""
    half, names = half_of(model), ('x', 'scale', 'bias')
    nodes = [cast(name, f'{name}_half', half) for name in names]
    nodes += [
        helper.make_node('Mul', ['x_half', 'scale_half'], ['scaled']),
        helper.make_node('Add', ['scaled', 'bias_half'], ['sum']),
        cast('sum', 'y', FLOAT),
    ]
    opset = helper.make_opsetid('', 17)
    model.functions.append(
        helper.make_function(
            '', 'LayerNormalization', names, ['y'], nodes, [opset], ['axis', 'epsilon']
        )
    )


def norm_mean_as_product(model: onnx.ModelProto, columns: int = 1) -> None:
    """The mean of a norm's squares as a matrix product in half, in each of so many columns."""
    node, half = nodes_of(model, 'ReduceMean')[0], half_of(model)
    width = _value_of(model, node.input[0]).type.tensor_type.shape.dim[-1].dim_value
    mean = add_constant(model, half, np.full((width, columns), 1 / width, np.float32))
    source, out = node.input[0], node.output[0]
    planted = [
        cast(source, f'{out}/half', half),
        helper.make_node('MatMul', [f'{out}/half', mean], [f'{out}/planted']),
        cast(f'{out}/planted', out, FLOAT),
    ]
    put_in_place_of(model, [node], planted)


def norm_squares_as_product(model: onnx.ModelProto) -> None:
    """The squares of a norm summed as a product of the tensor with itself, as scores are."""
    node, half = nodes_of(model, 'ReduceMean')[0], half_of(model)
    (square,) = (other for other in model.graph.node if node.input[0] in other.output)
    x, out = square.input[0], node.output[0]
    width = _value_of(model, x).type.tensor_type.shape.dim[-1].dim_value
    row, column, last = (add_constant(model, INTEGER, np.array([axis])) for axis in (-2, -1, -1))
    scale = add_constant(model, FLOAT, np.array(1 / width))
    planted = [
        cast(x, f'{out}/half', half),
        helper.make_node('Unsqueeze', [f'{out}/half', row], [f'{out}/row']),
        helper.make_node('Unsqueeze', [f'{out}/half', column], [f'{out}/column']),
        helper.make_node('MatMul', [f'{out}/row', f'{out}/column'], [f'{out}/squares']),
        helper.make_node('Squeeze', [f'{out}/squares', last], [f'{out}/planted']),
        cast(f'{out}/planted', f'{out}/sum', FLOAT),
        helper.make_node('Mul', [f'{out}/sum', scale], [out]),
    ]
    put_in_place_of(model, [node], planted)


# --- attention --------------------------------------------------------------------------------


def query_bias_in_half(model: onnx.ModelProto) -> None:
    run_in_half(
        model,
        next(
            node
            for node in nodes_of(model, 'Add')
            if any(name.endswith('language.blocks.0.attention.q.bias') for name in node.input)
        ),
    )


def softmax_in_half(model: onnx.ModelProto) -> None:
    run_in_half(model, nodes_of(model, 'Softmax')[-1])


def mask_in_half(model: onnx.ModelProto) -> None:
    """The terms that hide keys are made in half."""
    run_in_half(model, nodes_of(model, 'Where')[-1])


# --- indices, positions and angles ------------------------------------------------------------


def position_in_half(model: onnx.ModelProto) -> None:
    """Count the mask in half instead of in integers."""
    (count,) = nodes_of(model, 'ReduceSum')
    (made,) = (node for node in model.graph.node if node.output[0] == count.input[0])
    for attribute in made.attribute:
        attribute.i = half_of(model)
    (use,) = (node for node in model.graph.node if count.output[0] in node.input)
    use.input[list(use.input).index(count.output[0])] = 'planted'
    put_in_place_of(model, [count], [count, cast(count.output[0], 'planted', INTEGER)])


def position_counted_in_float(model: onnx.ModelProto) -> None:
    """Count the mask in float32, without a cast of it."""
    (count,) = nodes_of(model, 'ReduceSum')
    (made,) = (node for node in model.graph.node if node.output[0] == count.input[0])
    one, zero = (add_constant(model, FLOAT, np.array(value)) for value in (1.0, 0.0))
    mask = helper.make_node('Where', [made.input[0], one, zero], made.output)
    put_in_place_of(model, [made], [mask])
    (use,) = (node for node in model.graph.node if count.output[0] in node.input)
    assert use.op_type == 'Sub'
    use.input[1] = one


def _position_cast(model: onnx.ModelProto) -> onnx.NodeProto:
    types = types_of(model)
    return next(
        node
        for node in nodes_of(model, 'Cast')
        if (types[node.input[0]], types[node.output[0]]) == (INTEGER, FLOAT)
    )


def positions_rounded(model: onnx.ModelProto) -> None:
    round_tensor(model, _position_cast(model).output[0])


def positions_to_half(model: onnx.ModelProto) -> None:
    """Positions become half on their way from integers to float32."""
    node = _position_cast(model)
    source, out = node.input[0], node.output[0]
    planted = [cast(source, f'{out}/planted', half_of(model)), cast(f'{out}/planted', out, FLOAT)]
    put_in_place_of(model, [node], planted)


def rotary_angles_rounded(model: onnx.ModelProto) -> None:
    round_tensor(model, nodes_of(model, 'Cos')[0].input[0])


def rotary_cosines_rounded(model: onnx.ModelProto) -> None:
    round_tensor(model, nodes_of(model, 'Cos')[0].output[0])


def rotary_frequencies_rounded(model: onnx.ModelProto) -> None:
    """The constant that positions are multiplied by, rounded before it was written."""
    position = _position_cast(model).output[0]
    (angle,) = (node for node in nodes_of(model, 'Mul') if position in node.input)
    (name,) = set(angle.input) - {position}
    round_constant(model, name)


def _token_index_through(kind: int, model: onnx.ModelProto) -> None:
    (gather,) = (node for node in nodes_of(model, 'Gather') if 'tokens' in node.input)
    gather.input[1] = 'planted/index'
    casts = [cast('tokens', 'planted/float', kind), cast('planted/float', 'planted/index', INTEGER)]
    put_in_place_of(model, [gather], [*casts, gather])


def token_index_in_float(model: onnx.ModelProto) -> None:
    _token_index_through(FLOAT, model)


def token_index_in_half(model: onnx.ModelProto) -> None:
    _token_index_through(half_of(model), model)


# --- velocity and update ----------------------------------------------------------------------


def update_in_half(model: onnx.ModelProto) -> None:
    (update,) = (node for node in model.graph.node if node.output[0] == 'x_next')
    run_in_half(model, update)


def a_step_rounded(model: onnx.ModelProto) -> None:
    """Tensor that goes from the first of the unrolled steps to the second."""
    update = [node for node in nodes_of(model, 'Add') if node.name.startswith('step_0/')][-1]
    round_tensor(model, update.output[0])


def update_quantised(model: onnx.ModelProto) -> None:
    """Eight bits where nothing is in half."""
    (update,) = (node for node in model.graph.node if node.output[0] == 'x_next')
    update.output[0] = 'exact'
    scale = add_constant(model, FLOAT, np.array(0.01))
    zero = add_constant(model, TensorProto.UINT8, np.array(128))
    planted = [
        helper.make_node('QuantizeLinear', ['exact', scale, zero], ['eight_bits']),
        helper.make_node('DequantizeLinear', ['eight_bits', scale, zero], ['x_next']),
    ]
    put_in_place_of(model, [update], [update, *planted])


def pixels_in_eight_bits(model: onnx.ModelProto) -> None:
    """A float type that is neither half; it takes a newer set of operators."""
    model.opset_import[0].version, model.ir_version = 19, 9
    round_tensor(model, 'pixels', TensorProto.FLOAT8E4M3FN)


# --- what goes in and out in half -------------------------------------------------------------


def _rename(names: MutableSequence[str], changes: dict[str, str]) -> None:
    for place, name in enumerate(names):
        names[place] = changes.get(name, name)


def past_made_the_wrong_way_round(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        _rename(node.output, {'past_key': 'past_value', 'past_value': 'past_key'})


def past_read_the_wrong_way_round(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        _rename(node.input, {'past_key': 'past_value', 'past_value': 'past_key'})


def time_comes_in_half(model: onnx.ModelProto) -> None:
    (port,) = (port for port in model.graph.input if port.name == 't')
    port.type.tensor_type.elem_type = half_of(model)
    for node in model.graph.node:
        _rename(node.input, {'t': 't/planted'})
    first = model.graph.node[0]
    put_in_place_of(model, [first], [cast('t', 't/planted', FLOAT), first])


# --- numbers ----------------------------------------------------------------------------------


def round_constant(model: onnx.ModelProto, name: str) -> None:
    """Round the numbers of a float32 constant that stands in the graph, to the graph's half."""
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
    numbers = numpy_helper.to_array(tensor)
    if half_of(model) == TensorProto.FLOAT16:
        numbers = numbers.astype(np.float16).astype(np.float32)
    else:
        numbers = (numbers.copy().view(np.uint32) & 0xFFFF0000).view(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(numbers, name))


def position_embedding_rounded(model: onnx.ModelProto) -> None:
    names = [tensor.name for tensor in model.graph.initializer]
    (name,) = (name for name in names if name.endswith('position_embedding'))
    round_constant(model, name)


def rename_constant(model: onnx.ModelProto, old: str, new: str) -> None:
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == old)
    tensor.name = new
    for node in model.graph.node:
        _rename(node.input, {old: new})


def fill_matrix(bundle: Path, model: onnx.ModelProto, part: str, value: float) -> str:
    """Write one number all over a matrix in half, or the merged one that this is part of."""
    tensor = next(t for t in model.graph.initializer if part in t.name)
    place = {
        entry.key: int(entry.value) for entry in tensor.external_data if entry.key != 'location'
    }
    bits = np.float32(value).view(np.uint32) >> 16
    if half_of(model) == TensorProto.FLOAT16:
        bits = np.float16(value).view(np.uint16)
    data = np.memmap(bundle / ONNX_FOLDER / WEIGHTS_DATA, np.uint16, 'r+', place['offset'])
    data[: place['length'] // 2] = bits
    data.flush()
    return tensor.name


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
