"""Files that appear under their name complete, or leave what was there as it was."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from vla_runtime.files.input_files import regular_file

# --------------------------------------------------------------------------------------------------
# Folders that appear under their name complete, or leave what was there as it was.


@contextmanager
def whole_folder(path: Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """Give a folder beside `path` that takes its place when the block ends without an error.

    What a command that was killed left there is removed. `check` raises what forbids the filled
    folder to take its place.

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


# --------------------------------------------------------------------------------------------------
# Large files: hashing one, and a progress bar while one is read.

_BLOCK_BYTES = 1 << 22
_PROGRESS_BYTES = 1 << 28


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a regular file in hex, with a progress bar for large ones.

    Errors are those of `regular_file`.
    """
    path, target = Path(path), regular_file(path)
    size = target.stat().st_size
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with target.open('rb', buffering=0) as file, progress(f'hash {path.name}', size) as advance:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            advance(count)
    return digest.hexdigest()


@contextmanager
def progress(task: str, size: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar for a large file on a terminal; yield the function that counts bytes."""
    # Silent where the output is not a terminal, such as under launch; tqdm need not be there then.
    if size < _PROGRESS_BYTES or not (sys.stderr and sys.stderr.isatty()):
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(total=size, unit='B', unit_scale=True, desc=task) as bar:
        yield bar.update


# --------------------------------------------------------------------------------------------------

# A full disk, a used up quota, and a file as large as its file system or limit allows.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
STANDARD_OUTPUT = Path('/dev/stdout')
# They lead to whatever this process writes to, which may be a file.
_STREAMS = (str(STANDARD_OUTPUT), '/dev/stderr', '/dev/fd/', '/proc/')


class WriteError(OSError):
    """A file could not be written; `filename` is the one that was wanted."""

    def __init__(self, path: Path, cause: OSError) -> None:
        super().__init__(cause.errno, cause.strerror or str(cause), str(path))
        self._kept = '; what was there is kept' if path.is_file() else ''

    def __reduce__(self) -> tuple[Any, ...]:
        return WriteError, (Path(self.filename), OSError(self.errno, self.strerror))

    def __str__(self) -> str:
        return f'{self.filename}: cannot be written: {self.strerror}{self._kept}'


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file beside `path` that takes its place when the block ends without an error.

    A symbolic link is replaced, not its target. A device, a pipe or a stream of this process
    (/dev/stdout) is written to itself.

    Raises:
        WriteError: the disk is full or the folder cannot be written to; nothing is left behind.
    """
    path = Path(path)
    try:
        if is_stream(path):
            with path.open('wb') as file:
                yield file
            return
        aside = path.with_name(f'.{path.name}.{os.getpid()}.part')
        try:
            with aside.open('wb') as file:
                yield file
                file.flush()
                # Some file systems find out only here that there is no room.
                os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise
    except OSError as error:
        raise WriteError(path, error) from None


def is_stream(path: Path) -> bool:
    """Return whether a path is written to directly: nothing can be renamed to its place."""
    return os.path.abspath(path).startswith(_STREAMS) or (
        path.exists() and not path.is_file() and not path.is_dir()
    )


def write_bytes(path: str | Path, data: bytes | memoryview) -> None:
    """Write a file; see `atomic_write`."""
    with atomic_write(path) as file:
        file.write(data)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file; see `atomic_write`."""
    write_bytes(path, text.encode())
