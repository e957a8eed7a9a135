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


class PhaseClock:
    """Wall time per phase, in milliseconds; belongs to one request."""

    def __init__(self) -> None:
        self._start = self._last = perf_counter()
        self._phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to `phase`."""
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
        settings: settings of the inference.
        number: inference number; with the seed it names the noise.
        prefixes: one of R rows; with serial guidance two of one row, conditioned first.
        schedule: times of the denoise steps, and how each moves the actions.
        inputs: the expert's inputs, for all prompt rows.
        guidance: mode in which the rows run; `none` for one row.
        noise: noise for the report; unlike `inputs.x` it never holds actions of the plan.
        rtc_mode: mode that ties the chunk to the plan; `off` without a plan.
        clamped: rows set exactly to the plan's in the end (`hard_prefix`).
        share: (H, 1) share of its velocity that each action moves by (`frozen`); None: the whole.
        clock: wall time of the phases.
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
        """Times of the denoise steps, (N,)."""
        return self.schedule.times

    @property
    def tokens(self) -> tuple[int, ...]:
        """Valid tokens of each prompt row; () for a policy without language."""
        rows = (array for prefix in self.prefixes for array in prefix.rows.values())
        masks = (array for array in rows if array.dtype == np.bool_)
        return tuple(int(n) for mask in masks for n in mask.sum(axis=1))
