"""Schedulers of a `diffusion` head: DDPM (arXiv 2006.11239), DDIM (arXiv 2010.02502), renoising.

A denoise step is the network's prediction m at noisy actions x, and an update of seven numbers
that the step alone decides:

    clean = clip((of_x x + of_m m) / divisor, most)      the actions that x and m show
    tie   = plan_weight (plan - clean)                   zero without a plan
    x'    = clean_in c + x_in x + m_in m + tie_in tie + noise_in z

The tie is pseudoinverse guidance (ΠGDM, Song et al., ICLR 2023) as real-time chunking uses it
(arXiv 2506.07339, equation 2), with the Jacobian that a standard normal prior of the actions has:
its weight then is that of the plan alone, whatever the noise. Under DDIM the predicted noise
follows the tied clean actions.

Renoising (arXiv 2510.10274) puts every prediction of the clean actions back onto the straight line
to the noise that the chunk began with: x' = (1 - t') clean + t' z, the same z at every step. From x
alone, a flow's Euler step is another wherever two predictions differ.

Betas and their cumulative product are float32 tables as the training's; a double table moves
actions by 1e-4. Timesteps are spaced as diffusers' `leading` without offset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, Protocol, get_args

import numpy as np

SchedulerKind = Literal['ddpm', 'ddim']
BetaSchedule = Literal['linear', 'scaled_linear', 'squaredcos_cap_v2', 'sigmoid']
# What the network predicts: the noise, the clean actions, or the velocity of arXiv 2202.00512.
Prediction = Literal['epsilon', 'sample', 'v_prediction']

# Numbers of an update, in their order: see `Update`.
UPDATE_WIDTH = 9
# Most steps of a training that are served; each is a row of the time table.
MOST_TRAIN_STEPS = 1000
# Most steps of renoising.
_MOST_RENOISED = 100
_LARGEST_BETA = 0.999
_LEAST_VARIANCE = 1e-20


class Scheduler(Protocol):
    """How a `diffusion` head is sampled."""

    def of_kind(self, kind: SchedulerKind) -> Scheduler:
        """Return the scheduler that samples the other way (ValueError: there is none)."""

    def draws(self, steps: int) -> int:
        """Return D, the noises of a chunk: the first one is what it begins with."""

    def step_noise(self, drawn: np.ndarray, steps: int) -> np.ndarray:
        """Return what z is in each step, (N, ..., H, A), of the noises (..., D, H, A)."""

    def timesteps(self, steps: int) -> np.ndarray:
        """Return the times of N denoise steps, noisy to clean (ValueError: too many)."""

    def all_times(self) -> np.ndarray:
        """Return every time that any number of steps has, each once, float64."""

    def check_steps(self, steps: int) -> None:
        """Refuse a number of denoise steps (ValueError)."""

    def updates(self, steps: int) -> np.ndarray:
        """Return the updates of N denoise steps, (N, UPDATE_WIDTH) float32."""


@dataclass(frozen=True)
class NoiseScheduler:
    """Scheduler that a policy was trained with, and is sampled with unless a setting says another.

    Attributes:
        kind: way of sampling.
        train_steps: T, steps of the noise that was added in training.
        betas: schedule of the noise.
        beta_start, beta_end: its ends; `squaredcos_cap_v2` has none.
        prediction: what the network gives.
        clip: largest size of the clean actions; None: they are not clipped.
    """

    kind: SchedulerKind
    train_steps: int
    betas: BetaSchedule
    beta_start: float
    beta_end: float
    prediction: Prediction = 'epsilon'
    clip: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.train_steps <= MOST_TRAIN_STEPS:
            raise ValueError(
                f'scheduler.train_steps {self.train_steps} where 1 to {MOST_TRAIN_STEPS} is '
                'expected'
            )
        if self.clip is not None and not 0.0 < self.clip < math.inf:
            raise ValueError(f'scheduler.clip {self.clip} where a number above 0 is expected')
        if self.betas not in get_args(BetaSchedule):
            raise ValueError(f"scheduler.betas '{self.betas}' is unknown")
        has_ends = self.betas != 'squaredcos_cap_v2'
        if has_ends and not 0.0 <= self.beta_start <= self.beta_end <= 1.0:
            raise ValueError(
                f'scheduler.beta_start {self.beta_start} and beta_end {self.beta_end} where '
                'numbers from 0 to 1, in this order, are expected'
            )
        if self.kind == 'ddim' and self.betas == 'sigmoid':
            raise ValueError("scheduler.betas 'sigmoid' is of ddpm alone")
        left = self.kept_table()
        if not (left[-1] > 0.0 and left[0] < 1.0):
            raise ValueError(
                f'scheduler.beta_end {self.beta_end} after beta_start {self.beta_start} over '
                f'{self.train_steps} steps leaves {left[0]:.3g} of the actions at the first step '
                f'and {left[-1]:.3g} at the last, where less than 1 and more than 0 is expected'
            )

    def of_kind(self, kind: SchedulerKind) -> NoiseScheduler:
        return replace(self, kind=kind)

    def draws(self, steps: int) -> int:
        """Noises of a chunk: the one to begin with, and one a step but the last under DDPM."""
        return steps if self.kind == 'ddpm' else 1

    def step_noise(self, drawn: np.ndarray, steps: int) -> np.ndarray:
        added = np.zeros((steps, *drawn[..., 0, :, :].shape), dtype=np.float32)
        added[: drawn.shape[-3] - 1] = np.moveaxis(drawn[..., 1:, :, :], -3, 0)
        return added

    def beta_table(self) -> np.ndarray:
        """Variance that each training step adds, (T,) float32."""
        steps, start, end = self.train_steps, self.beta_start, self.beta_end
        if self.betas == 'linear':
            return _even(start, end, steps)
        if self.betas == 'scaled_linear':
            return np.square(_even(start**0.5, end**0.5, steps))
        if self.betas == 'sigmoid':
            x = _even(-6.0, 6.0, steps)
            sigmoid = (1.0 / (1.0 + np.exp(-x.astype(np.float64)))).astype(np.float32)
            return sigmoid * np.float32(end - start) + np.float32(start)
        kept = [math.cos((i / steps + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(steps + 1)]
        falls = [1.0 - after / before for before, after in pairwise(kept)]
        return np.minimum(falls, _LARGEST_BETA).astype(np.float32)

    def kept_table(self) -> np.ndarray:
        """Share of the actions' variance that is left after each training step, (T,) float32."""
        alphas = np.float32(1.0) - self.beta_table()
        # Each product is kept in double and rounded, as PyTorch's.
        return np.cumprod(alphas.astype(np.float64)).astype(np.float32)

    def timesteps(self, steps: int) -> np.ndarray:
        """Training steps of N denoise steps, noisy to clean, (N,) int64 (ValueError: too many)."""
        self.check_steps(steps)
        return np.arange(steps - 1, -1, -1, dtype=np.int64) * (self.train_steps // steps)

    def all_times(self) -> np.ndarray:
        return np.arange(self.train_steps, dtype=np.float64)

    def check_steps(self, steps: int) -> None:
        """Refuse a number of denoise steps that the training does not allow (ValueError)."""
        if not 1 <= steps <= self.train_steps:
            raise ValueError(
                f'denoise_steps is {steps}: this policy was trained with {self.train_steps} steps '
                f'of noise (dimensions.scheduler.train_steps), so it must be 1 to '
                f'{self.train_steps}'
            )

    def updates(self, steps: int) -> np.ndarray:
        """Updates of N denoise steps, (N, UPDATE_WIDTH) float32; each row as `_update`."""
        kept, stride = self.kept_table().astype(np.float64), self.train_steps // steps
        rows = []
        for t in self.timesteps(steps):
            before = t - stride
            rows.append(self._update(kept[t], kept[before] if before >= 0 else 1.0, last=t == 0))
        return np.array(rows, dtype=np.float32)

    def _update(self, kept: float, kept_next: float, *, last: bool) -> list[float]:
        signal, noise = math.sqrt(kept), math.sqrt(1.0 - kept)
        of_x, of_m, divisor = {
            'epsilon': (1.0, -noise, signal),
            'sample': (0.0, 1.0, 1.0),
            'v_prediction': (signal, -noise, 1.0),
        }[self.prediction]
        most = float(np.finfo(np.float32).max) if self.clip is None else self.clip
        if self.kind == 'ddpm':
            alpha = kept / kept_next
            clean_in = math.sqrt(kept_next) * (1.0 - alpha) / (1.0 - kept)
            x_in = math.sqrt(alpha) * (1.0 - kept_next) / (1.0 - kept)
            variance = (1.0 - kept_next) / (1.0 - kept) * (1.0 - alpha)
            noise_in = 0.0 if last else math.sqrt(max(variance, _LEAST_VARIANCE))
            return [of_x, of_m, divisor, most, clean_in, x_in, 0.0, clean_in, noise_in]
        clean_in, noise_next = math.sqrt(kept_next), math.sqrt(1.0 - kept_next)
        # The noise in x, of x and m, before the clean actions are clipped.
        x_in, m_in = {
            'epsilon': (0.0, 1.0),
            'sample': (1.0 / noise, -signal / noise),
            'v_prediction': (noise, signal),
        }[self.prediction]
        tie_in = clean_in - noise_next * signal / noise
        x_in, m_in = noise_next * x_in, noise_next * m_in
        return [of_x, of_m, divisor, most, clean_in, x_in, m_in, tie_in, 0.0]


@dataclass(frozen=True)
class Renoising:
    """Renoising: the network predicts the clean actions at flow times from 1 (noise) to 1/N."""

    def of_kind(self, kind: SchedulerKind) -> Renoising:
        raise ValueError(
            f"noise_scheduler '{kind}' is for a policy that was trained with steps of noise; this "
            "one goes back to the noise that it began with: leave it at 'bundle'"
        )

    def draws(self, steps: int) -> int:
        return 1

    def step_noise(self, drawn: np.ndarray, steps: int) -> np.ndarray:
        return np.repeat(drawn[None, ..., 0, :, :], steps, axis=0)

    def timesteps(self, steps: int) -> np.ndarray:
        self.check_steps(steps)
        return np.arange(steps, 0, -1) / steps

    def all_times(self) -> np.ndarray:
        counts = range(1, _MOST_RENOISED + 1)
        return np.unique(np.concatenate([self.timesteps(count) for count in counts]))

    def check_steps(self, steps: int) -> None:
        if not 1 <= steps <= _MOST_RENOISED:
            raise ValueError(f'denoise_steps is {steps}: it must be 1 to {_MOST_RENOISED}')

    def updates(self, steps: int) -> np.ndarray:
        most = float(np.finfo(np.float32).max)
        after = self.timesteps(steps) - 1.0 / steps
        # The last step ends at the prediction itself.
        after[-1] = 0.0
        rows = [[0.0, 1.0, 1.0, most, 1.0 - t, 0.0, 0.0, 1.0 - t, t] for t in after]
        return np.array(rows, dtype=np.float32)


def advance(
    x: np.ndarray,
    mixed: np.ndarray,
    update: np.ndarray,
    step_noise: np.ndarray,
    plan: np.ndarray,
    plan_weight: np.ndarray,
) -> np.ndarray:
    """Update of a step in float32, as the engines compute it.

    Args:
        x, mixed, step_noise, plan: (H, A); `mixed` is the rows' weighted prediction.
        update: (UPDATE_WIDTH,).
        plan_weight: (H, 1).
    """
    of_x, of_m, divisor, most, clean_in, x_in, m_in, tie_in, noise_in = update
    clean = np.clip((of_x * x + of_m * mixed) / divisor, -most, most)
    tie = plan_weight * (plan - clean)
    moved: np.ndarray = clean_in * clean + x_in * x + m_in * mixed
    return moved + tie_in * tie + noise_in * step_noise


def _even(start: float, end: float, count: int) -> np.ndarray:
    """Evenly spaced numbers in float32, as PyTorch's `linspace`: from both ends to the middle."""
    if count == 1:
        return np.array([start], dtype=np.float32)
    first, last = np.float32(start), np.float32(end)
    step = (last - first) / np.float32(count - 1)
    places = np.arange(count, dtype=np.float32)
    up, down = first + step * places, last - step * places[::-1]
    return np.where(np.arange(count) < count // 2, up, down).astype(np.float32)
