"""Graphs whose weights file is a symbolic link, as in a Hugging Face cache.

ONNX Runtime resolves links and refuses weights outside the graph's folder. So the link is resolved
here, and ONNX Runtime gets the target's folder and a graph with the target's file name.
"""

from __future__ import annotations

from pathlib import Path

from vla_runtime.bundle.onnx_files import WEIGHTS_DATA
from vla_runtime.engines.onnx.protobuf import changed, fields
from vla_runtime.files.input_files import regular_file

# Fields of the messages, as onnx.proto of ONNX 1.x numbers them.
_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_EXTERNAL = 7, 5, 13
_ENTRY_KEY, _ENTRY_VALUE = 1, 2


def follow_weights(path: Path, model: bytes | None) -> tuple[Path, bytes | None]:
    """Resolve a linked weights file, and make the graph name the link's target.

    Args:
        path: path of the graph file.
        model: the graph's bytes; None for those of the file.

    Returns:
        The folder that holds the weights, and the graph's bytes; None for those of the file.

    Raises:
        ValueError: the link leads to no regular file, or the graph is no ONNX file.
        OSError: the graph file cannot be read.
    """
    folder, weights = path.parent, path.parent / WEIGHTS_DATA
    if not weights.is_symlink():
        return folder, model
    try:
        target = regular_file(weights)
    except ValueError as error:
        raise ValueError(f'{weights}: {error}') from None
    try:
        return target.parent, _relocated(model or path.read_bytes(), target.name)
    except (IndexError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f'{path}: is not a whole ONNX file ({error})') from None


def _relocated(model: bytes, file: str) -> bytes:
    """Return the graph with `file` as the place of all its external weights."""

    def entry(data: memoryview) -> bytes:
        if bytes(dict(fields(data))[_ENTRY_KEY]) != b'location':
            return bytes(data)
        return changed(data, {_ENTRY_VALUE: lambda old: file.encode()})

    def tensor(data: memoryview) -> bytes:
        return changed(data, {_TENSOR_EXTERNAL: entry})

    def graph(data: memoryview) -> bytes:
        return changed(data, {_GRAPH_INITIALIZER: tensor})

    return changed(memoryview(model), {_MODEL_GRAPH: graph})
