"""A file system of its own that is soon full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size_kib: int) -> Iterator[Path]:
    """A tmpfs of so many KiB at a new folder; skips the test where none can be mounted."""
    folder.mkdir()
    options = f'size={size_kib}k'
    try:
        subprocess.run(
            ['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', str(folder)],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, 'stderr', '') or error
        pytest.skip(f'a full disk needs a file system of its own, as root: {said}')
    try:
        yield folder
    finally:
        # Lazily: a process that ends a moment later may still have a log open.
        subprocess.run(['umount', '--lazy', str(folder)], check=True)


def fill(disk: Path, leave_bytes: int = 0) -> Path:
    """Take what room there is; the file that does."""
    filler = disk / 'filler'
    room = os.statvfs(disk)
    with filler.open('ab') as file:
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize - leave_bytes)
    return filler
