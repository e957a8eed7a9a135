"""A chunk with its report, as fields of an answer on the wire and back.

openpi's clients get none of these; a robot's node asks for them (`report` in its request), so that
a report of an inference on another machine says what one on this machine would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.files.quotes import quoted
from vla_runtime.remote.contract import command_kinds
from vla_runtime.types import (
    ActionChunk,
    CacheOutcome,
    CacheReport,
    InferenceReport,
    MissReason,
    Reuse,
)

_SAME = (
    *('number', 'seed', 'pipeline', 'overlap_ms', 'beta', 'guidance', 'rtc_mode', 'clean_steps'),
    *('denoise_steps', 'noise', 'ticks', 'answers_per_s', 'together'),
)
_MAPS = ('milliseconds', 'runs', 'cuda_graph')


class WrongAnswerError(ValueError):
    """An answer that is none to the request; the message names the field."""


def fields_of(chunk: ActionChunk, report: InferenceReport, bundle_sha256: str) -> dict[str, Any]:
    """Return what an answer says beside its actions; `answer_of` reads it."""
    return {
        'bundle_sha256': bundle_sha256,
        'names': list(chunk.names),
        'kinds': list(chunk.kinds),
        'normalised': chunk.normalised,
        **{name: getattr(report, name) for name in _SAME},
        **{name: dict(getattr(report, name)) for name in _MAPS},
        'tokens': list(report.tokens),
        'images': {name: _outcome_fields(one) for name, one in report.cache.images.items()},
        'prefixes': [_outcome_fields(one) for one in report.cache.prefixes],
    }


def answer_of(
    actions: Any,
    fields: Any,
    spec: BundleSpec,
    bundle_sha256: str,
    stamps_ns: Mapping[str, int],
) -> tuple[ActionChunk, InferenceReport]:
    """Check an answer against the contract, and return it as `Policy.infer` returns its own.

    Args:
        actions: (horizon, actions) numbers in robot units.
        fields: made by `fields_of`.
        stamps_ns: stamps of the observation that was sent.

    Raises:
        WrongAnswerError: another shape, a number that is not finite, other names, another bundle,
            or fields that are missing or of other types.
    """
    try:
        return _answer(actions, fields, spec, bundle_sha256, stamps_ns)
    except WrongAnswerError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WrongAnswerError(f'report: {type(error).__name__}: {error}') from None


def _answer(
    actions: Any,
    fields: Mapping[str, Any],
    spec: BundleSpec,
    bundle_sha256: str,
    stamps_ns: Mapping[str, int],
) -> tuple[ActionChunk, InferenceReport]:
    if fields['bundle_sha256'] != bundle_sha256:
        raise WrongAnswerError(
            f'bundle_sha256: the answer is of the bundle {str(fields["bundle_sha256"])[:12]}…, and '
            f'this robot was matched with {bundle_sha256[:12]}…; configure the node again to take '
            'the new one'
        )
    names = tuple(fields['names'])
    if names != spec.action_names:
        raise WrongAnswerError(
            f'names: the actions are {", ".join(map(str, names))[:200]}, and the contract has '
            f'{", ".join(spec.action_names)}'
        )
    chunk = ActionChunk(
        actions=_finite('actions', actions, (spec.real_horizon, len(names)), np.float64),
        names=names,
        kinds=command_kinds(spec),
        step_time_s=spec.step_time_s,
        normalised=_finite('normalised', fields['normalised'], None, np.float32),
    )
    if not isinstance(fields['noise'], np.ndarray):
        raise WrongAnswerError('noise: is no array')
    told: dict[str, Any] = {name: fields[name] for name in _SAME}
    report = InferenceReport(
        **told | {name: dict(fields[name]) for name in _MAPS},
        tokens=tuple(int(count) for count in fields['tokens']),
        cache=CacheReport(
            {name: _outcome(one) for name, one in fields['images'].items()},
            tuple(_outcome(one) for one in fields['prefixes']),
        ),
        stamps_ns=stamps_ns,
    )
    if isinstance(report.number, bool) or not isinstance(report.number, int):
        raise WrongAnswerError('number: is no whole number')
    return chunk, report


def _finite(name: str, value: Any, shape: tuple[int, ...] | None, kind: Any) -> np.ndarray:
    """Return finite floats of a shape, writable; None: of any with two axes."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != 'f':
        raise WrongAnswerError(f'{name}: {quoted(value)} is no array of floats')
    if value.ndim != 2 or shape not in (None, value.shape):
        raise WrongAnswerError(f'{name}: the shape is {value.shape}, and the contract has {shape}')
    if not np.isfinite(value).all():
        where = np.argwhere(~np.isfinite(value))[0].tolist()
        raise WrongAnswerError(f'{name}: the number at {where} is not finite')
    return value.astype(kind)


def _outcome_fields(outcome: CacheOutcome) -> dict[str, Any]:
    return {
        'reuse': outcome.reuse.value,
        'reason': None if outcome.reason is None else outcome.reason.value,
        'age_s': None if math.isnan(outcome.age_s) else outcome.age_s,
        'reuses': outcome.reuses,
        'grey_levels': outcome.grey_levels,
        'bins': outcome.bins,
        'limit': outcome.limit,
        'changed': list(outcome.changed),
        'on_reused_images': outcome.on_reused_images,
    }


def _outcome(fields: Mapping[str, Any]) -> CacheOutcome:
    reason, age_s = fields['reason'], fields['age_s']
    return CacheOutcome(
        reuse=Reuse(fields['reuse']),
        reason=None if reason is None else MissReason(reason),
        age_s=math.nan if age_s is None else float(age_s),
        reuses=int(fields['reuses']),
        grey_levels=fields['grey_levels'],
        bins=fields['bins'],
        limit=fields['limit'],
        changed=tuple(map(str, fields['changed'])),
        on_reused_images=bool(fields['on_reused_images']),
    )
