"""MessagePack with NumPy arrays, byte for byte as openpi's client packs them.

An array is a map of four with keys in bytes (`__ndarray__`, `data`, `dtype`, `shape`), a NumPy
scalar a map of three (`__npgeneric__`, `data`, `dtype`). Keys in text are read too, and two other
forms of arrays: a .npy file (`__ndarray_class__`, `as_npy`), and that of msgpack-numpy (`nd`,
`type`, `shape`, `data`). Nothing that is read is ever executed: no pickles, no extension types, no
dtype of objects.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.lib import format as npy

# Whole numbers, floats, truth values and texts. `O`, `V`, `c` and times are refused.
_KINDS = 'biufU'
_DTYPE = re.compile(r'[<>|=]?([biufU])([1-9][0-9]{0,5})')
_MOST_AXES = 8
# Maps and items of lists in a message: each takes some fifty times the memory of its one byte.
_MOST_ITEMS = 50_000
_DEEPEST = 8


class MessageError(ValueError):
    """Bytes that are no message, or a message that no policy can be asked with."""


def pack(message: Any) -> bytes:
    """Return the bytes of a message.

    Raises:
        TypeError: something in it has no form on this wire.
    """
    # Here, because a robot whose policy runs on it has no use for the package.
    import msgpack

    return cast(bytes, msgpack.packb(message, default=_packed_array))


def unpack(data: bytes) -> Any:
    """Return the message in some bytes; arrays are read-only views of them.

    Raises:
        MessageError: no MessagePack, or more, larger or other things in it than a request has.
    """
    import msgpack

    reader = _Reader()
    try:
        return msgpack.unpackb(
            data,
            object_hook=reader.take_map,
            list_hook=reader.take_list,
            max_array_len=_MOST_ITEMS,
            max_map_len=_MOST_ITEMS,
            max_ext_len=0,
        )
    except MessageError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        raise MessageError(
            'the frame is no MessagePack message with texts as keys, or a part of one'
        ) from None
    except MemoryError:
        raise MessageError('there is no memory for a message of this size') from None


def flatten(message: Any) -> dict[str, Any]:
    """Return a request's values by their path, nested keys joined with slashes.

    Raises:
        MessageError: no map, a key that is no text, a key given twice, or too many levels.
    """
    found: dict[str, Any] = {}

    def walk(inner: Mapping[Any, Any], path: str, depth: int) -> None:
        if depth > _DEEPEST:
            raise MessageError(f'maps in maps, more than {_DEEPEST} deep')
        for key, value in inner.items():
            if not isinstance(key, str):
                raise MessageError('a key is no text')
            name = f'{path}/{key}' if path else key
            if isinstance(value, Mapping):
                walk(value, name, depth + 1)
            elif name in found:
                raise MessageError(f'{name[:60]!r} is given twice, flat and nested')
            else:
                found[name] = value

    if not isinstance(message, Mapping):
        raise MessageError(f'expected a map of keys to values, got {type(message).__name__}')
    walk(message, '', 1)
    return found


def _packed_array(value: Any) -> dict[bytes, Any]:
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind not in _KINDS:
        raise TypeError(f'{type(value).__name__} has no form on this wire')
    if isinstance(value, np.generic):
        return {b'__npgeneric__': True, b'data': value.item(), b'dtype': value.dtype.str}
    return {
        b'__ndarray__': True,
        b'data': value.tobytes(),
        b'dtype': value.dtype.str,
        b'shape': value.shape,
    }


class _Reader:
    """Turns maps into arrays, and counts what a message holds."""

    def __init__(self) -> None:
        self._items = 0

    def take_list(self, items: list[Any]) -> list[Any]:
        self._count(len(items))
        return items

    def take_map(self, found: dict[Any, Any]) -> Any:
        self._count(1 + len(found))
        if _marked(found, '__ndarray__'):
            return array_from(_field(found, 'data'), _field(found, 'dtype'), _field(found, 'shape'))
        if _marked(found, '__npgeneric__'):
            return _scalar(_field(found, 'data'), _field(found, 'dtype'))
        if _marked(found, '__ndarray_class__'):
            return _from_npy(_field(found, 'as_npy'))
        if found.get(b'nd') is True:
            return array_from(found.get(b'data'), found.get(b'type'), found.get(b'shape'))
        return found

    def _count(self, items: int) -> None:
        self._items += items
        if self._items > _MOST_ITEMS:
            raise MessageError(f'more than {_MOST_ITEMS:,} items: pack numbers as an array')


def _marked(found: Mapping[Any, Any], mark: str) -> bool:
    return mark.encode() in found or mark in found


def _field(found: Mapping[Any, Any], name: str) -> Any:
    return found.get(name.encode(), found.get(name))


def _dtype(text: Any) -> np.dtype[Any]:
    match = _DTYPE.fullmatch(text) if isinstance(text, str) else None
    try:
        if match is None:
            raise TypeError
        return np.dtype(text)
    except TypeError:
        raise MessageError(
            'an array is of no type that is taken here: whole numbers, floats, truth values, texts'
        ) from None


def array_from(data: Any, dtype: Any, shape: Any) -> np.ndarray:
    """Return the array of these bytes, a view of them (MessageError: they do not fit)."""
    kind = _dtype(dtype)
    if not isinstance(shape, list) or len(shape) > _MOST_AXES:
        raise MessageError(f'the shape of an array is no list of up to {_MOST_AXES} sizes')
    if not all(type(size) is int and 0 <= size < 2**31 for size in shape):
        raise MessageError('the shape of an array has something in it that is no size')
    expected = math.prod(shape) * kind.itemsize
    if not isinstance(data, bytes) or len(data) != expected:
        raise MessageError(
            f'an array of shape {shape} and type {kind} takes {expected} bytes, and the message '
            'has another number of them'
        )
    if not expected:
        # What follows may take a row for each of its sizes.
        if math.prod(size for size in shape if size) > _MOST_ITEMS:
            raise MessageError(f'an array of shape {shape} has no numbers')
        return np.zeros(shape, kind)
    return np.frombuffer(data, kind).reshape(shape)


def _from_npy(data: Any) -> np.ndarray:
    """Read a .npy file by its header, which says what is there and executes nothing."""
    if not isinstance(data, bytes):
        raise MessageError('an array of a .npy file has no bytes')
    file = io.BytesIO(data)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        shape, by_columns, kind = readers[npy.read_magic(file)](file)
    except (ValueError, KeyError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise MessageError('an array is no .npy file') from None
    array = array_from(data[file.tell() :], kind.str, list(shape[::-1] if by_columns else shape))
    return array.T if by_columns else array


def _scalar(data: Any, dtype: Any) -> np.generic:
    kind = _dtype(dtype)
    if not isinstance(data, (bool, int, float, str)):
        raise MessageError('a scalar is neither number nor text')
    try:
        return kind.type(data)
    except (ValueError, TypeError, OverflowError):
        raise MessageError(f'a scalar does not fit its type {kind}') from None
