"""Hashing a large file."""

from __future__ import annotations

import hashlib
import io
import sys

from vla_runtime.files import large_files


def test_without_a_terminal_a_large_file_is_hashed_without_a_progress_bar(tmp_path, monkeypatch):
    """A machine that only builds engines has no tqdm."""
    monkeypatch.setattr(large_files, '_PROGRESS_BYTES', 0)
    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    monkeypatch.setitem(sys.modules, 'tqdm', None)
    path = tmp_path / 'weights.data'
    path.write_bytes(b'weights')
    assert large_files.file_sha256(path) == hashlib.sha256(b'weights').hexdigest()
