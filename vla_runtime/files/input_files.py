"""Files from elsewhere: only regular ones are opened, and texts are read up to a size.

A path may be a link, as in a Hugging Face cache; links are followed once, when the file is opened.
A FIFO would be waited for without end, and a device may have no end.
"""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Callable
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, 'a folder'),
    (stat.S_ISFIFO, 'a FIFO (named pipe)'),
    (stat.S_ISCHR, 'a device'),
    (stat.S_ISBLK, 'a device'),
    (stat.S_ISSOCK, 'a socket'),
)


# First bytes of what Git leaves in place of a large file where its LFS is not installed.
_GIT_LFS = b'version https://git-lfs.github.com/spec/'
# For a file whose end, or all of it, is lost.
DOWNLOAD_AGAIN = 'a download or a copy was cut off; get the file again'


class UnreadableFileError(ValueError):
    """A file that is not read; the message is the reason, without the path."""


def near_path(path: Path, accepts: Callable[[Path], bool]) -> str:
    """Return a hint at the nearest name beside a path that is not there; '' without one.

    The suffix of `path` may have been left out; `accepts` tells what is of the kind that was meant.
    """
    try:
        # By their stems: the suffix, which is alike, may be missing too.
        known = {one.stem: one for one in sorted(path.parent.iterdir()) if accepts(one)}
    except OSError:
        return ''
    close = difflib.get_close_matches(path.stem, known, n=1)
    return f"; did you mean '{known[close[0]]}'?" if close else ''


def regular_file(path: str | Path) -> Path:
    """Follow the links of a path to a regular file, absolute and free of links.

    Raises:
        FileNotFoundError: there is nothing.
        UnreadableFileError: a folder, FIFO, device or socket; a link to one, or to nothing; a
            pointer of Git LFS.
        OSError: it may not be looked at.
    """
    path = Path(path)
    link = f'is a link to {os.readlink(path)}, which ' if path.is_symlink() else ''
    try:
        mode = path.stat().st_mode
        target = path.resolve(strict=True)
    except (FileNotFoundError, NotADirectoryError):
        if not link:
            raise
        raise UnreadableFileError(f'{link}is not there') from None
    except (OSError, RuntimeError) as error:
        if not link:
            raise
        reason = getattr(error, 'strerror', None) or error
        raise UnreadableFileError(f'{link}cannot be followed ({reason})') from None
    if not stat.S_ISREG(mode):
        kind = next((name for check, name in _KINDS if check(mode)), 'no file')
        raise UnreadableFileError(f'{link}is {kind}; expected a regular file')
    with target.open('rb') as file:
        if file.read(len(_GIT_LFS)) == _GIT_LFS:
            raise UnreadableFileError(
                "is Git LFS's pointer to a file, not the file: run 'git lfs pull' in its folder, "
                "or download the folder with 'hf download'"
            )
    return target


def whole_file(path: str | Path) -> Path:
    """Follow the links of a path to a regular file; errors as there, and for an empty file too."""
    target = regular_file(path)
    if not target.stat().st_size:
        raise UnreadableFileError(f'is empty: {DOWNLOAD_AGAIN}')
    return target


def read_text(path: str | Path, most_bytes: int) -> str:
    """Read a regular file of UTF-8 text.

    Raises:
        FileNotFoundError: there is nothing.
        UnreadableFileError: no regular file, larger than `most_bytes`, or not UTF-8.
        OSError: it may not be read.
    """
    with regular_file(path).open('rb') as file:
        # Files of /proc have no size that could be asked for.
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise UnreadableFileError(f'is larger than {most_bytes:,} bytes; is it the right file?')
    try:
        return data.decode('utf-8')
    except UnicodeDecodeError as error:
        raise UnreadableFileError(f'is not UTF-8 text (byte {error.start})') from None
