"""Closed-loop success of a policy in a lower precision, judged beside float32.

Small errors of single tensors say little about what a robot does. So `auto` takes 8 bits only where
the policy was seen to do its task as often as in float32, episode by episode in the same scenes,
and no 16 bits that were seen to do it less often. verification.json has a record for each backend
and precision, `judged.onnxruntime.int8`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

from vla_runtime.bundle.folder import Bundle
from vla_runtime.bundle.schema import VERIFICATION_FILE, BundleSpec
from vla_runtime.bundle.writer import seal
from vla_runtime.files.atomic_write import write_text
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.types import is_left_out

# --- Identity of a bundle: one SHA-256 over everything that its output depends on


def spec_identity(spec: BundleSpec) -> str:
    """Return the SHA-256 of a bundle's policy.yaml and files, without what changes no output."""
    files = {name: sha for name, sha in spec.files.items() if name != VERIFICATION_FILE}
    contents = _contents(replace(spec, files=files))
    # It says how data is read, and changes nothing that the policy does.
    del contents['rename_map']
    text = json.dumps(contents, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _contents(value: Any) -> Any:
    """As `dataclasses.asdict`, without the fields that identities leave out."""
    if is_dataclass(value):
        pairs = [(one, getattr(value, one.name)) for one in fields(value)]
        return {one.name: _contents(has) for one, has in pairs if not is_left_out(one, has)}
    if isinstance(value, Mapping):
        return {key: _contents(has) for key, has in value.items()}
    if isinstance(value, list | tuple):
        return [_contents(has) for has in value]
    return value


# --------------------------------------------------------------------------------------------------

# Success that may be lost at most, by the lower end of the interval.
MOST_LOST = 0.05
# What a judgement rests on at least: episodes of a condition, conditions, success in float32.
LEAST_EPISODES = 200
LEAST_CONDITIONS = 2
LEAST_REFERENCE = 0.5
_KEY = 'judged'
# Of the ONNX files' own receipt: where int8's record stood before other backends had one.
_KEY_BEFORE = 'closed_loop'


def difference_interval(episodes: int, won: int, lost: int) -> tuple[float, float]:
    """95% interval of a paired difference of success, as a share (Agresti and Min, 2005).

    `won` pairs succeed here and fail in the reference; `lost` the other way round.
    """
    total, difference = episodes + 2, won - lost
    error = math.sqrt(won + lost + 1 - difference**2 / total) / total
    middle, half = difference / total, 1.959964 * error
    return middle - half, middle + half


@dataclass(frozen=True)
class JudgedCondition:
    """Episodes of one condition, each run in both precisions.

    `succeeded` counts those that succeed in the lower precision; `won` those that succeed in it and
    fail in float32, `lost` the other way round.
    """

    condition: str
    episodes: int
    succeeded: int
    won: int
    lost: int

    @property
    def least_difference(self) -> float:
        return difference_interval(self.episodes, self.won, self.lost)[0]


def write_success(
    bundle: Bundle,
    backend: str,
    precision: str,
    conditions: Sequence[JudgedCondition],
    provenance: Mapping[str, Any],
) -> None:
    """Put judged success into a bundle's receipt, in place of what stood there; seal it again.

    `provenance` is command, seeds and version of the code.

    Raises:
        BundleError: a file of the bundle has changed.
        JsonError: its receipt is damaged.
    """
    path = bundle.folder / VERIFICATION_FILE
    before = path.read_text(encoding='utf-8') if path.exists() else None
    document = JsonMapping(path, {}) if before is None else read_json(path)
    judged = document.mapping(_KEY, optional=True)
    record = {
        'bundle_sha256': _identity(bundle, backend),
        **provenance,
        'conditions': [asdict(one) for one in conditions],
    }
    of_backend = {**judged.mapping(backend, optional=True).values, precision: record}
    written = {**document.values, _KEY: {**judged.values, backend: of_backend}}
    kept = {k: digest for k, digest in bundle.spec.files.items() if k != VERIFICATION_FILE}
    write_text(path, json.dumps(written, indent=1) + '\n')
    try:
        seal(bundle.folder, replace(bundle.spec, files=kept))
    except BaseException:
        # policy.yaml still lists the receipt of before.
        path.unlink() if before is None else write_text(path, before)
        raise


def success_fault(bundle: Bundle, backend: str, precision: str) -> str:
    """Return why judged success rules out a precision, or '' (JsonError: a damaged receipt)."""
    record = _record(bundle, backend, precision)
    study = 'eight_bits' if precision == 'int8' else 'precision'
    command = f'vla_runtime study {study} --bundle FOLDER'
    if precision in ('fp8', 'nvfp4'):
        return f'no study judges closed-loop success in {precision} on the device that runs it'
    if record is None:
        return f'no closed-loop success was judged: {command}'
    if not _is_of(record, bundle, backend):
        return f'closed-loop success was judged with other files: {command}'
    judged = [_condition(one) for one in record.mappings('conditions')]
    if len(judged) < LEAST_CONDITIONS:
        return (
            f'closed-loop success was judged in {len(judged)} condition(s), not in '
            f'{LEAST_CONDITIONS} (blocks that stand still, and that move)'
        )
    for one in judged:
        if one.episodes < LEAST_EPISODES:
            return (
                f'{one.condition}: only {one.episodes} episodes were judged '
                f'(at least {LEAST_EPISODES})'
            )
        reference = one.succeeded - one.won + one.lost
        if reference < LEAST_REFERENCE * one.episodes:
            return (
                f'{one.condition}: float32 itself succeeds in {reference} of {one.episodes} '
                'episodes, so that nothing can be lost'
            )
        if not one.least_difference >= -MOST_LOST:
            return (
                f'{one.condition}: {one.succeeded} of {one.episodes} episodes succeed, {one.lost} '
                f'lost to float32 and {one.won} won, so that up to '
                f'{-100 * one.least_difference:.0f}% of success may be lost (accepted: '
                f'{100 * MOST_LOST:.0f}%)'
            )
    return ''


def is_judged(bundle: Bundle, backend: str, precision: str) -> bool:
    """Return whether success with these very files was judged; errors as `success_fault`."""
    record = _record(bundle, backend, precision)
    return record is not None and _is_of(record, bundle, backend)


def _is_of(record: JsonMapping, bundle: Bundle, backend: str) -> bool:
    return bool(record.get('bundle_sha256', str) == _identity(bundle, backend))


def _record(bundle: Bundle, backend: str, precision: str) -> JsonMapping | None:
    if VERIFICATION_FILE not in bundle.spec.files:
        return None
    document = read_json(bundle.folder / VERIFICATION_FILE)
    of_backend = document.mapping(_KEY, optional=True).mapping(backend, optional=True)
    if precision in of_backend:
        return of_backend.mapping(precision)
    files = document.mapping('onnx', optional=True)
    is_of_files = backend == 'onnxruntime' and _KEY_BEFORE in files
    if is_of_files and files.get('precision', str) == precision:
        return files.mapping(_KEY_BEFORE)
    return None


def _identity(bundle: Bundle, backend: str) -> str:
    """SHA-256 of the files that a backend runs; PyTorch runs none of the subfolders."""
    spec = bundle.spec
    if backend == 'torch':
        files = {name: digest for name, digest in spec.files.items() if '/' not in name}
        spec = replace(spec, files=files)
    return spec_identity(spec)


def _condition(stated: JsonMapping) -> JudgedCondition:
    names = ('episodes', 'succeeded', 'won', 'lost')
    counts = {name: stated.get(name, int) for name in names}
    if min(counts.values()) < 0 or counts['won'] + counts['lost'] > counts['episodes']:
        raise stated.error('episodes', f'{counts} cannot be counts of one condition')
    return JudgedCondition(stated.get('condition', str), **counts)
