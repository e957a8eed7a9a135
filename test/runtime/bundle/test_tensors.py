"""Safetensors files that are larger than any policy's are refused before they are read."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from vla_runtime.bundle.tensors import TensorsError, read_arrays, read_header
from vla_runtime.files.safetensors_reader import SafetensorsReader


def sparse(path: Path, header: bytes, size: int, length: int | None = None) -> Path:
    """A file of this size that takes no room on the disk."""
    with path.open('wb') as file:
        file.write(struct.pack('<Q', len(header) if length is None else length) + header)
        file.truncate(size)
    return path


def test_statistics_of_a_gigabyte_are_refused_unread(tmp_path: Path):
    size = 1 << 30
    header = b'{"a":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}'
    header %= (size // 4, size)
    path = sparse(tmp_path / 'statistics.safetensors', header, 8 + len(header) + size)
    with pytest.raises(TensorsError, match=r'statistics\.safetensors'):
        read_arrays(path)


@pytest.mark.parametrize('read', [read_header, read_arrays, SafetensorsReader])
def test_a_header_of_many_megabytes_is_refused_unread(tmp_path: Path, read):
    path = sparse(tmp_path / 'weights.safetensors', b'', (1 << 30) + 8, length=1 << 29)
    with pytest.raises(ValueError, match='header'):
        read(path)


@pytest.mark.parametrize('read', [read_header, read_arrays, SafetensorsReader])
@pytest.mark.parametrize(
    'header',
    [
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}',
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
        b'"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
        b'[]',
        b'{"a"',
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused_by_all_that_read_it(
    tmp_path: Path, read, header: bytes
):
    path = sparse(tmp_path / 'weights.safetensors', header, 8 + len(header) + 16)
    with pytest.raises(ValueError, match=r'weights\.safetensors'):
        read(path)
