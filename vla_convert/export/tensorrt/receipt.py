"""Receipt files in the engines' folder: `verification.json` and `rejected.json`.

`verification.json` lists the SHA-256 of the engines that were compared, and of the weights and the
recorded cases that they were compared with; it covers no others.
`engine.json` then says what was passed: without that nothing loads the engines (`store`). Engines
whose numbers are wrong are not kept: `rejected.json` has what was found, and is no receipt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vla_runtime.engines.tensorrt.store import (
    METADATA,
    RECEIPT,
    REJECTION,
    EngineFile,
    Metadata,
    passed_on,
    write_metadata,
)
from vla_runtime.files.atomic_write import write_text
from vla_runtime.files.json_file import JsonError, read_json
from vla_runtime.files.large_files import file_sha256

Engines = Mapping[str, EngineFile]


def compared_files(folder: Path, engines: Engines, files: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of the compared files, engines, weights and cases, by name.

    Args:
        folder: folder of the engines, which are read.
        engines: engines by name.
        files: SHA-256 of the bundle's files by name, as in its policy.yaml.
    """
    digests = {entry.file: file_sha256(folder / entry.file) for entry in engines.values()}
    return {**passed_on(files), **digests}


def is_compared(folder: Path, engines: Engines, files: Mapping[str, str]) -> bool:
    """Return whether the folder's receipt covers these very engines; arguments as above."""
    try:
        compared = read_json(folder / RECEIPT).mapping('files').values.items()
    except JsonError:
        return False
    # More may be in it: engines for two rows that were removed since.
    return bool(compared_files(folder, engines, files).items() <= compared)


def keep(
    folder: Path, metadata: Metadata, document: Mapping[str, Any], files: Mapping[str, str]
) -> None:
    """Write the receipt of engines that passed the comparison, and let them be loaded."""
    _write(folder / RECEIPT, document)
    write_metadata(folder, replace(metadata, passed=passed_on(files)))


def reject(
    folder: Path, engines: Engines, document: Mapping[str, Any], failures: list[str]
) -> None:
    """Remove engines with wrong numbers, and record the comparison.

    `engine.json` goes first: without it nothing loads them.
    """
    (folder / METADATA).unlink()
    forget(folder)
    _write(folder / REJECTION, {'failures': failures, **document})
    for entry in engines.values():
        (folder / entry.file).unlink()


def forget(folder: Path) -> None:
    """Remove receipt and rejection of engines that are about to be replaced."""
    for name in (RECEIPT, REJECTION):
        (folder / name).unlink(missing_ok=True)


def _write(path: Path, document: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(document, indent=1) + '\n')
