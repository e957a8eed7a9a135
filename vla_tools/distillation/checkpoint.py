"""Read a training's checkpoint: whole, or an error that names the file and what mends it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vla_runtime.files.quotes import one_line


def read_checkpoint(
    path: Path, kinds: Mapping[str, type], device: torch.device | str
) -> dict[str, Any]:
    """Read a checkpoint's fields.

    Args:
        path: file that `torch.save` wrote.
        kinds: type of each field.
        device: device of the tensors.

    Raises:
        ValueError: the file is cut short or changed, or a field is missing or of another type.
        OSError: it cannot be read.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except OSError:
        raise
    # PyTorch raises errors of many kinds for a file that is cut short or changed.
    except Exception as error:
        raise _damaged(path, 'the file', error) from None
    if not isinstance(state, dict):
        raise _damaged(path, 'the file', 'is not a mapping')
    for name, kind in kinds.items():
        if not isinstance(state.get(name), kind):
            raise _damaged(path, name, f'expected a {kind.__name__}')
    return state


def load_parts(path: Path, state: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Load networks and optimisers from the fields of their names.

    Raises:
        ValueError: a field is of another network.
    """
    for name, part in parts.items():
        try:
            part.load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(path, name, error) from None


def _damaged(path: Path, field: str, what: object) -> ValueError:
    return ValueError(
        f'{path}: {field}: cannot be used: {one_line(str(what), 200)}; remove it to begin anew, or '
        'name another folder with --work'
    )
