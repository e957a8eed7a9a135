"""Prefix cache outcomes in words, for the person who reads a report."""

from __future__ import annotations

from vla_runtime.types import CacheOutcome, CacheReport, MissReason, Reuse

# Prompt rows of serial guidance, in their order.
_ROW_NAMES = ('conditioned', 'unconditioned')


def cache_words(report: CacheReport) -> dict[str, str]:
    """Describe `vision`, camera by camera, and `prefix`, prompt row by prompt row.

    `top: hit (0.033 s old), wrist: miss (pixels)`: the brackets hold the age or the reason. The
    age counts from the last observation that the entry was computed from or equal to.
    """
    images = (f'{camera}: {outcome_words(one)}' for camera, one in report.images.items())
    prefixes = [outcome_words(one) for one in report.prefixes]
    if len(prefixes) > 1:
        rows = zip(_ROW_NAMES, prefixes, strict=True)
        prefixes = [f'{name}: {words}' for name, words in rows]
    return {'vision': ', '.join(images), 'prefix': ', '.join(prefixes)}


def outcome_words(outcome: CacheOutcome) -> str:
    """Describe one outcome."""
    if outcome.reuse is Reuse.OFF:
        return 'off'
    if outcome.reuse is Reuse.HIT:
        age = f'{outcome.age_s:.3f} s old' if outcome.age_s >= 0 else 'of unknown age'
        return f'hit ({age}{"; on reused images" if outcome.on_reused_images else ""})'
    if outcome.reuse is Reuse.REUSED:
        row = f'{outcome.reuses} in a row; {outcome.age_s:.3f} s old'
        return f'reused ({row}; {_change(outcome)})'
    return f'miss ({_reason(outcome)})'


def _change(outcome: CacheOutcome) -> str:
    if outcome.grey_levels is not None:
        return f'changed by {outcome.grey_levels:.2f}'
    return f'moved by {outcome.bins} bins'


def _reason(outcome: CacheOutcome) -> str:
    reason, limit = outcome.reason, outcome.limit
    if reason is MissReason.INPUTS:
        return ', '.join(outcome.changed)
    if reason is MissReason.IMAGE_CHANGE:
        return f'{_change(outcome)}; limit {limit:.2f}'
    if reason is MissReason.STATE_CHANGE:
        return f'{_change(outcome)}; limit {limit:g}'
    if reason is MissReason.AGE:
        return f'{outcome.age_s:.3f} s old; limit {limit:.3f}'
    if reason is MissReason.REUSES:
        return f'reused {outcome.reuses} of {limit:g}'
    if reason is MissReason.CLOCK_BACK:
        return f'the clock went back by {-outcome.age_s:.3f} s'
    if reason is MissReason.OTHER_CLOCK:
        return 'on another clock'
    if reason is MissReason.NOT_LATEST:
        return 'not of the latest'
    return 'pixels' if reason is MissReason.PIXELS else 'first'
