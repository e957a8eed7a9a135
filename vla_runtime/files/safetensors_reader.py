"""Header of a safetensors file, single tensors without PyTorch, and bfloat16, unknown to numpy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vla_runtime.files.input_files import DOWNLOAD_AGAIN, UnreadableFileError, whole_file
from vla_runtime.files.quotes import one_line

_DTYPES = {'F64': '<f8', 'F32': '<f4', 'F16': '<f2', 'BF16': '<u2'}
# A header of 4 MiB lists some 30,000 tensors.
_LARGEST_HEADER = 1 << 22


class SafetensorsError(ValueError):
    """A file that is no whole safetensors file; the message names it."""


class Header(NamedTuple):
    """Header of a safetensors file.

    `tensors` has each one's `dtype`, `shape` and `data_offsets`, counted from position `start`.
    """

    tensors: Mapping[str, dict[str, Any]]
    start: int


def safetensors_header(path: Path) -> Header:
    """Read and check the header of a safetensors file (SafetensorsError: damaged)."""
    # Here: what only converts bfloat16 runs where the library is not installed.
    from safetensors import safe_open

    with safetensors_errors(path):
        target = bounded_file(path)
        # The library checks the whole header: sizes, overlaps, and that the file is not cut short.
        with safe_open(str(target), framework='np'):
            pass
        with target.open('rb') as file:
            length = int.from_bytes(file.read(8), 'little')
            tensors = json.loads(file.read(length))
    tensors.pop('__metadata__', None)
    return Header(tensors, 8 + length)


def bounded_file(path: Path) -> Path:
    """Follow a path to a file whose header is of a size that a policy's may have.

    Raises:
        OSError: it cannot be read.
        UnreadableFileError: no regular file, an empty one, or a header that is too large.
    """
    target = whole_file(path)
    with target.open('rb') as file:
        length = int.from_bytes(file.read(8), 'little')
    if _LARGEST_HEADER < length < target.stat().st_size:
        raise UnreadableFileError(
            f'has a header of {length:,} bytes, at most {_LARGEST_HEADER:,} are read; is it the '
            'right file?'
        )
    return target


@contextmanager
def safetensors_errors(path: Path) -> Iterator[None]:
    """Raise what goes wrong with a file as a SafetensorsError that names it."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        # The library may quote any part of the file.
        reason = one_line(str(error), 300)
        if not isinstance(error, UnreadableFileError):
            reason = (
                f'cannot be read: {error.strerror or reason}'
                if isinstance(error, OSError)
                else f'is not a whole safetensors file ({reason}): {DOWNLOAD_AGAIN}'
            )
        raise SafetensorsError(f'{path}: {reason}') from None


class SafetensorsReader:
    """Single tensors of a whole safetensors file in float32, bfloat16 too (SafetensorsError)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header, self._start = safetensors_header(path)

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32 (ValueError: it is not there, or its dtype is not a float)."""
        entry = self._entry(name)
        begin, end = entry['data_offsets']
        dtype = np.dtype(_DTYPES[entry['dtype']])
        values = np.fromfile(
            self.path, dtype, (end - begin) // dtype.itemsize, offset=self._start + begin
        )
        if entry['dtype'] == 'BF16':
            values = bfloat16_to_float32(values)
        return values.astype(np.float32, copy=False).reshape(entry['shape'])

    def mapped(self, name: str) -> tuple[np.ndarray, bool]:
        """One tensor as stored, mapped; True for bfloat16, held as uint16; errors as `read`."""
        entry = self._entry(name)
        offset, shape = self._start + entry['data_offsets'][0], tuple(entry['shape'])
        dtype = np.dtype(_DTYPES[entry['dtype']])
        return np.memmap(self.path, dtype, 'r', offset, shape), entry['dtype'] == 'BF16'

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; errors as `read`."""
        return tuple(self._entry(name)['shape'])

    def _entry(self, name: str) -> dict[str, Any]:
        entry = self._header.get(name)
        if entry is None or entry['dtype'] not in _DTYPES:
            raise ValueError(f"{self.path}: float tensor '{name}' is missing")
        return dict(entry)


def bfloat16_to_float32(values: np.ndarray) -> np.ndarray:
    """bfloat16 held as uint16 to float32, exactly."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 held as uint16, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
