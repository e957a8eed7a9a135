"""Operators and types that the ONNX parser of a TensorRT release reads."""

from __future__ import annotations

from vla_runtime.bundle.graph_facts import GraphFacts
from vla_runtime.bundle.onnx_files import Precision

# Operators that the ONNX parser of TensorRT 8.6 knows (its operators.md) and our graphs may use.
# Later parsers know them all.
_KNOWN_8_6 = """
    Abs Add And Cast Clip Concat Constant ConstantOfShape Conv Cos Div Equal Erf Exp Expand Flatten
    Floor Gather Gemm Greater GreaterOrEqual Identity LayerNormalization Less LessOrEqual Log MatMul
    Max MaxPool Min Mul Neg Not Or Pow Range Reciprocal ReduceMax ReduceMean ReduceMin ReduceSum
    Relu Reshape Shape Sigmoid Sin Slice Softmax Split Sqrt Squeeze Sub Tanh Tile Transpose
    Unsqueeze Where
"""
OPERATORS_8_6 = frozenset(_KNOWN_8_6.split())
OPSET_8_6 = 17


# The first release that reads ONNX's attention.
_ATTENTION = (10, 14)


def unsupported(graph: GraphFacts, precision: Precision, version: str, rtx: bool) -> list[str]:
    """List the parts of a graph that a TensorRT release cannot read.

    Args:
        graph: facts of the graph.
        precision: precision of its large matrices.
        version: version of TensorRT, such as `10.3.0`.
        rtx: that for RTX, which has version numbers of its own.

    Returns:
        operators, a newer operator set, bfloat16; empty where it reads all
    """
    if rtx:
        return []
    major, minor = (int(number) for number in version.split('.')[:2])
    if major > 8:
        old = 'Attention' in graph.operators and (major, minor) < _ATTENTION
        return ['Attention (from 10.14 on; export without --attention fused)'] if old else []
    problems = sorted(set(graph.operators) - OPERATORS_8_6)
    if graph.opset > OPSET_8_6:
        problems.append(f'operator set {graph.opset} (at most {OPSET_8_6})')
    if precision == 'bfloat16':
        problems.append('bfloat16')
    return problems
