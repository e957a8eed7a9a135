"""Files that appear under their name complete, or leave what was there as it was."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

# A full disk, a used up quota, and a file as large as its file system or limit allows.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
STANDARD_OUTPUT = Path('/dev/stdout')
# They lead to whatever this process writes to, which may be a file.
_STREAMS = (str(STANDARD_OUTPUT), '/dev/stderr', '/dev/fd/', '/proc/')


class WriteError(OSError):
    """A file could not be written; `filename` is the one that was wanted.

    Args:
        cause: words of the system.
    """

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

    A symbolic link is replaced, not what it leads to. A device, a pipe or a stream of this process
    (/dev/stdout) is written to itself.

    Raises:
        WriteError: the disk is full or the folder cannot be written to, for example; nothing is
            left behind, and what was there before is as it was.
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
