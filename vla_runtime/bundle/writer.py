"""Writes policy bundles: a bundle appears under its name complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from vla_runtime.bundle.folder import (
    BundleError,
    check_regular,
    check_weights,
    files_in,
    needed_files,
    read_bundle,
    read_statistics,
    verify_file,
    why_not_in,
)
from vla_runtime.bundle.rules import check_spec, dump_spec
from vla_runtime.bundle.schema import SPEC_FILE, STATISTICS_FILE, WEIGHTS_FILE, BundleSpec
from vla_runtime.bundle.statistics import statistics_notes
from vla_runtime.bundle.summary import task_notes
from vla_runtime.bundle.unit_doubts import unit_notes
from vla_runtime.files.atomic_write import NO_ROOM, file_sha256, whole_folder, write_text
from vla_runtime.files.field_error import FieldError

# --------------------------------------------------------------------------------------------------
# All notes for a person on a bundle that can be used.


def bundle_notes(spec: BundleSpec, statistics: Mapping[str, np.ndarray]) -> list[str]:
    """Return notes on tasks without words, odd statistics, and units that these contradict."""
    return [
        *task_notes(spec),
        *statistics_notes(spec, statistics),
        *unit_notes(spec, statistics),
    ]


# --------------------------------------------------------------------------------------------------


def check_target(target: str | Path, force: bool) -> None:
    """Check that a bundle can be made at a path, without making anything.

    With `force` an existing bundle may be replaced.

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
    if why := why_not_in(target.parent):
        raise BundleError(f'{target}: {why}')
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

    An exception inside the block leaves the target as it was. `force` replaces an existing bundle,
    never another folder.

    Raises:
        BundleError: the target exists, or the filled folder is not a sealed bundle.
    """
    target = Path(target)
    check_target(target, force)
    filled: Path | None = None

    def check(folder: Path) -> None:
        # The files were hashed a moment ago, by `seal`.
        read_bundle(folder, verify=False)
        check_target(target, force)

    try:
        with whole_folder(target, check) as filled:
            yield filled
    except BundleError as error:
        # Name the target, not the temporary folder.
        raise BundleError(str(error).replace(str(filled), str(target))) from None
    except OSError as error:
        if filled is None:
            raise BundleError(f'{target}: cannot be made: {error.strerror}') from None
        if error.errno not in NO_ROOM:
            raise
        kept = '; the bundle that was there is kept' if target.exists() else ''
        raise BundleError(f'{target}: cannot be written: {error.strerror}{kept}') from None


def seal(folder: str | Path, spec: BundleSpec) -> BundleSpec:
    """Hash the folder's files and write policy.yaml; return the spec as written, with all files.

    Sealing adds files, such as `verification.json`, but never accepts a changed one. Drop an entry
    from `spec.files` to replace its file knowingly.

    Raises:
        BundleError: a spec that is not valid, a listed file that is missing or changed.
    """
    folder = Path(folder)
    try:
        check_spec(spec)
    except FieldError as error:
        raise BundleError(f'{folder / SPEC_FILE}: {error}') from None
    present = files_in(folder, spec.files)
    files = {}
    for name in sorted({*present, *spec.files, *needed_files(spec)}):
        if name not in present:
            raise BundleError(f'{folder / name}: is missing; a bundle needs it')
        if name in spec.files:
            verify_file(folder / name, spec.files[name])
            files[name] = spec.files[name]
        else:
            check_regular(folder / name)
            files[name] = file_sha256(folder / name)
    sealed = replace(spec, files=files)
    check_weights(folder / WEIGHTS_FILE)
    read_statistics(folder, sealed)
    text = dump_spec(sealed)
    try:
        check_spec(sealed)
    except FieldError as error:
        raise BundleError(f'{folder / SPEC_FILE}: {error}') from None
    write_text(folder / SPEC_FILE, text)
    return sealed


def write_statistics(folder: str | Path, statistics: Mapping[str, np.ndarray]) -> None:
    """Write statistics.safetensors; keys and shapes are checked when the folder is sealed."""
    contiguous = {key: np.ascontiguousarray(value) for key, value in statistics.items()}
    # Not `save_file`: its files are readable by their owner only, whatever the umask.
    (Path(folder) / STATISTICS_FILE).write_bytes(save(contiguous))
