"""Choices of `auto` that this machine remembers, in the user's cache folder.

A choice is found again under a digest of everything that it rests on, and made again where any of
that has changed: bundle, candidates, device, threads, settings, processor, GPU, versions.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vla_runtime import __version__
from vla_runtime.bundle.folder import Bundle
from vla_runtime.bundle.identity import spec_identity
from vla_runtime.engines.candidates import Candidate
from vla_runtime.engines.preflight import gpu_name
from vla_runtime.files.atomic_write import write_text
from vla_runtime.files.cache_folder import cache_folder
from vla_runtime.files.json_file import read_json
from vla_runtime.files.machine import cpu_instructions, cpu_name

logger = logging.getLogger(__name__)

_PACKAGES = ('torch', 'onnxruntime', 'onnxruntime-gpu', 'tensorrt')
_MOST_KEPT = 200
# Another where `choice` chooses otherwise from the same times: what was chosen before is forgotten.
_RULE = 2


@dataclass(frozen=True)
class Choice:
    """The chosen candidate.

    Attributes:
        backend, precision: chosen.
        why: reasons in words, with the times that decided.
        measured: True where it ran here, and was checked before.
    """

    backend: str
    precision: str
    why: str
    measured: bool = False


def choice_key(
    bundle: Bundle,
    found: Sequence[Candidate],
    device: str,
    threads: int,
    settings: Mapping[str, object],
) -> str:
    """Return a digest of everything that the choice depends on."""
    facts: dict[str, Any] = {
        'rule': _RULE,
        'bundle': spec_identity(bundle.spec),
        'candidates': [asdict(candidate) for candidate in found],
        'device': device,
        'threads': threads,
        'settings': dict(settings),
        'cpu': [cpu_name(), cpu_instructions()],
        'gpu': '' if device == 'cpu' else gpu_name(device),
        'versions': {name: _version(name) for name in _PACKAGES} | {'vla_runtime': __version__},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def memory_path() -> Path:
    """File of the choices that this machine remembers; without it all are made again."""
    return cache_folder() / 'choices.json'


def remembered_choices() -> dict[str, Choice]:
    """All remembered choices; a damaged file counts as none."""
    try:
        path = memory_path()
        stored: Mapping[str, Any] = read_json(path).values if path.is_file() else {}
        return {key: Choice(**values) for key, values in stored.items()}
    except (ValueError, OSError, TypeError) as error:
        logger.warning('remembered choices are not used: %s', error)
        return {}


def remember_choices(choices: Mapping[str, Choice]) -> None:
    newest = list(choices.items())[-_MOST_KEPT:]
    document = {name: asdict(value) for name, value in newest}
    try:
        path = memory_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(document, indent=1) + '\n')
    except (ValueError, OSError) as error:
        logger.warning('the choice of a backend is not remembered: %s', error)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ''
