"""Types of the layers of a parsed network, before it is built."""

from __future__ import annotations

from typing import Any

# Names of TensorRT's data types to numpy's; bfloat16 is held as uint16.
_DTYPES = {
    'FLOAT': 'float32',
    'HALF': 'float16',
    'BF16': 'bfloat16',
    'INT32': 'int32',
    'INT64': 'int64',
    'BOOL': 'bool',
}
# Layers of 8.6 that carry their own types.
_TYPED_LAYERS = ('CONSTANT', 'SHAPE', 'CAST', 'IDENTITY')


def dtype_name(dtype: Any) -> str:
    """Return numpy's name for a data type of TensorRT, or `bfloat16`."""
    return _DTYPES.get(dtype.name, dtype.name.lower())


def pin_types(trt: Any, network: Any) -> dict[str, int]:
    """Pin every layer of a network of 8.6 to the ONNX file's type; return how many to each type.

    Once float16 is allowed, 8.6 runs every layer in float16 that is faster so. Policies have failed
    with norms and softmax in float16.
    """
    typed = [getattr(trt.LayerType, name) for name in _TYPED_LAYERS]
    floats = (trt.DataType.FLOAT, trt.DataType.HALF)
    pinned = dict.fromkeys((_DTYPES['FLOAT'], _DTYPES['HALF']), 0)
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        dtypes = [layer.get_output(number).dtype for number in range(layer.num_outputs)]
        if layer.type in typed or not dtypes or any(dtype not in floats for dtype in dtypes):
            continue
        layer.precision = dtypes[0]
        for number, dtype in enumerate(dtypes):
            layer.set_output_type(number, dtype)
        pinned[dtype_name(dtypes[0])] += 1
    return pinned


def int8_products(trt: Any, network: Any) -> int:
    """Count the products of a parsed network whose operands both come out of int8.

    TensorRT fuses what widens both operands into such a product (its guide, explicit quantisation);
    with one it runs in the other's type. The parser may put a reshape between.
    """
    kinds = trt.LayerType
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    made = {
        layer.get_output(number).name: layer
        for layer in layers
        for number in range(layer.num_outputs)
    }

    def is_widened(tensor: Any) -> bool:
        layer = made.get(tensor.name)
        while layer is not None and layer.type == kinds.SHUFFLE:
            layer = made.get(layer.get_input(0).name)
        return layer is not None and layer.type == kinds.DEQUANTIZE

    return sum(
        layer.type == kinds.MATRIX_MULTIPLY
        and layer.num_inputs == 2
        and all(is_widened(layer.get_input(number)) for number in range(2))
        for layer in layers
    )


def sum_in_float32(trt: Any, network: Any) -> None:
    """Make a strongly typed network add up its products of float16 matrices in float32.

    TensorRT adds up a float16 product in float16 (the longest sums of Gemma 2B have 16384 terms),
    unless both operands are cast to float32 before it: it then takes kernels with float16 operands
    and a float32 sum. The result is cast back. bfloat16 products are left alone: the tensor cores
    add them to float32 alone (PTX ISA, mma: `.f32.bf16.bf16.f32`). How TensorRT joins partial sums
    is not documented; the self-test and a build's receipt compare the results. The ONNX files have
    no such casts, because ONNX Runtime would multiply in float32 with them.

    The network's layers are in topological order.
    """
    half, single = trt.DataType.HALF, trt.DataType.FLOAT
    readers: dict[str, list[tuple[Any, int]]] = {}
    products = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        for number in range(layer.num_inputs):
            tensor = layer.get_input(number)
            if tensor is not None:
                readers.setdefault(tensor.name, []).append((layer, number))
        if layer.type == trt.LayerType.MATRIX_MULTIPLY and layer.get_output(0).dtype == half:
            products.append(layer)
    for layer in products:
        product = layer.get_output(0)
        for number in range(layer.num_inputs):
            widened = network.add_cast(layer.get_input(number), single)
            layer.set_input(number, widened.get_output(0))
        rounded = network.add_cast(product, half).get_output(0)
        for reader, number in readers.get(product.name, ()):
            reader.set_input(number, rounded)
