"""One inference as arrays: all network inputs, fixed before any network runs."""

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
    """Inputs that one chunk is encoded and denoised from.

    Attributes:
        prefixes: one of R rows; with serial guidance two of one row, conditioned first.
        cache: settings of the prefix cache.
        times: (N,) flow times of the denoise steps.
        inputs: the expert's inputs, for all prompt rows.
        guidance: mode in which the rows run; `none` for one row.
        rtc_mode: mode that ties the chunk to the plan; `off` without a plan.
        clamped: number of first actions set exactly to the plan's in the end (`hard_prefix`).
        noise: noise for the report; unlike `inputs.x` it never holds actions of the plan.
        overlap: plan that samples are compared with; None without a plan or with one sample.
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
        """Valid tokens of each prompt row; () for a policy without language."""
        rows = (array for prefix in self.prefixes for array in prefix.rows.values())
        masks = (array for array in rows if array.dtype == np.bool_)
        return tuple(int(n) for mask in masks for n in mask.sum(axis=1))
