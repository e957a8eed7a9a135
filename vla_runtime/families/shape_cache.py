"""Shapes of networks, remembered in the user's cache folder.

To build a network, even an empty one, takes PyTorch, whose import takes seconds; to trace one
without numbers takes what PyTorch imports for it, seconds more. What came of it once is read from a
file the next time: of the same family, dimensions and source code. The bundle does not hold them,
because bundles that were written before must open as fast.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from vla_runtime.family.declaration import PolicyDims
from vla_runtime.family.listing import code_folders, find_family
from vla_runtime.files.atomic_write import write_text
from vla_runtime.files.cache_folder import cache_folder
from vla_runtime.files.json_file import read_document

Read = TypeVar('Read')

# Files kept, a few kB each: every change of a network's code leaves one that nobody reads again.
_MOST_KEPT = 64


def remembered(path: Path | None, read: Callable[[Any], Read]) -> Read | None:
    """Read shapes back; None where there are none, or what is there cannot be read.

    Args:
        path: JSON file, of `shapes_file`.
        read: makes the shapes from the file's content.
    """
    try:
        return read(dict(read_document(path))) if path else None
    except (ValueError, OverflowError, AttributeError, TypeError, KeyError):
        return None


def remember(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write shapes where `remembered` finds them, if that can be written to."""
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(content))
        _forget_oldest(path.parent)


def shapes_file(
    family: str, dims: PolicyDims, sources: Iterable[Path], state: str = ''
) -> Path | None:
    """Name the file for a network's shapes; None for a user without a home, or unreadable code.

    Args:
        family: the network's family.
        dims: the network's dimensions.
        sources: folders of the code that builds it. Another code has another file.
        state: whatever else the shapes depend on.
    """
    digest = hashlib.sha256(f'{family} {dims!r} {state}\n'.encode())
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


def _forget_oldest(folder: Path) -> None:
    """Delete all but the newest `_MOST_KEPT` files."""
    files = sorted(folder.glob('*.json'), key=lambda path: path.stat().st_mtime_ns)
    for path in files[:-_MOST_KEPT]:
        path.unlink(missing_ok=True)


Shapes = dict[str, tuple[int, ...]]


def weight_shapes(name: str, dims: PolicyDims) -> Shapes:
    """Return names and shapes of a network's tensors; allocates nothing.

    Imports PyTorch the first time only: they are remembered in the user's cache folder.

    Raises:
        ValueError: unknown family.
        ModuleNotFoundError: not remembered, and PyTorch is not installed.
    """
    find_family(name)
    path = shapes_file(name, dims, code_folders())
    shapes = remembered(path, _shapes_of)
    if shapes is None:
        from vla_runtime.families.flow_network import empty_network

        state = empty_network(name, dims).state_dict()
        shapes = {tensor: tuple(value.shape) for tensor, value in state.items()}
        remember(path, shapes)
    return shapes


def _shapes_of(content: dict[str, Any]) -> Shapes:
    return {name: tuple(map(int, shape)) for name, shape in content.items()}
