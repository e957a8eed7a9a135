"""Tensors of a file that `torch.save` wrote, found without running anything in it.

Such a file is a zip archive: a pickle that says which tensors there are, and their numbers in
files of their own, not compressed. A pickle may name any function to call. This reader knows five
names, which describe tensors, and refuses a file with any other before anything is called. So it
finds where the numbers lie, and they are copied as those of safetensors are.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vla_convert.checkpoints.tensors import CheckpointError
from vla_runtime.bundle.schema import WEIGHT_BYTES
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.files.input_files import UnreadableFileError, whole_file
from vla_runtime.files.quotes import one_line, quoted

_DTYPES = {'FloatStorage': 'F32', 'BFloat16Storage': 'BF16', 'HalfStorage': 'F16'}
# Names and shapes of a few layers.
_LARGEST_PICKLE = 1 << 20
_LOCAL_HEADER = struct.Struct('<4s22xHH')
_PARALLEL = 'module.'


@dataclass(frozen=True)
class _Storage:
    """Numbers of tensors: a file of the archive."""

    dtype: str
    key: str
    count: int


@dataclass(frozen=True)
class _Described:
    """A tensor as the pickle describes it."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def read_archive(path: Path) -> list[StoredTensor]:
    """Find the tensors of a state dict that `torch.save` wrote.

    Args:
        path: the file.

    Returns:
        its tensors, without DistributedDataParallel's `module.` in front of their names

    Raises:
        CheckpointError: a file that is damaged, holds anything but tensors of floats, or names
            something to call.
    """
    try:
        whole_file(path)
        with zipfile.ZipFile(path) as archive, path.open('rb') as file:
            described, root = _read_pickle(path, archive)
            found = [
                _locate(path, archive, file, root, name, one) for name, one in described.items()
            ]
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f'{path}: cannot be read: {error.strerror}') from None
    except UnreadableFileError as error:
        raise CheckpointError(f'{path}: {error}') from None
    # Whatever a damaged pickle makes of its own operations.
    except Exception as error:
        reason = one_line(str(error), 300) or type(error).__name__
        raise CheckpointError(
            f'{path}: is no file of tensors that torch.save wrote: {reason}'
        ) from None
    parallel = bool(found) and all(stored.name.startswith(_PARALLEL) for stored in found)
    if not parallel:
        return found
    return [
        StoredTensor(one.name.removeprefix(_PARALLEL), one.path, one.dtype, one.shape, one.offset)
        for one in found
    ]


def _read_pickle(path: Path, archive: zipfile.ZipFile) -> tuple[dict[str, _Described], str]:
    """Return the tensors by name, and the folder of the archive that everything is in."""
    pickles = [name for name in archive.namelist() if name.endswith('/data.pkl')]
    if len(pickles) != 1:
        raise ValueError(f'it has {len(pickles)} files data.pkl where one is expected')
    root = pickles[0].removesuffix('data.pkl')
    order = f'{root}byteorder'
    if order in archive.namelist() and _content(archive, order, 16).strip() != b'little':
        raise ValueError('its numbers are not little-endian')
    described = _Reader(io.BytesIO(_content(archive, pickles[0], _LARGEST_PICKLE))).load()
    if not isinstance(described, dict):
        raise ValueError(f'it holds a {type(described).__name__} where a state dict is expected')
    for name, one in described.items():
        if not isinstance(name, str) or not isinstance(one, _Described):
            raise ValueError(f'its entry {quoted(name)} is no tensor')
    if not described:
        raise ValueError('it holds no tensors')
    return described, root


def _content(archive: zipfile.ZipFile, name: str, largest: int) -> bytes:
    """Read a small file of the archive."""
    with archive.open(name) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f'its {name} is larger than the {largest:,} bytes that are read')
    return content


def _locate(
    path: Path,
    archive: zipfile.ZipFile,
    file: io.BufferedReader,
    root: str,
    name: str,
    described: _Described,
) -> StoredTensor:
    storage, shape = described.storage, described.shape
    entry = archive.getinfo(f'{root}data/{storage.key}')
    width = WEIGHT_BYTES[storage.dtype]
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != storage.count * width:
        raise ValueError(f'the numbers of {quoted(name)} are compressed or cut short')
    offset, count = _size(described.offset), math.prod(_sizes(shape))
    if _sizes(described.stride) != _packed_stride(shape) or offset + count > storage.count:
        raise ValueError(f'the numbers of {quoted(name)} do not lie one after the other')
    file.seek(entry.header_offset)
    mark, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if mark != b'PK\3\4':
        raise ValueError(f'the numbers of {quoted(name)} are not where the archive says')
    start = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    return StoredTensor(name, path, storage.dtype, shape, start + offset * width)


def _packed_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def _tensor(
    storage: object, offset: object, shape: object, stride: object, *unused: object
) -> _Described:
    """Describe a tensor, in place of `torch._utils._rebuild_tensor_v2`."""
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError('a tensor without numbers')
    return _Described(storage, _size(offset), _sizes(shape), _sizes(stride))


def _parameter(described: object, *unused: object) -> object:
    """Describe a parameter by its tensor, in place of `torch._utils._rebuild_parameter`."""
    return described


def _sizes(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple):
        raise pickle.UnpicklingError('a shape that is none')
    return tuple(map(_size, values))


def _size(value: object) -> int:
    if type(value) is not int or value < 0:
        raise pickle.UnpicklingError('a size that is no whole number')
    return value


_KNOWN: dict[tuple[str, str], Any] = {
    ('torch._utils', '_rebuild_tensor_v2'): _tensor,
    ('torch._utils', '_rebuild_parameter'): _parameter,
    ('collections', 'OrderedDict'): OrderedDict,
    **{('torch', name): dtype for name, dtype in _DTYPES.items()},
}


# What torch.save writes a state dict with (pickle's protocol 2).
_OPCODES = (
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.REDUCE, pickle.BUILD),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.BINPERSID),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.LONG1, pickle.BINUNICODE, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
)


# Python's own: the one in C makes room for as many objects as the file says.
class _Reader(pickle._Unpickler):
    """Reads a pickle of a state dict; whatever else it names is refused, not looked up."""

    dispatch: ClassVar[dict[int, Any]] = {
        opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _OPCODES
    }

    stack: list[Any]

    def load_build(self) -> None:
        """Drop the attributes of a state dict (`_metadata`); nothing else has any to set."""
        self.stack.pop()
        if type(self.stack[-1]) is not OrderedDict:
            raise pickle.UnpicklingError('it sets attributes of something that is no state dict')

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(
                f'it names {module}.{name}, which is no part of a tensor of floats'
            )
        return _KNOWN[module, name]

    def persistent_load(self, identity: Any) -> _Storage:
        kind, dtype, key, _, count = identity
        if kind != 'storage' or dtype not in _DTYPES.values() or not isinstance(key, str):
            raise pickle.UnpicklingError('numbers of a kind that no layer has')
        return _Storage(dtype, key, _size(count))
