"""Families in folders beside the packages' own, as a user adds them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vla_convert import readers
from vla_runtime import families

# Folder that the page names to the package that it is beside.
FOLDERS = {'vla_runtime/families/': families, 'vla_convert/readers/': readers}


@contextmanager
def beside(root: Path, name: str) -> Iterator[None]:
    """Let the packages find the files of a family in folders beside their own."""
    for folder, package in FOLDERS.items():
        package.__path__.append(str(root / folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for folder, package in FOLDERS.items():
            package.__path__.remove(str(root / folder))
            for module in [m for m in sys.modules if m.startswith(f'{package.__name__}.{name}')]:
                del sys.modules[module]
