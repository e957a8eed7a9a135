"""One inference as arrays: what the networks are to run on, decided before any of them runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from vla_runtime.engines.protocol import StepInputs
from vla_runtime.inference.prefix_cache import CachePolicy, PrefixInputs
from vla_runtime.inference.real_time_chunking import RtcMode
from vla_runtime.inference.sampling import Overlap


@dataclass(frozen=True)
class ChunkRequest:
    """What one chunk is encoded and denoised from.

    Attributes:
        prefixes: one of R rows; with serial guidance two of one row, conditioned first.
        cache: what of them may be reused.
        times: (N,) flow times of the denoise steps.
        inputs: of the expert, for all rows of guidance.
        guidance: how the rows are run; `none` for one row.
        rtc_mode: how the chunk is tied to the plan; `off` without a plan.
        clamped: first actions that are the plan's, exactly, in the end (`hard_prefix`).
        noise: what the report records; unlike `inputs.x` untouched by the plan.
        overlap: what samples are compared with; None without a plan or with one sample.
    """

    prefixes: tuple[PrefixInputs, ...]
    cache: CachePolicy
    times: np.ndarray
    inputs: StepInputs
    guidance: Literal['none', 'fused', 'serial']
    rtc_mode: RtcMode
    clamped: int
    noise: np.ndarray
    overlap: Overlap | None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Valid tokens of each prompt row."""
        return tuple(
            int(n) for prefix in self.prefixes for n in prefix.rows['token_mask'].sum(axis=1)
        )
