"""The policy bundle on disk: read, check, write.

A bundle is a folder: `policy.yaml`, `weights.safetensors`, `statistics.safetensors`, a tokenizer,
and further files (`onnx/`, `verification.json`) as they are made. Invariants:
- every file but policy.yaml and `engines/` is listed in policy.yaml with its SHA-256; any other
  file, dotfiles included, is an error;
- the folder and each of its files may be a link, as in a Hugging Face cache; links are followed
  when a file is opened, wherever they lead, because the SHA-256 vouches for the content;
- policy.yaml is written last, and a bundle appears under its name complete or not at all;
- nothing in a bundle is ever unpickled or executed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vla_runtime.bundle.rules import check_spec, dump_spec, parse_spec
from vla_runtime.bundle.schema import (
    ENGINES_FOLDER,
    SPEC_FILE,
    STATISTICS_FILE,
    VERIFICATION_FILE,
    WEIGHT_BYTES,
    WEIGHTS_FILE,
    ActionSpec,
    BundleSpec,
    CameraSpec,
    ImageSpec,
    NormalisationSpec,
    PoseSpec,
    PromptSpec,
    StateSpec,
    Unit,
)
from vla_runtime.bundle.statistics import check_statistics
from vla_runtime.files.hub_id import download_hint
from vla_runtime.files.input_files import UnreadableFileError, read_text, regular_file
from vla_runtime.files.large_files import file_sha256
from vla_runtime.files.quotes import one_line, quoted
from vla_runtime.files.typed_yaml import LARGEST_FILE, FieldError
from vla_runtime.files.whole_files import NO_ROOM, write_text

__all__ = [
    'ENGINES_FOLDER',
    'SPEC_FILE',
    'STATISTICS_FILE',
    'VERIFICATION_FILE',
    'WEIGHTS_FILE',
    'ActionSpec',
    'Bundle',
    'BundleError',
    'BundleSpec',
    'CameraSpec',
    'ImageSpec',
    'NormalisationSpec',
    'PoseSpec',
    'PromptSpec',
    'StateSpec',
    'Unit',
    'check_target',
    'new_bundle',
    'read_bundle',
    'seal',
    'verify_files',
    'write_bundle',
    'write_statistics',
]


class BundleError(ValueError):
    """A bundle that cannot be used; the message names file and field."""


@dataclass(frozen=True)
class Bundle:
    """A checked bundle.

    Attributes:
        folder: path of the bundle.
        spec: contents of policy.yaml.
        statistics: `state.mean`, `actions.q01` and so on to float arrays, one number a dimension.
    """

    folder: Path
    spec: BundleSpec
    statistics: Mapping[str, np.ndarray]

    @property
    def weights_path(self) -> Path:
        return self.folder / WEIGHTS_FILE

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / self.spec.tokenizer

    @property
    def engines_folder(self) -> Path:
        return self.folder / ENGINES_FOLDER


def read_bundle(folder: str | Path, *, verify: bool = True) -> Bundle:
    """Read and check a bundle.

    Args:
        folder: the bundle, or its policy.yaml.
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
    for name in (WEIGHTS_FILE, STATISTICS_FILE, spec.tokenizer):
        if name not in spec.files:
            raise BundleError(f"{spec_path}: field files: '{name}' is missing")
    present = _files_in(folder)
    for name in spec.files:
        if name not in present:
            raise BundleError(f'{folder / name}: is missing, but {SPEC_FILE} lists it under files')
        _check_regular(folder / name)
    for name in present:
        if name not in spec.files:
            raise BundleError(
                f'{folder / name}: is not listed in {SPEC_FILE} under files; remove it, or export '
                f'the bundle again{_why_unlisted(folder / name)}'
            )
    # Headers first: a truncated file is reported before gigabytes are hashed.
    _check_weights(folder / WEIGHTS_FILE)
    bundle = Bundle(folder, spec, _read_statistics(folder, spec))
    if verify:
        verify_files(bundle)
    return bundle


def verify_files(bundle: Bundle) -> None:
    """Compare every file with its SHA-256 (about a second a gigabyte).

    Raises:
        BundleError: the first one that has changed.
    """
    for name, expected in bundle.spec.files.items():
        _verify_file(bundle.folder / name, expected)


