"""Files on the command line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def output_file(text: str) -> Path:
    """An argument's `type`: a file that can be written, so that no work is done in vain.

    Nothing is made; argparse names the option.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"'{path}' is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"'{path}' cannot be written: there is no folder '{path.parent}'"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"'{path}' cannot be written: permission denied")
    return path


def make_folder(path: Path, option: str) -> None:
    """Make a folder that results go to, with those above it, or find it there.

    Raises:
        ValueError: it cannot be made; names the option.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f'{option} {path}: is no folder that can be made: {error.strerror}'
        ) from None
