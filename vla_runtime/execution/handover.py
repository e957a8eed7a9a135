"""Hand-over from one chunk to the next: the rows that are executed from the boundary on.

All chunks lie on one grid of steps, so a hand-over is arithmetic on rows, done once when a chunk
arrives. The velocity stays continuous in every mode (`plan`); the modes differ in how
far the rows jump.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vla_runtime.files.setting_fields import check_settings, setting

HandoverMode = Literal['switch', 'blend', 'ensemble', 'rtc']
EnsembleOrder = Literal['oldest_first', 'newest_first']


# Most steps of a chunk that a parameter may name; the bundle's own horizon narrows it.
MOST_STEPS = 1000


@dataclass(frozen=True)
class HandoverParameters:
    """Settings of a hand-over.

    `switch` takes the new rows as they are. `blend` cross-fades positions over `blend_steps`, but
    no velocities: what a cross-fade keeps back of one is never made up for
    (docs/appendix/studies.md, Meta-World). `ensemble` averages all live chunks with weights
    `exp(-m·i)` (ACT, arXiv 2304.13705, section IV-B; 0 weighs all alike; ACT's order is
    `oldest_first`). `rtc` takes the new rows as they are, which the policy made to continue the
    plan (real-time chunking); a chunk that was not made so is blended.
    """

    mode: HandoverMode = setting('blend', 'how one chunk follows another', name='handover_mode')
    blend_steps: int = setting(4, 'length of a blend, steps', 1, MOST_STEPS)
    ensemble_decay: float = setting(0.01, 'm of the weights exp(-m*i) of an ensemble', 0.0, 100.0)
    ensemble_order: EnsembleOrder = setting('oldest_first', 'chunk with i = 0, which weighs most')

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class LiveChunk:
    """A chunk on the grid of steps.

    Attributes:
        number: inference number.
        first_step: step of row 0: the one that was current at its observation.
        rows: (horizon, columns) in the executor's order.
        tied: the policy made it to continue the plan.
        written: (horizon, chunk names) the rows as the policy wrote them; None: as `rows`.
        observation_ns: ROS time of its observation.
    """

    number: int
    first_step: int
    rows: np.ndarray
    tied: bool = True
    written: np.ndarray | None = None
    observation_ns: int = 0

    @property
    def end_step(self) -> int:
        return self.first_step + len(self.rows)

    def written_at(self, steps: np.ndarray) -> np.ndarray | None:
        """Rows as the policy wrote them for these steps, (steps, chunk names); None: as `rows`.

        The first and the last row stand for steps outside of the chunk.
        """
        if self.written is None:
            return None
        return self.written[np.clip(steps - self.first_step, 0, len(self.written) - 1)]


@dataclass(frozen=True)
class Handover:
    """Record of one hand-over.

    Attributes:
        step: plan step at which the new chunk took over.
        chunk: inference number of the new chunk.
        join_index: first executed row of the new chunk.
        delay_steps: steps between its observation and its arrival.
        mode: `blend` for an unconditioned chunk under `rtc`.
        late: the previous chunk had executed its steps before this one came.
        from_hold: the robot stood still.
        position_jump: (columns,) new row minus what the old plan had for the same step, or its last
            setpoint: how far the two disagree.
        velocity_jump: (columns,) change of the velocity across it, per second,
            after hand-over: what the robot gets to feel.
    """

    step: int
    chunk: int
    join_index: int
    delay_steps: int
    mode: str
    late: bool
    from_hold: bool
    position_jump: np.ndarray
    velocity_jump: np.ndarray


def blend_weights(steps: int) -> np.ndarray:
    """(steps,) weight of the new chunk: a smoothstep that leaves 0 and reaches 1 outside them."""
    u = np.arange(1, steps + 1) / (steps + 1)
    return u * u * (3.0 - 2.0 * u)


def blend_rows(
    old: np.ndarray, new: np.ndarray, steps: int, blended: np.ndarray | None = None
) -> np.ndarray:
    """New rows, cross-faded from the old ones over the first steps.

    Args:
        old: (n, columns) rows that the plan in force has for the same steps, as far as it goes.
        new: (m, columns).
        steps: length of the cross-fade; no longer than there are old and new rows.
        blended: (columns,) bool; None: all of them.
    """
    steps = min(steps, len(old), len(new))
    result = new.copy()
    if steps:
        weight = blend_weights(steps)[:, None]
        result[:steps] = (1.0 - weight) * old[:steps] + weight * new[:steps]
        if blended is not None:
            result[:steps, ~blended] = new[:steps, ~blended]
    return result


def ensemble_rows(
    chunks: Sequence[LiveChunk], join_step: int, decay: float, order: EnsembleOrder
) -> np.ndarray:
    """Return the weighted mean of all live chunks, for every step of the newest from `join_step`.

    Args:
        chunks: oldest first; the newest has a row at `join_step`.
        decay: m of `exp(-m·i)`; i counts the chunks that have a row for the step.
        order: whether i counts from the oldest or from the newest chunk.
    """
    newest = chunks[-1]
    weights = _ensemble_weights(chunks, np.arange(join_step, newest.end_step), decay, order)
    total = np.zeros((newest.end_step - join_step, newest.rows.shape[1]))
    weighted = np.empty_like(total)
    for chunk, weight in zip(chunks, weights, strict=True):
        first = max(chunk.first_step, join_step)
        end = min(chunk.end_step, newest.end_step)
        if first >= end:
            continue
        rows = chunk.rows[first - chunk.first_step : end - chunk.first_step]
        part = slice(first - join_step, end - join_step)
        total[part] += np.multiply(weight[part, None], rows, out=weighted[part])
    return total


def _ensemble_weights(
    chunks: Sequence[LiveChunk], steps: np.ndarray, decay: float, order: EnsembleOrder
) -> np.ndarray:
    """Return (chunks, steps) weights that sum to 1 at each step; 0 where a chunk has no row."""
    first = np.array([chunk.first_step for chunk in chunks])[:, None]
    end = np.array([chunk.end_step for chunk in chunks])[:, None]
    covered = (steps >= first) & (steps < end)
    # Both orders are counted along the first axis, from the chunk that weighs most.
    ranked = covered if order == 'oldest_first' else covered[::-1]
    # From 1 on; the weight of 0, of steps before a chunk's first, is not used.
    rank = ranked.cumsum(axis=0, dtype=np.int32)
    weights = np.exp(-decay * (np.arange(len(chunks) + 1) - 1))[rank]
    weights *= ranked
    weights /= weights.sum(axis=0)
    return weights if order == 'oldest_first' else weights[::-1]


def mode_for(parameters: HandoverParameters, newest: LiveChunk) -> HandoverMode:
    """Return the mode of a hand-over; `rtc` blends a chunk not conditioned on the plan."""
    return 'blend' if parameters.mode == 'rtc' and not newest.tied else parameters.mode


def hand_over(
    parameters: HandoverParameters,
    old: np.ndarray,
    chunks: Sequence[LiveChunk],
    join_step: int,
    blended: np.ndarray | None = None,
) -> np.ndarray:
    """The rows to execute from `join_step` on, (rows left of the new chunk, columns), a new array.

    Args:
        old: (n, columns) rows of the plan in force from `join_step` on, as far as it goes.
        chunks: live chunks, oldest first; the last one takes over.
        blended: (columns,) bool, those that a `blend` cross-fades; None: all of them.
    """
    newest = chunks[-1]
    new = newest.rows[join_step - newest.first_step :]
    mode = mode_for(parameters, newest)
    if mode == 'blend':
        return blend_rows(old, new, parameters.blend_steps, blended)
    if mode == 'ensemble':
        return ensemble_rows(
            chunks, join_step, parameters.ensemble_decay, parameters.ensemble_order
        )
    return new.copy()
