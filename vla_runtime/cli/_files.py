"""Files on the command line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from vla_runtime.bundle.folder import why_not_in
from vla_runtime.bundle.schema import SPEC_FILE
from vla_runtime.files.atomic_write import STANDARD_OUTPUT, is_stream
from vla_runtime.files.package_files import share_folder

# Files of recordings, which no result replaces.
_RECORDED = ('.mcap', '.db3')


def output_file(text: str) -> Path:
    """Argparse `type`: a writable file, checked before any work is done.

    `-` is standard output. Nothing is made; argparse names the option.
    """
    if text == '-':
        return STANDARD_OUTPUT
    path = Path(text)
    if not text:
        raise argparse.ArgumentTypeError('expected the name of a file')
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"'{path}' is a folder; name a file in it")
    if is_stream(path):
        return path
    # The link stays, and the file that it leads to is written: aside, in its folder.
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    if path.suffix in _RECORDED or (path.parent / 'metadata.yaml').is_file():
        raise argparse.ArgumentTypeError(f"'{path}' is part of a recording; name another file")
    if why := why_not_in(path.parent):
        raise argparse.ArgumentTypeError(f"'{path}' {why}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"'{path}' cannot be written: there is no folder '{path.parent}'"
        )
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"'{path}' cannot be written: permission denied for '{path.parent}'"
        )
    return path


def output_folder(text: str) -> Path:
    """Argparse `type`: a folder for results, outside of every policy bundle. Nothing is made."""
    path = Path(text)
    if not text:
        raise argparse.ArgumentTypeError('expected the name of a folder')
    if why := why_not_in(path):
        raise argparse.ArgumentTypeError(f"'{path}' {why}")
    return path


def make_folder(path: Path, option: str) -> None:
    """Make a folder for results; ValueError names the option. An existing one is kept."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f'{option} {path}: is no folder that can be made: {error.strerror}'
        ) from None


def bundle_folder(named: Path | None, shipped: str = 'demo') -> Path:
    """Return the bundle folder that `--bundle` names; without it that of a shipped bundle.

    Raises:
        ValueError: none was named, and the shipped one is not there.
        FileNotFoundError: none was named, and the package is not installed.
    """
    if named is not None:
        return named.parent if named.name == SPEC_FILE else named
    folder = share_folder() / 'engines' / shipped
    if not (folder / SPEC_FILE).is_file():
        raise ValueError(
            f'{folder}: is not there; name a policy bundle with --bundle, or train it: vla_runtime '
            f'train-demo --out {folder}'
        )
    return folder
