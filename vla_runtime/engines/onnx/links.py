"""Graphs whose weights file is a symbolic link, as in a Hugging Face cache.

ONNX Runtime refuses weights outside the graph's folder. So it gets the link target's folder and a
graph with the target's file name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vla_runtime.bundle.onnx_files import WEIGHTS_DATA
from vla_runtime.files.input_files import regular_file

if TYPE_CHECKING:
    import onnx


def follow_weights(path: Path, model: bytes | None) -> tuple[Path, bytes | None]:
    """Resolve a linked weights file, and make the graph name the link's target.

    Args:
        model: the graph's bytes; None for those of the file.

    Returns:
        The folder that holds the weights, and the graph's bytes; None for those of the file.

    Raises:
        ValueError: the link leads to no regular file, the graph is no ONNX file, or `onnx` is not
            installed.
        OSError: the graph file cannot be read.
    """
    folder, weights = path.parent, path.parent / WEIGHTS_DATA
    if not weights.is_symlink():
        return folder, model
    try:
        target = regular_file(weights)
    except ValueError as error:
        raise ValueError(f'{weights}: {error}') from None
    graph = read_graph(path, model, f'{WEIGHTS_DATA} is a link', 'copy the bundle without links')
    for tensor in graph.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == 'location':
                entry.value = target.name
    return target.parent, graph.SerializeToString()


def read_graph(path: Path, model: bytes | None, why: str, else_: str) -> onnx.ModelProto:
    """Parse a graph without its weights.

    Args:
        model: the graph's bytes; None for those of the file.
        why: what needs it, for a machine without `onnx`; else_: what does without.

    Raises:
        ValueError: no ONNX file, or `onnx` is not installed.
        OSError: the file cannot be read.
    """
    try:
        import onnx
    except ImportError:
        raise ValueError(
            f"{path}: {why}, which needs the Python package 'onnx': pip install onnx, or {else_}"
        ) from None
    data = path.read_bytes() if model is None else model
    try:
        return onnx.load_model_from_string(data)
    except Exception as error:  # protobuf's own error, which is not re-exported
        raise ValueError(f'{path}: is not a whole ONNX file ({error})') from None
