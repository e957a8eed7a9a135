"""One graph for any number of prompt rows, made of those for two and for three.

Both traces have the same nodes; only numbers of rows in shapes differ. Each such constant is a +
(R-2) b for R rows: it becomes -1 where a Reshape infers it, else it is computed from an input's
shape.
"""

from __future__ import annotations

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.export.onnx.graph import GraphWriter

# Rows of the two graphs: one row would leave out what spreads a tensor over rows.
TRACED = (2, 3)
_AXIS = 'rows'


def with_row_axis(two: GraphWriter, three: GraphWriter, counted: str) -> onnx.ModelProto:
    """Return the graph with an axis `rows` of any length, from those traced with 2 and 3 rows.

    `counted`: input whose first axis is the rows. Raises ExportError: graphs that differ
    otherwise.
    """
    return _Merge(two, three, counted).run()


class _Merge:
    def __init__(self, two: GraphWriter, three: GraphWriter, counted: str) -> None:
        self._model = two.model()
        self._values = (two.values, three.values)
        self._other = three.model().graph
        self._known = tuple(
            {tensor.name: tensor for tensor in graph.initializer}
            for graph in (self._model.graph, self._other)
        )
        self._counted = counted
        self._added: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._made: dict[tuple[bytes, bytes], str] = {}

    def run(self) -> onnx.ModelProto:
        graph = self._model.graph
        if len(graph.node) != len(self._other.node):
            raise self._conflict('the number of nodes')
        for node, other in zip(graph.node, self._other.node, strict=True):
            if (node.op_type, list(node.attribute)) != (other.op_type, list(other.attribute)):
                raise self._conflict(f"node '{node.name}'")
            for index, names in enumerate(zip(node.input, other.input, strict=True)):
                if self._differs(*names):
                    node.input[index] = self._general(node.op_type, *names)
        for ports, others in ((graph.input, self._other.input), (graph.output, self._other.output)):
            for port, twin in zip(ports, others, strict=True):
                self._free_axis(port, twin)
        nodes = [*self._added, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
        read = {name for node in nodes for name in node.input}
        kept = [tensor for tensor in graph.initializer if tensor.name in read]
        del graph.initializer[:]
        graph.initializer.extend([*kept, *self._constants.values()])
        return self._model

    def _differs(self, name: str, other: str) -> bool:
        """Return whether two inputs at the same position are constants of different numbers."""
        one, two = self._known[0].get(name), self._known[1].get(other)
        if one is None and two is None:
            if name != other:
                raise self._conflict(f"tensor '{name}'")
            return False
        if one is None or two is None:
            raise self._conflict(f"tensor '{name}'")
        if name in self._values[0] and other in self._values[1]:
            return not torch.equal(self._values[0][name], self._values[1][other])
        if list(one.external_data) != list(two.external_data):
            raise self._conflict(f"weight '{name}'")
        return False

    def _numbers(self, name: str, other: str) -> tuple[np.ndarray, np.ndarray]:
        return _as_array(self._values[0][name]), _as_array(self._values[1][other])

    def _general(self, operator: str, name: str, other: str) -> str:
        """Return the name of the tensor that replaces both constants, for any number of rows."""
        two, three = self._numbers(name, other)
        if two.shape != three.shape:
            return self._spread(name, two, three)
        if two.dtype != np.int64:
            raise self._conflict(f"constant '{name}'")
        changing = two != three
        if operator == 'Reshape' and changing.sum() == 1 and (two != -1).all():
            return self._constant(np.where(changing, -1, two))
        return self._affine(two, three - two)

    def _affine(self, base: np.ndarray, slope: np.ndarray) -> str:
        """Compute base + (R - 2) * slope in the graph."""
        key = (base.tobytes(), slope.tobytes())
        if key not in self._made:
            count = self._node('Shape', [self._counted])
            rows = self._node('Gather', [count, self._constant(np.array([0]))])
            more = self._node('Sub', [rows, self._constant(np.array([TRACED[0]]))])
            step = self._node('Mul', [more, self._constant(slope)])
            self._made[key] = self._node('Add', [step, self._constant(base)])
        return self._made[key]

    def _spread(self, name: str, two: np.ndarray, three: np.ndarray) -> str:
        """Spread a constant with the same numbers in every row over the rows."""
        axes = [i for i, (a, b) in enumerate(zip(two.shape, three.shape, strict=False)) if a != b]
        if two.ndim != three.ndim or len(axes) != 1:
            raise self._conflict(f"constant '{name}'")
        row = two.take([0], axis=axes[0])
        rows_of = (np.broadcast_to(row, array.shape) for array in (two, three))
        if not all(np.array_equal(a, b) for a, b in zip((two, three), rows_of, strict=True)):
            raise self._conflict(f"constant '{name}'")
        shapes = [np.array(array.shape, np.int64) for array in (two, three)]
        shape = self._affine(shapes[0], shapes[1] - shapes[0])
        bfloat16 = self._values[0][name].dtype == torch.bfloat16
        kind = onnx.TensorProto.BFLOAT16 if bfloat16 else None
        return self._node('Expand', [self._constant(row, kind), shape])

    def _node(self, operator: str, inputs: list[str]) -> str:
        name = f'rows/{operator}_{len(self._added)}'
        self._added.append(helper.make_node(operator, inputs, [name], name=name))
        return name

    def _constant(self, value: np.ndarray, kind: int | None = None) -> str:
        """Name of a new constant; its bits are numbers of `kind` where that is given."""
        name = f'rows/{value.dtype}_{"x".join(map(str, value.shape))}_{len(self._constants)}'
        self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        if kind is not None:
            self._constants[name].data_type = kind
        return name

    def _free_axis(self, port: onnx.ValueInfoProto, twin: onnx.ValueInfoProto) -> None:
        if port.name != twin.name:
            raise self._conflict(f"port '{port.name}'")
        sizes = (side.type.tensor_type.shape.dim for side in (port, twin))
        for size, other in zip(*sizes, strict=True):
            if size.dim_value != other.dim_value:
                if (size.dim_value, other.dim_value) != TRACED:
                    raise self._conflict(f"port '{port.name}'")
                size.dim_param = _AXIS

    def _conflict(self, where: str) -> ExportError:
        return ExportError(
            f'{self._model.graph.name}: {where} differs between two and three prompt rows in more '
            'than the number of rows, so no graph can be written for both; a network must treat '
            'every number of rows alike'
        )


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's numbers; of bfloat16, which NumPy lacks, the bits."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
