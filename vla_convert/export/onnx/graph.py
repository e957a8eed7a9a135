"""Writes one ONNX graph, node by node, with every shape and precision known.

Numbers are computed in float32, indices in integers; only matrix products and moves are ever in
half. Nothing but float32 is rounded to half, and no float becomes an integer. `precision.py`
checks the finished file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from onnx import helper
from torch import Tensor

from vla_convert.export.onnx.weights import ONNX_TYPE, WeightFile

# The newest set that TensorRT 8.6 reads; ONNX Runtime 1.17 and later know it.
OPSET = 17
# The first sets with 8-bit floats, with 4-bit floats, and with attention as an operator.
FLOAT8_OPSET, FLOAT4_OPSET, ATTENTION_OPSET = 19, 23, 23
# The version of files by the set that they name.
_IR_VERSIONS = {OPSET: 8, FLOAT8_OPSET: 9, ATTENTION_OPSET: 11}
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Value:
    """A tensor of the graph."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class GraphWriter:
    """Collects the nodes of one graph; constants and weights go to the shared weight file.

    `opset`: version of ONNX's operators; `fused`: half type of attention as one operator, None:
    written out.
    """

    def __init__(
        self,
        name: str,
        weights: WeightFile,
        opset: int = OPSET,
        fused: torch.dtype | None = None,
    ) -> None:
        self.name = name
        self.weights = weights
        self.opset = opset
        self.fused = fused
        # Prefix of all node and intermediate names.
        self.scope = ''
        # Numbers of every constant, by its name in the graph.
        self.values: dict[str, Tensor] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._casts: dict[tuple[str, torch.dtype], Value] = {}
        self._cast_from: dict[str, Value] = {}
        self._reshaped_from: dict[str, Value] = {}
        # By the name of a part: the value that was split, the axis, and all its parts.
        self._cut_from: dict[str, tuple[Value, int, list[Value]]] = {}
        self._constants: dict[tuple[torch.dtype, tuple[int, ...], bytes], Value] = {}
        self._count = 0
        self._declared: dict[str, onnx.ValueInfoProto] = {}

    def input(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Value:
        """Declare an input of the graph."""
        self._inputs.append(helper.make_tensor_value_info(name, ONNX_TYPE[dtype], list(shape)))
        return Value(name, dtype, tuple(shape))

    def drop_unused_input(self, name: str) -> None:
        """Take an input back that no node reads."""
        if not any(name in node.input for node in self._nodes):
            self._inputs = [port for port in self._inputs if port.name != name]

    def output(self, name: str, value: Value) -> None:
        """Declare an output of the graph; the value takes this name, no copy is made."""
        for node in self._nodes:
            for names in (node.input, node.output):
                for index, other in enumerate(names):
                    if other == value.name:
                        names[index] = name
        self._outputs.append(
            helper.make_tensor_value_info(name, ONNX_TYPE[value.dtype], list(value.shape))
        )

    def node(
        self,
        operator: str,
        inputs: Sequence[Value],
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        **attributes: Any,
    ) -> Value:
        """Add a node of one output; its dtype is the first input's unless given."""
        (out,) = self.nodes(operator, inputs, [shape], dtype, **attributes)
        return out

    def nodes(
        self,
        operator: str,
        inputs: Sequence[Value],
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype | None = None,
        **attributes: Any,
    ) -> list[Value]:
        """Add a node of several outputs."""
        self._count += 1
        name = f'{self.scope}{operator}_{self._count}'
        outs = [
            Value(name if len(shapes) == 1 else f'{name}.{i}', dtype or inputs[0].dtype, (*shape,))
            for i, shape in enumerate(shapes)
        ]
        self._nodes.append(
            helper.make_node(
                operator,
                [value.name for value in inputs],
                [value.name for value in outs],
                name=name,
                **attributes,
            )
        )
        return outs

    def declare(self, value: Value) -> None:
        """State the type of what an operator makes that is not ONNX's own."""
        if value.name not in self._initializers:
            kind = ONNX_TYPE[value.dtype]
            # Its shape may have a free axis.
            self._declared[value.name] = helper.make_tensor_value_info(value.name, kind, None)

    def initializer(self, proto: onnx.TensorProto, dtype: torch.dtype) -> Value:
        """Use a tensor of the weight file in this graph."""
        self._initializers.setdefault(proto.name, proto)
        return Value(proto.name, dtype, tuple(proto.dims))

    def constant(self, value: Tensor, name: str = '') -> Value:
        """Use a constant; equal constants are stored once."""
        value = value.contiguous()
        key = (value.dtype, tuple(value.shape), value.view(-1).view(torch.uint8).numpy().tobytes())
        if key not in self._constants:
            unique = f'constant_{len(self._constants)}' + (f'/{name}' if name else '')
            proto = self.weights.constant(unique, value)
            self._constants[key] = self.initializer(proto, value.dtype)
            self.values[unique] = value
        return self._constants[key]

    def integers(self, numbers: Sequence[int]) -> Value:
        """A list of int64, as shapes and axes are given."""
        return self.constant(torch.tensor(list(numbers), dtype=torch.int64))

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Convert; the same conversion of the same value is one node."""
        if value.dtype == dtype:
            return value
        key = (value.name, dtype)
        if key not in self._casts:
            made = self.node('Cast', [value], value.shape, dtype, to=ONNX_TYPE[dtype])
            self._casts[key] = made
            self._cast_from[made.name] = value
        return self._casts[key]

    def single(self, value: Value) -> Value:
        """Cast half to float32 and leave other types, as operators that compute need it."""
        return self.cast(value, torch.float32) if value.dtype in HALVES else value

    def before_cast(self, value: Value) -> Value:
        """Return the value that this one was cast from, or the value itself."""
        return self._cast_from.get(value.name, value)

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        if tuple(shape) == value.shape:
            return value
        assert math.prod(shape) == math.prod(value.shape)
        made = self.node('Reshape', [value, self.integers(shape)], shape)
        self._reshaped_from[made.name] = value
        return made

    def before_reshape(self, value: Value) -> Value:
        """Return the value that this one was reshaped from, or the value itself."""
        return self._reshaped_from.get(value.name, value)

    def mean(self, value: Value, axes: Sequence[int], shape: Sequence[int], keep: bool) -> Value:
        """Take the mean over axes."""
        if self.opset < 18:
            return self.node('ReduceMean', [value], shape, axes=list(axes), keepdims=int(keep))
        inputs = [value, self.integers(axes)]
        return self.node('ReduceMean', inputs, shape, keepdims=int(keep))

    def largest(self, value: Value, shape: Sequence[int]) -> Value:
        """Take the largest number of the last axis, which stays."""
        if self.opset < 18:
            return self.node('ReduceMax', [value], shape, axes=[-1], keepdims=1)
        return self.node('ReduceMax', [value, self.integers([-1])], shape, keepdims=1)

    def split(self, value: Value, shapes: Sequence[tuple[int, ...]], axis: int) -> list[Value]:
        """Cut along one axis into parts of these shapes."""
        if len(shapes) == 1:
            return [value]
        axis %= len(value.shape)
        sizes = self.integers([shape[axis] for shape in shapes])
        parts = self.nodes('Split', [value, sizes], shapes, axis=axis)
        self._cut_from |= {part.name: (value, axis, parts) for part in parts}
        return parts

    def cut_from(self, parts: Sequence[Value], axis: int) -> Value | None:
        """Return the value that was split into exactly these parts; None for all others."""
        value, split_axis, split_parts = self._cut_from.get(parts[0].name, (None, axis, []))
        return value if split_axis == axis and split_parts == [*parts] else None

    def model(self) -> onnx.ModelProto:
        """The finished graph, without nodes whose outputs nobody reads."""
        read = {port.name for port in self._outputs}
        nodes: list[onnx.NodeProto] = []
        for node in reversed(self._nodes):
            if read & {*node.output}:
                nodes.append(node)
                read |= {*node.input}
        graph = helper.make_graph(
            nodes[::-1],
            self.name,
            self._inputs,
            self._outputs,
            initializer=[one for name, one in self._initializers.items() if name in read],
            value_info=[one for name, one in self._declared.items() if name in read],
        )
        domains = sorted({node.domain for node in nodes} - {''})
        return helper.make_model(
            graph,
            opset_imports=[
                helper.make_opsetid('', self.opset),
                *(helper.make_opsetid(domain, 1) for domain in domains),
            ],
            ir_version=_IR_VERSIONS[self.opset],
            producer_name='vla_runtime',
        )
