"""Summary of an ONNX file for the TensorRT build, read without the `onnx` package.

A Jetson that builds engines has TensorRT, cuda-python and numpy. An ONNX file is protocol buffers
(onnx.proto of ONNX 1.x); of those only the fields needed here are read: operators, the bytes of the
weights and where they lie, and which float types there are.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from vla_runtime.engines.onnx.files import Precision
from vla_runtime.engines.protobuf import fields, varints

# Fields of the messages, as onnx.proto numbers them.
_MODEL_GRAPH, _MODEL_OPSET = 7, 8
_OPSET_DOMAIN, _OPSET_VERSION = 1, 2
_GRAPH_NODE, _GRAPH_INITIALIZER = 1, 5
_NODE_OPERATOR = 4
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_EXTERNAL = 1, 2, 8, 13
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
# Types of tensors: bytes of one number, and the precisions that they stand for.
_BYTES = {1: 4, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 16: 2}
_REDUCED: dict[int, Precision] = {10: 'float16', 16: 'bfloat16'}

# Operators that the ONNX parser of TensorRT 8.6 knows (its operators.md) and our graphs may use.
# Later parsers know them all.
_KNOWN_8_6 = """
    Abs Add And Cast Clip Concat Constant ConstantOfShape Cos Div Equal Erf Exp Expand Flatten Floor
    Gather Gemm Greater GreaterOrEqual Identity LayerNormalization Less LessOrEqual Log MatMul Max
    Min Mul Neg Not Or Pow Range Reciprocal ReduceMax ReduceMean ReduceMin ReduceSum Reshape Shape
    Sigmoid Sin Slice Softmax Split Sqrt Squeeze Sub Tanh Tile Transpose Unsqueeze Where
"""
OPERATORS_8_6 = frozenset(_KNOWN_8_6.split())
OPSET_8_6 = 17


@dataclass(frozen=True)
class ExternalTensor:
    """A weight that lies in a file beside the graph; `kind` is ONNX's number for its type."""

    name: str
    kind: int
    dims: tuple[int, ...]
    offset: int
    length: int


@dataclass
class OnnxSummary:
    """Facts of one ONNX file that a build needs.

    Attributes:
        path: of the file.
        opset: version of ONNX's own operators.
        operators: how often each is used.
        weight_bytes: of all weights, in the file and beside it.
        precision: `float16` or `bfloat16` where there are such weights, else `float32`.
        files: the file and all that its weights lie in.
        external: the weights that lie beside it.
    """

    path: Path
    opset: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    weight_bytes: int = 0
    precision: Precision = 'float32'
    files: list[Path] = field(default_factory=list)
    external: list[ExternalTensor] = field(default_factory=list)

    def unsupported(self, version: str) -> list[str]:
        """List what this TensorRT cannot read: operators, a newer operator set, bfloat16."""
        if not version.startswith('8.'):
            return []
        problems = sorted(set(self.operators) - OPERATORS_8_6)
        if self.opset > OPSET_8_6:
            problems.append(f'operator set {self.opset} (at most {OPSET_8_6})')
        if self.precision == 'bfloat16':
            problems.append('bfloat16')
        return problems


def summarise(path: Path) -> OnnxSummary:
    """Read an ONNX file.

    Raises:
        ValueError: it is missing, no ONNX file, or names weights that are not there.
    """
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f'{path}: is missing; write the ONNX files first, with vla_runtime export'
        ) from None
    summary = OnnxSummary(path, files=[path])
    try:
        for number, value in fields(data):
            if number == _MODEL_GRAPH:
                _read_graph(value, summary)
            elif number == _MODEL_OPSET:
                entries = dict(fields(value))
                if not bytes(entries.get(_OPSET_DOMAIN, b'')):
                    summary.opset = entries[_OPSET_VERSION]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f'{path}: is not a whole ONNX file ({error})') from None
    if not summary.operators:
        raise ValueError(f'{path}: is not an ONNX file: it has no operators')
    for file in summary.files:
        if not file.is_file():
            raise ValueError(f'{file}: is missing; {path.name} keeps its weights there')
    return summary


def _read_graph(data: memoryview, summary: OnnxSummary) -> None:
    for number, value in fields(data):
        if number == _GRAPH_NODE:
            operator = dict(fields(value))[_NODE_OPERATOR]
            summary.operators[bytes(operator).decode()] += 1
        elif number == _GRAPH_INITIALIZER:
            _read_tensor(value, summary)


def _read_tensor(data: memoryview, summary: OnnxSummary) -> None:
    dims: list[int] = []
    kind, name = 0, ''
    entries: dict[str, str] = {}
    for number, value in fields(data):
        if number == _TENSOR_DIMS:
            # Packed by some writers, one by one by others.
            dims += [value] if isinstance(value, int) else list(varints(value))
        elif number == _TENSOR_TYPE:
            kind = value
        elif number == _TENSOR_NAME:
            name = bytes(value).decode()
        elif number == _TENSOR_EXTERNAL:
            entry = dict(fields(value))
            entries[bytes(entry[_ENTRY_KEY]).decode()] = bytes(entry[_ENTRY_VALUE]).decode()
    size = math.prod(dims) * _BYTES.get(kind, 4)
    summary.weight_bytes += size
    summary.precision = _REDUCED.get(kind, summary.precision)
    if entries:
        file = summary.path.parent / entries['location']
        if file not in summary.files:
            summary.files.append(file)
        offset, length = int(entries.get('offset', 0)), int(entries.get('length', size))
        summary.external.append(ExternalTensor(name, kind, tuple(dims), offset, length))
