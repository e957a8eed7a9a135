"""Names and shapes of networks, remembered in the user's cache folder.

To build a network, even an empty one, takes PyTorch, whose import alone takes seconds. What came of
it once is read from a file the next time: of the same family, dimensions and source code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from vla_runtime.families.family import PolicyDims
from vla_runtime.files.cache_folder import cache_folder
from vla_runtime.files.json_file import read_document
from vla_runtime.files.whole_files import write_text

Shapes = dict[str, tuple[int, ...]]


def remembered_shapes(path: Path) -> Shapes | None:
    """Read shapes back; None where there are none, or what is there cannot be read."""
    try:
        entries = read_document(path)
        return {name: tuple(map(int, shape)) for name, shape in entries.items()}
    except (ValueError, OverflowError, AttributeError, TypeError):
        return None


def remember_shapes(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write shapes where `remembered_shapes` finds them, if that can be written to."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(shapes))


def shapes_file(family: str, dims: PolicyDims, sources: Iterable[Path]) -> Path | None:
    """Name the file for a network's shapes; None for a user without a home, or unreadable code.

    Args:
        family, dims: of the network.
        sources: folders of the code that builds it. Another code has another file.
    """
    digest = hashlib.sha256(f'{family} {dims!r}\n'.encode())
    modules = [(folder, path) for folder in sources for path in sorted(folder.rglob('*.py'))]
    if not modules:
        # Compiled ones alone, or an archive: nobody would notice another code.
        return None
    try:
        for folder, path in modules:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f'{path.relative_to(folder).as_posix()} {content}\n'.encode())
        return cache_folder() / 'shapes' / f'{digest.hexdigest()}.json'
    except (OSError, ValueError):
        return None
