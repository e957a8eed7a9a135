"""Single tensors of a safetensors file without PyTorch, and bfloat16, which numpy does not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

_DTYPES = {'F64': '<f8', 'F32': '<f4', 'F16': '<f2', 'BF16': '<u2'}


class SafetensorsReader:
    """Single tensors of a safetensors file in float32, bfloat16 ones too (numpy knows none).

    Raises:
        ValueError: not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open('rb') as file:
                length = int.from_bytes(file.read(8), 'little')
                if length > path.stat().st_size:
                    raise ValueError('the header is longer than the file')
                self._header: dict[str, Any] = json.loads(file.read(length))
        except (OSError, ValueError) as error:
            raise ValueError(f'{path}: is not a whole safetensors file: {error}') from None
        self._start = 8 + length

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32.

        Raises:
            ValueError: it is not there, or its dtype is not a float.
        """
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
        """One tensor as it is stored, mapped and not read; True for bfloat16, held as uint16.

        Raises:
            ValueError: as `read`.
        """
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
