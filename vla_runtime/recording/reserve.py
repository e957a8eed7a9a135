"""Reserve disk space to close files on a full disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class Reserve:
    """Room beside a folder's files, held by a file without a name; a context that releases it.

    The system takes the room back when this process ends, however it ends.

    Args:
        folder: folder on the disk.
        size: bytes.
        purpose: purpose of the room, for the error.

    Raises:
        OSError: there is no such room; names the folder.
    """

    def __init__(self, folder: Path, size: int, purpose: str) -> None:
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open until released
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder)) from None
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as error:
            self.release()
            why = f'{error.strerror}; {size / 2**20:.0f} MiB must be free for {purpose}'
            raise OSError(error.errno, why, str(folder)) from None

    def release(self) -> None:
        """Give the room back; again does nothing."""
        self._file.close()

    def __enter__(self) -> Reserve:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