def check_target(target: str | Path, force: bool) -> None:
    """Check that a bundle can be made at a path, without making anything.

    Args:
        target: path of the new bundle.
        force: an existing bundle may be replaced.

    Raises:
        BundleError: the target exists, or no folder can be made there.
    """
    target = Path(target)
    if target.name in ('', '..'):
        raise BundleError(f"'{target}' has no name of its own; name the folder to make")
    parent = target.parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise BundleError(f'{target}: cannot be made, because {parent} is a file')
    if not os.access(parent, os.W_OK | os.X_OK):
        raise BundleError(f'{target}: cannot be made, because {parent} may not be written to')
    if not target.exists() and not target.is_symlink():
        return
    if not force:
        raise BundleError(f'{target}: exists already; choose another name or use --force')
    if not (target / SPEC_FILE).is_file():
        raise BundleError(
            f'{target}: exists and is not a policy bundle (it has no {SPEC_FILE}), so --force does '
            'not replace it; remove it yourself'
        )


@contextmanager
def new_bundle(target: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a folder to fill with a new bundle; it is renamed to the target if the block succeeds.

    An exception inside the block removes what was written and leaves the target as it was.

    Args:
        target: path of the new bundle.
        force: replace an existing bundle. Any other folder is never replaced.

    Raises:
        BundleError: the target exists, or the filled folder is not a sealed bundle.
    """
    target = Path(target)
    check_target(target, force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename within one file system.
        work = Path(tempfile.mkdtemp(prefix=f'.{target.name}.', dir=target.parent))
    except OSError as error:
        raise BundleError(f'{target}: cannot be made: {error.strerror}') from None
    folder = work / target.name
    try:
        folder.mkdir()
        yield folder
        # The files were hashed a moment ago, by `seal`.
        read_bundle(folder, verify=False)
        check_target(target, force)
        if target.exists():
            target.rename(work / 'replaced')
        try:
            folder.rename(target)
        except OSError:
            if (work / 'replaced').exists():
                (work / 'replaced').rename(target)
            raise
    except BundleError as error:
        # Name the target, not the temporary folder.
        raise BundleError(str(error).replace(str(folder), str(target))) from None
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        kept = '; the bundle that was there is kept' if target.exists() else ''
        raise BundleError(f'{target}: cannot be written: {error.strerror}{kept}') from None
    finally:
        shutil.rmtree(work)


def seal(folder: str | Path, spec: BundleSpec) -> BundleSpec:
    """Hash the folder's files and write policy.yaml, which makes the folder a bundle.

    Files that `spec.files` already lists must still have their SHA-256: sealing adds files, such
    as `verification.json`, but never accepts a changed one. Drop an entry from `spec.files` to
    replace its file knowingly.

    Returns:
        The spec with all files listed, as written.

    Raises:
        BundleError: a spec that is not valid, a listed file that is missing or changed.
    """
    folder = Path(folder)
    try:
        check_spec(spec)
    except FieldError as error:
        raise BundleError(f'{folder / SPEC_FILE}: {error}') from None
    present = _files_in(folder)
    files = {}
    for name in sorted({*present, *spec.files, WEIGHTS_FILE, STATISTICS_FILE, spec.tokenizer}):
        if name not in present:
            raise BundleError(f'{folder / name}: is missing; a bundle needs it')
        if name in spec.files:
            _verify_file(folder / name, spec.files[name])
            files[name] = spec.files[name]
        else:
            _check_regular(folder / name)
            files[name] = file_sha256(folder / name)
    sealed = replace(spec, files=files)
    _check_weights(folder / WEIGHTS_FILE)
    _read_statistics(folder, sealed)
    text = dump_spec(sealed)
    try:
        check_spec(sealed)
    except FieldError as error:
        raise BundleError(f'{folder / SPEC_FILE}: {error}') from None
    write_text(folder / SPEC_FILE, text)
    return sealed


def write_statistics(folder: str | Path, statistics: Mapping[str, np.ndarray]) -> None:
    """Write statistics.safetensors; keys and shapes are checked when the folder is sealed."""
    _write_arrays(Path(folder) / STATISTICS_FILE, statistics)


def write_bundle(
    target: str | Path,
    spec: BundleSpec,
    *,
    weights: Mapping[str, np.ndarray],
    statistics: Mapping[str, np.ndarray],
    tokenizer: str | Path,
    force: bool = False,
) -> Bundle:
    """Write a whole bundle from arrays in memory.

    Weights in bfloat16 are unknown to numpy: write those with safetensors.torch inside a
    `new_bundle` block, as the export does.

    Args:
        target: path of the new bundle.
        spec: its `files` are filled in here; its `tokenizer` names the copied file.
        weights: our tensor names to arrays.
        statistics: as in `Bundle`.
        tokenizer: the file to copy.
        force: replace an existing bundle.

    Raises:
        BundleError: the target exists, or the arguments do not make a valid bundle.
    """
    with new_bundle(target, force=force) as folder:
        _write_arrays(folder / WEIGHTS_FILE, weights)
        write_statistics(folder, statistics)
        shutil.copyfile(tokenizer, folder / spec.tokenizer)
        seal(folder, replace(spec, files={}))
    return read_bundle(target, verify=False)


def _read_spec(folder: Path) -> BundleSpec:
    path = folder / SPEC_FILE
    try:
        text = read_text(path, LARGEST_FILE)
    except FileNotFoundError:
        if (folder / 'config.json').is_file() or any(folder.glob('model.safetensors*')):
            raise BundleError(
                f'{path}: is missing; this looks like a checkpoint, of which a policy bundle is '
                f'made first: vla_runtime export {folder} --out BUNDLE'
            ) from None
        if folder.is_dir():
            raise BundleError(f'{path}: is missing; is this folder a policy bundle?') from None
        raise BundleError(
            f'{folder}: no such folder; expected a policy bundle{download_hint(folder)}'
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


def _files_in(folder: Path) -> list[str]:
    """Relative names of all files, dotfiles too, without policy.yaml and the engines folder."""
    names = []
    for path in sorted(folder.rglob('*')):
        name = path.relative_to(folder).as_posix()
        if name == SPEC_FILE or name.split('/')[0] == ENGINES_FOLDER:
            continue
        # A linked folder is not walked into (it may form a loop): it counts as one unlisted
        # file.
        if path.is_symlink() or not path.is_dir():
            names.append(name)
    return names


def _said(error: Exception) -> str:
    """A library's error message on one line; it may quote any part of the file."""
    return one_line(str(error), 300)


def _check_regular(path: Path) -> None:
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


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    # Not `save_file`: its files are readable by their owner only, whatever the umask.
    path.write_bytes(save({key: np.ascontiguousarray(value) for key, value in arrays.items()}))


def _verify_file(path: Path, expected: str) -> None:
    try:
        found = file_sha256(path)
    except UnreadableFileError as error:
        raise BundleError(f'{path}: {error}') from None
    except OSError as error:
        raise BundleError(f'{path}: cannot be read: {error}') from None
    if found != expected:
        raise BundleError(
            f'{path}: has changed: its SHA-256 is {found[:12]}… but {SPEC_FILE} says '
            f'{expected[:12]}…; export the bundle again or copy it anew'
        )


def _check_weights(path: Path) -> None:
    """Check the header only: a truncated file fails here even when nothing is hashed.

    A tensor of another dtype would be converted, and the policy would not act as trained.
    """
    try:
        with safe_open(str(path), framework='np') as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BundleError(f'{path}: is not a whole safetensors file: {_said(error)}') from None
    if not kinds:
        raise BundleError(f'{path}: holds no tensors')
    for name, kind in kinds.items():
        if kind not in WEIGHT_BYTES:
            raise BundleError(
                f'{path}: tensor {quoted(name)} is {kind}; expected one of '
                f'{", ".join(WEIGHT_BYTES)}; export the checkpoint again'
            )


def _read_statistics(folder: Path, spec: BundleSpec) -> dict[str, np.ndarray]:
    path = folder / STATISTICS_FILE
    try:
        with safe_open(str(path), framework='np') as file:
            statistics = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, TypeError) as error:
        raise BundleError(f'{path}: is not a whole safetensors file: {_said(error)}') from None
    try:
        check_statistics(spec, statistics)
    except FieldError as error:
        raise BundleError(f'{path}: {error}') from None
    return statistics
