"""Checks that the numbers in an ONNX graph fit their names and types.

The walk over origins (`graph_origins.py`) sees names and types alone. It cannot see:
- a float32 constant whose numbers were rounded to half before they were written. Rotary frequencies
  are where a whole network was converted, and only long prompts show the error. Where the bundle
  itself stores numbers in half, only the constants of rotary angles are checked: the others are
  made of such numbers (a norm's is one plus a weight) and cannot be told apart;
- a half matrix that has a name of the bundle's but other numbers, such as a mean or a sum.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from graph_origins import TEXT_TABLE, is_half_matrix
from onnx import TensorProto

from vla_convert.export.onnx.precision import HALVES, load_graph
from vla_convert.export.onnx.weights import BundleWeights
from vla_runtime.bundle.onnx_files import WEIGHTS_DATA, Precision

# As many of a tensor's numbers are looked at, and so many different ones are no accident: a float32
# number is one of float16's once in 8000 times.
_LOOKED_AT = 4096
_NO_ACCIDENT = 4
# Twice the largest that a rounding to bfloat16 changes, and the smallest step of float16.
_ROUNDING, _SUBNORMAL = 2.0**-7, 2.0**-24
# Queries below this are nothing in float16 at any scale of attention (1/256 for heads of 65,536).
_VANISHING = _SUBNORMAL * 2**8
# Parameters that are in no graph: what they give is an input.
_OUTSIDE = ('.modulation.', 'time_in.', 'time_out.')


def constant_faults(path: Path, weights: BundleWeights) -> list[str]:
    """List the constants of a graph whose numbers do not fit their name or type.

    Args:
        path: path of the graph; its weights.data lies beside it.
        weights: weights of the bundle.

    Returns:
        A sentence a fault, naming the constant; none if all is well.

    Raises:
        ValueError: no ONNX file.
        OSError: its weights are not there.
    """
    graph = load_graph(path).graph
    halves = [tensor for tensor in graph.initializer if tensor.data_type in HALVES]
    faults = [fault for tensor in halves for fault in _matrix_faults(tensor, path.parent, weights)]
    angles = _angle_constants(graph)
    in_half = _stores_half(weights)
    for tensor in graph.initializer:
        # A bundle may store its matrices in half, and float32 files be made of them.
        if tensor.data_type != TensorProto.FLOAT or is_half_matrix(tensor.name):
            continue
        if in_half and tensor.name not in angles:
            continue
        if half := _half_of(_numbers(tensor, path.parent)):
            faults.append(
                f"the constant '{tensor.name}' is in float32, but all its numbers are {half}'s: "
                'they were rounded before they were written'
            )
    return faults


def _matrix_faults(tensor: onnx.TensorProto, folder: Path, weights: BundleWeights) -> list[str]:
    """Faults of a half matrix that is not the bundle's, by name, shape or its first rows."""
    names = tensor.name.split('+')
    if not set(names) <= set(weights.names):
        return [f"the matrix '{tensor.name}' is in half and not of this bundle"]
    shapes = [weights.shape(name) for name in names]
    if tensor.name == TEXT_TABLE:
        expected = shapes[0]
    else:
        # As ONNX multiplies: (in, out), side by side.
        expected = (shapes[0][-1], sum(shape[0] for shape in shapes))
    if tuple(tensor.dims) != expected:
        return [f"the matrix '{tensor.name}' is {tuple(tensor.dims)}; the bundle's is {expected}"]
    place = {entry.key: entry.value for entry in tensor.external_data}
    if place.get('location') != WEIGHTS_DATA:
        return [f"the matrix '{tensor.name}' does not lie in {WEIGHTS_DATA}"]
    stored = np.memmap(folder / WEIGHTS_DATA, '<u2', 'r', int(place['offset']), expected)
    first = np.cumsum([0, *(shape[0] for shape in shapes)])
    rows = [stored[0]] if tensor.name == TEXT_TABLE else [stored[:, n] for n in first[:-1]]
    return [
        f"the matrix '{tensor.name}' holds other numbers than the bundle's '{name}'"
        for name, row in zip(names, rows, strict=True)
        if not _is_rounded(_widened(row, tensor.data_type), weights.read(name)[0].numpy(), name)
    ]


def _widened(bits: np.ndarray, half: int) -> np.ndarray:
    """Convert half numbers, given as uint16, to float32."""
    if half == TensorProto.FLOAT16:
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _is_rounded(row: np.ndarray, exact: np.ndarray, name: str) -> bool:
    """Return whether a row of a matrix is the bundle's, up to rounding to half."""
    scale = 1.0
    if 'attention.q.' in name and exact.any():
        # Attention's own scale, whatever it is, is in the weights of the queries.
        scale = float(row @ exact) / float(exact @ exact)
        if not row.any():
            return bool(np.abs(exact).max() < _VANISHING)
    return scale > 0 and np.allclose(row, scale * exact, rtol=_ROUNDING, atol=_SUBNORMAL)


def _angle_constants(graph: onnx.GraphProto) -> set[str]:
    """Names of the constants that rotary angles are computed with."""
    makers = {name: node for node in graph.node for name in node.output}
    found, ahead = (
        set(),
        [name for node in graph.node if node.op_type in ('Cos', 'Sin') for name in node.input],
    )
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += makers[name].input if name in makers else []
    return found - set(makers)


def _numbers(tensor: onnx.TensorProto, folder: Path) -> np.ndarray:
    """The first numbers of a float32 constant, flat."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return onnx.numpy_helper.to_array(tensor).reshape(-1)[:_LOOKED_AT]
    place = {entry.key: entry.value for entry in tensor.external_data}
    count = min(_LOOKED_AT, int(place['length']) // 4)
    return np.fromfile(folder / place['location'], '<f4', count, offset=int(place['offset']))


def _half_of(numbers: np.ndarray) -> Precision | None:
    """Half type that holds all of these float32 numbers exactly; None if none or by accident."""
    if len(np.unique(numbers)) < _NO_ACCIDENT:
        return None
    if not (numbers.view(np.uint32) & 0xFFFF).any():
        return 'bfloat16'
    with np.errstate(over='ignore'):
        rounded = numbers.astype(np.float16).astype(np.float32)
    return 'float16' if (rounded == numbers).all() else None


def _stores_half(weights: BundleWeights) -> bool:
    """Return whether the bundle stores parameters that stay in float32 in half."""
    return any(
        _half_of(weights.read(name).numpy().reshape(-1)[:_LOOKED_AT])
        for name in weights.names
        if not is_half_matrix(name) and not any(part in name for part in _OUTSIDE)
    )
