"""Finds the reference cases that the tests marked `cases` run (see test/cases/README.md)."""

from __future__ import annotations

import os
from pathlib import Path

SHIPPED = Path(__file__).parent / 'cases'


def shipped(name: str) -> Path:
    """The description of one of the copies beside this file, whatever VLA_RUNTIME_CASES says.

    For tests of a folder's settings, which are written for its groups and sizes.
    """
    return SHIPPED / f'{name}.json'


def cases_folder() -> Path:
    """The folder in VLA_RUNTIME_CASES, or the copy beside this file."""
    chosen = os.environ.get('VLA_RUNTIME_CASES')
    folder = Path(chosen) if chosen else SHIPPED
    if not folder.is_dir():
        raise FileNotFoundError(f'VLA_RUNTIME_CASES: no folder at {folder}')
    return folder


def find(pattern: str) -> list[Path]:
    """All files directly in the cases folder that match, sorted by name.

    May be none: a folder need not hold every form of case, and pytest reports a test over an empty
    list as skipped.
    """
    return sorted(cases_folder().glob(pattern))
