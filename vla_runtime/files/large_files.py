"""Large files: hashing one, and a progress bar while one is read."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vla_runtime.files.input_files import regular_file

_BLOCK_BYTES = 1 << 22
_PROGRESS_BYTES = 1 << 28


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file in hex; a progress bar on a terminal when the file is large.

    Raises:
        UnreadableFileError: no regular file, nor a link to one.
        OSError: it is missing or may not be read.
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
