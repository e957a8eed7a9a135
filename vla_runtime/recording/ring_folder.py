"""Layout of a ring of bags on disk: numbered bags, beside a file that makes them one recording."""

from __future__ import annotations

import re
from pathlib import Path

_MARK = 'ring.yaml'
_TEXT = '# The folders beside this file are one recording, in the order of their numbers.\n'
_PART = re.compile(r'\d{6}')
_MOST_PARTS = 10**6


def make_ring(folder: Path) -> None:
    """Make the folder of a ring without bags.

    Raises:
        OSError: there is no room, or no permission.
    """
    folder.mkdir(parents=True)
    (folder / _MARK).write_text(_TEXT, encoding='utf-8')


def is_ring(folder: Path) -> bool:
    """Return whether the bags in a folder are one recording."""
    return (folder / _MARK).is_file()


def part_of(folder: Path, number: int) -> Path:
    """Return the folder of a ring's bag."""
    return folder / f'{number % _MOST_PARTS:06d}'


def parts_of(folder: Path) -> list[Path]:
    """Return the folders of a ring's bags, in order."""
    parts = (part for part in folder.iterdir() if part.is_dir() and _PART.fullmatch(part.name))
    return sorted(parts)
