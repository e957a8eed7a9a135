"""The policy bundle on disk: read and check (`writer.py` writes).

A bundle is a folder: `policy.yaml`, `weights.safetensors`, `statistics.safetensors`, a tokenizer,
and further files (`onnx/`, `verification.json`) as they are made. Invariants:
- every file but policy.yaml and `engines/` is listed in policy.yaml with its SHA-256; any other
  file is an error, but for those that moving a bundle leaves beside them (`_LEFT`);
- the folder and its files may be links, which are followed when a file is opened, because the
  SHA-256 proves the content;
- policy.yaml is written last, and a bundle appears under its name complete or not at all;
- nothing in a bundle is ever unpickled or executed.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_runtime.bundle.rules import parse_spec
from vla_runtime.bundle.schema import (
    ENGINES_FOLDER,
    SPEC_FILE,
    STATISTICS_FILE,
    WEIGHTS_FILE,
    BundleSpec,
)
from vla_runtime.bundle.statistics import check_statistics
from vla_runtime.bundle.tensors import TensorsError, read_arrays, read_header
from vla_runtime.family.listing import find_family
from vla_runtime.files.atomic_write import file_sha256
from vla_runtime.files.checkpoint_folders import checkpoint_below, download_hint, has_tensors
from vla_runtime.files.field_error import FieldError
from vla_runtime.files.input_files import (
    UnreadableFileError,
    near_path,
    read_text,
    regular_file,
)
from vla_runtime.files.typed_yaml import LARGEST_FILE

# What moving a bundle leaves beside its files, and who does. A trailing slash: all that is below.
_LEFT = {
    '.gitattributes': 'every repository of a Hub has one',
    'README.md': "a Hub's model card",
    '.cache/huggingface/': '`hf download --local-dir` notes there what it has fetched',
}
# The macOS Finder leaves one in every folder that it shows.
_LEFT_ANYWHERE = '.DS_Store'
_ANEW = 'export the bundle again or copy it anew'


class BundleError(ValueError):
    """A bundle that cannot be used; the message names file and field."""


@dataclass(frozen=True)
class Bundle:
    """A checked bundle.

    `statistics` has `state.mean`, `actions.q01` and so on, float arrays of a number a dimension.
    """

    folder: Path
    spec: BundleSpec
    statistics: Mapping[str, np.ndarray]

    @property
    def weights_path(self) -> Path:
        return self.folder / WEIGHTS_FILE

    @property
    def tokenizer_path(self) -> Path:
        """File of the tokenizer; only for a policy with language."""
        assert self.spec.tokenizer is not None
        return self.folder / self.spec.tokenizer

    @property
    def engines_folder(self) -> Path:
        return self.folder / ENGINES_FOLDER


def why_not_in(folder: Path) -> str:
    """Return why nothing may be written into a folder that is or lies in a bundle; '' elsewhere.

    The folder need not exist. A `policy.yaml` without statistics is a file of ROS parameters.
    """
    whole = Path(os.path.realpath(folder))
    for place in (whole, *whole.parents):
        if (place / SPEC_FILE).is_file() and (place / STATISTICS_FILE).is_file():
            return (
                f'lies in the policy bundle {place}, which may hold nothing that its {SPEC_FILE} '
                'does not list; name another place'
            )
    return ''


def read_bundle(folder: str | Path, *, verify: bool = True) -> Bundle:
    """Read and check a bundle, given its folder or its policy.yaml.

    Args:
        verify: compare every file with its SHA-256 (about a second a gigabyte). Without it the
            files' names, the spec and the statistics are still checked.

    Raises:
        BundleError: the first thing that is wrong, with file and field.
    """
    folder = Path(folder)
    if folder.name == SPEC_FILE and os.path.lexists(folder) and not folder.is_dir():
        folder = folder.parent
    spec = _read_spec(folder)
    spec_path = folder / SPEC_FILE
    for name in needed_files(spec):
        if name not in spec.files:
            raise BundleError(f"{spec_path}: field files: '{name}' is missing")
    present = files_in(folder, spec.files)
    for name in spec.files:
        if name not in present:
            raise BundleError(f'{folder / name}: is missing, but {SPEC_FILE} lists it under files')
        check_regular(folder / name)
    for name in present:
        if name not in spec.files:
            raise BundleError(
                f'{folder / name}: is not listed in {SPEC_FILE} under files; remove it, or export '
                f'the bundle again{_why_unlisted(folder / name)}'
            )
    # Headers first: a truncated file is reported before gigabytes are hashed.
    check_weights(folder / WEIGHTS_FILE)
    bundle = Bundle(folder, spec, read_statistics(folder, spec))
    if verify:
        verify_files(bundle)
    return bundle


def needed_files(spec: BundleSpec) -> tuple[str, ...]:
    tokenizer = () if spec.tokenizer is None else (spec.tokenizer,)
    return (WEIGHTS_FILE, STATISTICS_FILE, *tokenizer, *find_family(spec.family).files)


def verify_files(bundle: Bundle) -> None:
    """Compare every file with its SHA-256 (1 s a gigabyte); BundleError names one that changed."""
    for name, expected in bundle.spec.files.items():
        verify_file(bundle.folder / name, expected)


def _read_spec(folder: Path) -> BundleSpec:
    path = folder / SPEC_FILE
    try:
        text = read_text(path, LARGEST_FILE)
    except FileNotFoundError:
        own = (folder / 'config.json').is_file() or has_tensors(folder)
        checkpoint = folder if own else checkpoint_below(folder)
        if checkpoint is not None:
            what = 'this' if own else str(checkpoint)
            raise BundleError(
                f'{path}: is missing; {what} looks like a checkpoint: make a policy bundle '
                f'of it first: vla_runtime export {checkpoint} --out BUNDLE'
            ) from None
        if folder.is_dir():
            raise BundleError(f'{path}: is missing; is this folder a policy bundle?') from None
        raise BundleError(
            f'{folder}: no such folder; expected a policy bundle'
            f'{near_path(folder, Path.is_dir) or download_hint(folder)}'
        ) from None
    except NotADirectoryError:
        file = next((path for path in (folder, *folder.parents) if path.exists()), folder)
        raise BundleError(
            f'{file}: is a file; expected a policy bundle, the folder that holds {SPEC_FILE}'
        ) from None
    except UnreadableFileError as error:
        raise BundleError(f'{path}: {error}') from None
    except (OSError, ValueError) as error:
        raise BundleError(f'{path}: cannot be read: {error}') from None
    try:
        return parse_spec(text)
    except FieldError as error:
        raise BundleError(f'{path}: {error}') from None


def files_in(folder: Path, listed: Container[str]) -> list[str]:
    """Relative names of all files, dotfiles too, without policy.yaml and the engines folder.

    Of those that are not `listed`, what moving a bundle leaves is left out.
    """
    names = []
    for path in sorted(folder.rglob('*')):
        name = path.relative_to(folder).as_posix()
        if name == SPEC_FILE or name.split('/')[0] == ENGINES_FOLDER:
            continue
        # A linked folder is not walked into (it may form a loop): it counts as one unlisted
        # file.
        is_file = path.is_symlink() or not path.is_dir()
        if is_file and (name in listed or not _is_left(name)):
            names.append(name)
    return names


def _is_left(name: str) -> bool:
    below = any(name.startswith(left) for left in _LEFT if left.endswith('/'))
    return below or name in _LEFT or name.rpartition('/')[2] == _LEFT_ANYWHERE


def check_regular(path: Path) -> None:
    try:
        regular_file(path)
    except UnreadableFileError as error:
        raise BundleError(f'{path}: {error}') from None
    except OSError as error:
        raise BundleError(f'{path}: cannot be read: {error}') from None


def _why_unlisted(path: Path) -> str:
    if not (path.is_symlink() and path.is_dir()):
        return ''
    return ' (it is a link to a folder; of links only those to files are followed)'


def verify_file(path: Path, expected: str) -> None:
    try:
        found = file_sha256(path)
    except UnreadableFileError as error:
        raise BundleError(f'{path}: {error}') from None
    except OSError as error:
        raise BundleError(f'{path}: cannot be read: {error}') from None
    if found != expected:
        raise BundleError(
            f'{path}: has changed: its SHA-256 is {found[:12]}… but {SPEC_FILE} says '
            f'{expected[:12]}…; {_ANEW}'
        )


def check_weights(path: Path) -> None:
    """Check the header only, names, shapes and dtypes: a truncated file fails here too."""
    try:
        tensors = read_header(path)
    except TensorsError as error:
        raise BundleError(f'{error}; {_ANEW}') from None
    if not tensors:
        raise BundleError(f'{path}: holds no tensors')


def read_statistics(folder: Path, spec: BundleSpec) -> dict[str, np.ndarray]:
    path = folder / STATISTICS_FILE
    try:
        statistics = read_arrays(path)
    except TensorsError as error:
        raise BundleError(f'{error}; {_ANEW}') from None
    try:
        check_statistics(spec, statistics)
    except FieldError as error:
        raise BundleError(f'{path}: {error}') from None
    return statistics
