"""Tensors of a safetensors file: found, compared with what a network needs, small ones read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import safe_open

from vla_runtime.bundle.schema import PACKED, WEIGHT_BYTES
from vla_runtime.files.input_files import UnreadableFileError
from vla_runtime.files.quotes import join_truncated, quoted
from vla_runtime.files.safetensors_reader import (
    SafetensorsError,
    bfloat16_to_float32,
    bounded_file,
    safetensors_errors,
    safetensors_header,
)

# safetensors' names of the dtypes that numpy has; its library fails on all others.
_NUMPY_DTYPES = frozenset(
    ('BOOL', 'U8', 'I8', 'U16', 'I16', 'F16', 'U32', 'I32', 'F32', 'U64', 'I64', 'F64', 'C64')
)
_PACKED_DTYPES = ('U8',)
_FLOAT_DTYPES = tuple(name for name in WEIGHT_BYTES if name not in _PACKED_DTYPES)
# Statistics are a few numbers of each joint.
_LARGEST_STATISTICS = 1 << 24


class TensorsError(ValueError):
    """Tensors that cannot be used; the message names file and tensors."""


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor's bytes in a checkpoint.

    Attributes:
        name: name in the checkpoint.
        dtype: `F32`, `BF16`, `F16`; `U8` of packed weights.
        offset: position of its first byte in the file.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape) * WEIGHT_BYTES[self.dtype]

    def part(self, index: int) -> StoredTensor:
        """Return one part along the first axis, such as the matrix of one robot; none is copied."""
        part = replace(self, shape=self.shape[1:])
        return replace(part, offset=self.offset + index * part.size)

    def rows(self, first: int, count: int) -> StoredTensor:
        """Return so many rows along the first axis; none is copied."""
        row = math.prod(self.shape[1:]) * WEIGHT_BYTES[self.dtype]
        return replace(self, shape=(count, *self.shape[1:]), offset=self.offset + first * row)


# Integers with which PyTorch's batch norms count the batches of training.
_COUNTER = '.num_batches_tracked'


def read_header(path: Path) -> list[StoredTensor]:
    """Find the tensors of one safetensors file, under the names they have there.

    Raises:
        TensorsError: a damaged file, or a tensor that is not of a precision networks load.
    """
    try:
        header = safetensors_header(path)
    except SafetensorsError as error:
        raise TensorsError(str(error)) from None
    tensors = []
    for name, entry in header.tensors.items():
        if name.endswith(_COUNTER):
            continue
        dtypes = _PACKED_DTYPES if name.endswith(PACKED) else _FLOAT_DTYPES
        if entry['dtype'] not in dtypes:
            raise TensorsError(
                f'{path}: tensor {quoted(name)} is {entry["dtype"]}; expected one of '
                f'{", ".join(dtypes)}'
            )
        shape, offset = tuple(entry['shape']), header.start + entry['data_offsets'][0]
        tensors.append(StoredTensor(name, path, entry['dtype'], shape, offset))
    return tensors


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read all tensors of a small safetensors file, such as statistics, as they are stored.

    Raises:
        TensorsError: a damaged file, or a tensor of a dtype that numpy does not have.
    """
    try:
        with safetensors_errors(path):
            target = bounded_file(path)
            if (size := target.stat().st_size) > _LARGEST_STATISTICS:
                raise UnreadableFileError(
                    f'is {size:,} bytes large, at most {_LARGEST_STATISTICS:,} are read; is it '
                    'the right file?'
                )
            with safe_open(str(target), framework='np') as file:
                dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
                unknown = [name for name in dtypes if dtypes[name] not in _NUMPY_DTYPES]
                if not unknown:
                    return {name: file.get_tensor(name) for name in dtypes}
    except SafetensorsError as error:
        raise TensorsError(str(error)) from None
    name = unknown[0]
    raise TensorsError(f'{path}: tensor {quoted(name)} is {dtypes[name]}; expected F32 or F64')


def read_array(stored: StoredTensor) -> np.ndarray:
    """Read one tensor as float32 (TensorsError: the file is cut short, or cannot be read)."""
    try:
        with stored.path.open('rb') as file:
            file.seek(stored.offset)
            data = file.read(stored.size)
    except OSError as error:
        raise TensorsError(f'{stored.path}: cannot be read: {error.strerror}') from None
    if len(data) != stored.size:
        raise TensorsError(f'{stored.path}: ends inside tensor {quoted(stored.name)}')
    if stored.dtype == 'BF16':
        values = bfloat16_to_float32(np.frombuffer(data, '<u2'))
    else:
        values = np.frombuffer(data, {'F32': '<f4', 'F16': '<f2'}[stored.dtype])
    return values.astype(np.float32).reshape(stored.shape)


def check_tensors(
    tensors: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare tensors by this package's names with the network's names and shapes.

    Raises:
        TensorsError: tensors missing, unexpected or misshapen; lists at most 10, then a count.
    """
    lines = [
        f"missing '{name}' {list(shape)}" for name, shape in expected.items() if name not in tensors
    ]
    for name, stored in tensors.items():
        if name not in expected:
            lines.append(f"unexpected '{stored.name}' {list(stored.shape)} ({stored.path.name})")
        elif stored.shape != tuple(expected[name]):
            lines.append(
                f"'{stored.name}' has shape {list(stored.shape)} where {list(expected[name])} is "
                f"expected for '{name}' ({stored.path.name})"
            )
    if lines:
        raise TensorsError(f'the tensors do not fit the network:\n  {join_truncated(lines)}')
