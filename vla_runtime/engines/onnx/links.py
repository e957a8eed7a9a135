"""Graphs whose weights file is a symbolic link, as in a Hugging Face cache.

ONNX Runtime resolves links and refuses weights outside the graph's folder. So the link is resolved
here, and ONNX Runtime gets the target's folder and a graph with the target's file name. Protocol
buffers are read without their library, which a robot need not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vla_runtime.bundle.onnx_files import WEIGHTS_DATA
from vla_runtime.files.input_files import regular_file

# Fields of the messages, as onnx.proto of ONNX 1.x numbers them.
_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_EXTERNAL = 7, 5, 13
_ENTRY_KEY, _ENTRY_VALUE = 1, 2


def follow_weights(path: Path, model: bytes | None) -> tuple[Path, bytes | None]:
    """Resolve a linked weights file, and make the graph name the link's target.

    Args:
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


_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


def fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield a message's field numbers and values; a value is a number or the field's bytes.

    Raises:
        ValueError, IndexError: the bytes are no whole message.
    """
    for number, value, _ in _spans(data):
        yield number, value


def changed(data: memoryview, changes: Mapping[int, Callable[[memoryview], bytes]]) -> bytes:
    """Return a message with the bytes of some fields replaced and all else kept.

    Args:
        data: the message.
        changes: field number to a function of the field's old bytes that gives the new ones.

    Raises:
        ValueError, IndexError: the bytes are no whole message.
    """
    made = bytearray()
    for number, value, raw in _spans(data):
        if number in changes and isinstance(value, memoryview):
            new = changes[number](value)
            made += _as_varint(number << 3 | _BYTES) + _as_varint(len(new)) + new
        else:
            made += raw
    return bytes(made)


def _spans(data: memoryview) -> Iterator[tuple[int, Any, memoryview]]:
    """Yield each field's number, value, and all its bytes with the tag."""
    place = 0
    while place < len(data):
        begin = place
        tag, place = _varint(data, place)
        number, wire = tag >> 3, tag & 7
        value: Any
        if wire == _VARINT:
            value, place = _varint(data, place)
        elif wire in (_EIGHT, _FOUR, _BYTES):
            size = 8 if wire == _EIGHT else 4
            if wire == _BYTES:
                size, place = _varint(data, place)
            if place + size > len(data):
                raise ValueError('it ends too early')
            value = data[place : place + size]
            place += size
        else:
            raise ValueError(f'unknown wire type {wire}')
        yield number, value, data[begin:place]


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError('a number of more than 64 bits')


def _as_varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)
