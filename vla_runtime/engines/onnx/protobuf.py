"""Protocol buffers without their library: read a message's fields, and replace some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
