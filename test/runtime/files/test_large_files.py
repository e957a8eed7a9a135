"""Hashing a large file."""

from __future__ import annotations

import hashlib
import io
import sys

from vla_runtime.files import atomic_write


def test_without_a_terminal_a_large_file_is_hashed_without_a_progress_bar(tmp_path, monkeypatch):
    """A machine that only builds engines has no tqdm."""
    monkeypatch.setattr(atomic_write, '_PROGRESS_BYTES', 0)
    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    monkeypatch.setitem(sys.modules, 'tqdm', None)
    path = tmp_path / 'weights.data'
    path.write_bytes(b'weights')
    assert atomic_write.file_sha256(path) == hashlib.sha256(b'weights').hexdigest()
