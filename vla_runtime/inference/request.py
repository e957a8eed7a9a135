"""One inference as arrays: all network inputs, fixed before any network runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import numpy as np

from vla_runtime.engines.protocol import StepInputs
from vla_runtime.family.step_schedule import StepSchedule
from vla_runtime.inference.prefix_cache import PrefixInputs
from vla_runtime.inference.real_time_chunking import RtcMode
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.types import CacheOutcome, CacheReport, MissReason, Reuse

# Prefix cache outcomes in words, for the person who reads a report.

# Prompt rows of serial guidance, in their order.
_ROW_NAMES = ('conditioned', 'unconditioned')


def cache_words(report: CacheReport) -> dict[str, str]:
    """Describe `vision`, camera by camera, and `prefix`, prompt row by prompt row.

    `top: hit (0.033 s old), wrist: miss (pixels)`: the age since the entry was computed from or
    found equal to an observation, or the reason.
    """
    images = (f'{camera}: {outcome_words(one)}' for camera, one in report.images.items())
    prefixes = [outcome_words(one) for one in report.prefixes]
    if len(prefixes) > 1:
        rows = zip(_ROW_NAMES, prefixes, strict=True)
        prefixes = [f'{name}: {words}' for name, words in rows]
    return {'vision': ', '.join(images), 'prefix': ', '.join(prefixes)}


def outcome_words(outcome: CacheOutcome) -> str:
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


class PhaseClock:
    """Wall time per phase, in milliseconds; belongs to one request."""

    def __init__(self) -> None:
        self._start = self._last = perf_counter()
        self._phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        now = perf_counter()
        self._phases[phase] = self._phases.get(phase, 0.0) + (now - self._last) * 1e3
        self._last = now

    def milliseconds(self) -> dict[str, float]:
        """Return milliseconds per phase, and their sum as `total`."""
        return {**self._phases, 'total': (self._last - self._start) * 1e3}


@dataclass(frozen=True)
class ChunkRequest:
    """Inputs that one chunk is encoded and denoised from.

    Attributes:
        number: inference number; with the seed it names the noise.
        prefixes: one of R rows; with serial guidance two of one row, conditioned first.
        inputs: the expert's inputs, for all prompt rows.
        guidance: mode in which the rows run; `none` for one row.
        noise: for the report; unlike `inputs.x` it never holds actions of the plan.
        rtc_mode: mode that conditions the chunk on the plan; `off` without a plan.
        clamped: rows set exactly to the plan's in the end (`hard_prefix`).
        share: (H, 1) share of its velocity that each action moves by (`frozen`); None: the whole.
    """

    settings: PolicySettings
    number: int
    prefixes: tuple[PrefixInputs, ...]
    schedule: StepSchedule
    inputs: StepInputs
    guidance: Literal['none', 'fused', 'serial']
    noise: np.ndarray
    rtc_mode: RtcMode = 'off'
    clamped: slice = field(default_factory=lambda: slice(0))
    share: np.ndarray | None = None
    clock: PhaseClock = field(default_factory=PhaseClock)

    @property
    def by_step(self) -> str:
        """Why the steps run one by one, not as one graph; '' where they do not."""
        if self.guidance == 'serial':
            return 'serial guidance'
        return '' if self.share is None else f'rtc_mode {self.settings.rtc_mode}'

    @property
    def times(self) -> np.ndarray:
        return self.schedule.times

    @property
    def tokens(self) -> tuple[int, ...]:
        """Valid tokens of each prompt row; () for a policy without language."""
        rows = (array for prefix in self.prefixes for array in prefix.rows.values())
        masks = (array for array in rows if array.dtype == np.bool_)
        return tuple(int(n) for mask in masks for n in mask.sum(axis=1))
