"""Graphs in NVFP4 as float32 graphs of the same numbers, in memory: ONNX Runtime has no 4 bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_runtime.bundle.onnx_files import FP4_BLOCK, FP4_ROUNDING, FP4_VALUES
from vla_runtime.engines.onnx.session import read_graph

if TYPE_CHECKING:
    import onnx

# ONNX's operators since which `QuantizeLinear` is told its type, and those that have `Attention`.
_ROUNDING_OPSET, _ATTENTION_OPSET = 21, 23


def emulated(path: Path) -> bytes | None:
    """Read a graph, and return it without 4-bit numbers; None where it has none.

    Raises:
        ValueError: no ONNX file, or `onnx` is not installed.
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    if FP4_ROUNDING.encode() not in data:
        return None
    model = read_graph(path, data, '4-bit numbers are emulated', 'take files of another precision')
    emulate(model)
    return bytes(model.SerializeToString())


def emulate(model: onnx.ModelProto) -> None:
    """Replace what rounds to 4-bit numbers and widens them by float32 that computes the same."""
    if any(node.op_type == FP4_ROUNDING for node in model.graph.node):
        _Emulation(model).run()


class _Emulation:
    """The state of rewriting one graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        from onnx import TensorProto, helper

        self._types, self._helper = TensorProto, helper
        self._model, self._graph = model, model.graph
        self._constants = {item.name: item for item in self._graph.initializer}
        self._nodes: list[onnx.NodeProto] = []
        self._made: dict[str, onnx.NodeProto] = {
            name: node for node in self._graph.node for name in node.output
        }
        self._count = 0

    def run(self) -> None:
        for node in self._graph.node:
            if node.op_type == FP4_ROUNDING:
                self._round(node)
            elif node.op_type == 'DequantizeLinear':
                self._widen(node)
            else:
                self._nodes.append(node)
        del self._graph.node[:]
        self._graph.node.extend(self._nodes)
        read = {name for node in self._nodes for name in node.input}
        kept = [item for name, item in self._constants.items() if name in read]
        del self._graph.initializer[:], self._graph.value_info[:]
        self._graph.initializer.extend(kept)
        del self._model.opset_import[:]
        self._model.opset_import.append(self._helper.make_opsetid('', self._opset()))

    def _opset(self) -> int:
        """The oldest operators that do: ONNX Runtime 1.23 cannot round to 8 bits by those of 23."""
        fused = any(node.op_type == 'Attention' for node in self._nodes)
        return _ATTENTION_OPSET if fused else _ROUNDING_OPSET

    def _round(self, node: onnx.NodeProto) -> None:
        """Compute numbers in units of their block's scale (-1, 16), and the scales (-1, 1)."""
        source, unit = node.input
        numbers, scales = node.output
        blocks = self._add('Reshape', [source, self._integers([-1, FP4_BLOCK])])
        largest = self._add(
            'ReduceMax', [self._add('Abs', [blocks]), self._integers([1])], keepdims=1
        )
        most = self._float(FP4_VALUES[-1])
        kind = self._types.FLOAT8E4M3FN
        scale = self._add('Div', [largest, most])
        eight_bits = self._add('QuantizeLinear', [scale, unit], output_dtype=kind)
        self._add('DequantizeLinear', [eight_bits, unit], scales)
        # A block whose scale is rounded to 0 is widened to 0, whatever its numbers are.
        divisor = self._add('Max', [scales, self._float(1e-38)])
        units = self._add('Div', [blocks, divisor])
        sizes = self._add('Min', [self._add('Abs', [units]), most])
        one, two, four = (self._float(value) for value in (1.0, 2.0, 4.0))
        coarse = self._add('Where', [self._add('Less', [sizes, four]), one, two])
        small = self._add('Less', [sizes, two])
        steps = self._add('Where', [small, self._float(0.5), coarse])
        # Halfway to the even one, as the hardware rounds.
        rounded = self._add('Round', [self._add('Div', [sizes, steps])])
        signs = self._add('Sign', [units])
        self._add('Mul', [self._add('Mul', [rounded, steps]), signs], numbers)

    def _widen(self, node: onnx.NodeProto) -> None:
        source, scale = node.input[:2]
        maker = self._made.get(source)
        if maker is not None and maker.op_type == FP4_ROUNDING:
            if source == maker.output[1]:
                self._add('Identity', [source], node.output[0])
                return
            wide = self._add('Mul', [source, scale])
            shape = self._add('Shape', [maker.input[0]])
            self._add('Reshape', [wide, shape], node.output[0])
            return
        constant = self._constants.get(source)
        if constant is not None and constant.data_type == self._types.FLOAT4E2M1:
            self._widen_matrix(constant, scale, node.output[0])
        elif constant is not None and constant.data_type == self._types.FLOAT8E4M3FN:
            # ONNX Runtime folds a Cast of a constant, and no DequantizeLinear.
            wide = self._add('Cast', [source], to=self._types.FLOAT)
            self._add('Mul', [wide, scale], node.output[0])
        else:
            self._nodes.append(node)

    def _widen_matrix(self, matrix: onnx.TensorProto, scales: str, name: str) -> None:
        rows, columns = matrix.dims
        # The same bytes.
        matrix.data_type = self._types.UINT8
        del matrix.dims[:]
        matrix.dims.extend([rows * columns // 2])
        half, four = (self._bytes(value) for value in (15, 4))
        first = self._add('BitwiseAnd', [matrix.name, half])
        second = self._add('BitShift', [matrix.name, four], direction='RIGHT')
        pairs = [self._add('Unsqueeze', [part, self._integers([1])]) for part in (first, second)]
        codes = self._add('Concat', pairs, axis=1)
        places = self._add('Cast', [codes], to=self._types.INT32)
        values = [*FP4_VALUES, *(-value for value in FP4_VALUES)]
        numbers = self._add('Gather', [self._floats(values), places])
        shape = self._integers([rows // FP4_BLOCK, FP4_BLOCK, columns])
        blocks = self._add('Reshape', [numbers, shape])
        wide = self._add('Mul', [blocks, self._add('Unsqueeze', [scales, self._integers([1])])])
        self._add('Reshape', [wide, self._integers([rows, columns])], name)

    def _add(self, operator: str, inputs: list[str], name: str = '', **attributes: Any) -> str:
        self._count += 1
        name = name or f'four_bits/{operator}_{self._count}'
        node = self._helper.make_node(operator, inputs, [name], name=name, **attributes)
        self._nodes.append(node)
        return name

    def _constant(self, kind: int, shape: list[int], values: list[Any]) -> str:
        name = f'four_bits/{kind}_{len(shape)}_{"_".join(map(str, values))}'
        if name not in self._constants:
            self._constants[name] = self._helper.make_tensor(name, kind, shape, values)
        return name

    def _integers(self, values: list[int]) -> str:
        return self._constant(self._types.INT64, [len(values)], values)

    def _bytes(self, value: int) -> str:
        return self._constant(self._types.UINT8, [], [value])

    def _float(self, value: float) -> str:
        return self._constant(self._types.FLOAT, [], [value])

    def _floats(self, values: list[float]) -> str:
        return self._constant(self._types.FLOAT, [len(values)], values)
