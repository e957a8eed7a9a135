"""Folders that appear under their name complete, or leave what was there as it was."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_folder(path: Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """Give a folder beside `path` that takes its place when the block ends without an error.

    What a command that was killed left there is removed.

    Args:
        check: raises what forbids the filled folder to take its place, or to replace what has come
            there in the meantime.

    Raises:
        OSError: the disk is full or the folder cannot be written to; nothing is left behind, and
            what was there before is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear(path)
    # Beside the folder, so that the last step is a rename within one file system.
    work = Path(tempfile.mkdtemp(prefix=f'.{path.name}.', suffix='.part', dir=path.parent))
    lock = _locked(work)
    folder = work / path.name
    try:
        folder.mkdir()
        yield folder
        check(folder)
        if path.exists():
            path.rename(work / 'replaced')
        try:
            folder.rename(path)
        except OSError:
            if (work / 'replaced').exists():
                (work / 'replaced').rename(path)
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _clear(path: Path) -> None:
    """Remove what was left beside a folder by commands that were killed."""
    name = re.compile(rf'\.{re.escape(path.name)}\.\w{{8}}\.part')
    for left in path.parent.iterdir():
        if name.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
            # Whoever still writes holds the lock; it goes with its process, however that ends.
            lock = _locked(left)
            if lock is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock a folder; return its descriptor, or None where another process has it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            os.close(descriptor)
    return None
