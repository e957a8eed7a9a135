"""Folder for files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for files that can be made again; not created (ValueError: no home)."""
    chosen = Path(os.environ.get('XDG_CACHE_HOME', ''))
    # As its specification says: what is not absolute counts for nothing.
    if chosen.is_absolute():
        return chosen / 'vla_runtime'
    try:
        return Path.home() / '.cache' / 'vla_runtime'
    except RuntimeError:
        raise ValueError(
            'there is no home folder to keep made files in; name another one with XDG_CACHE_HOME'
        ) from None
