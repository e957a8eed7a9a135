"""Whether a chunk may be used: its place in the order of things, its shape, its joints.

What is said here is said before anything of the chunk is used. Limits come next (`limits`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_runtime.execution.columns import Columns
from vla_runtime.execution.command import Refusal
from vla_runtime.types import ActionChunk

# Step times of one episode may differ by the rounding of a message's nanoseconds, no more.
_STEP_TIME_SLACK_S = 1e-6
# No robot is commanded a number like this in any unit; arithmetic on larger ones may overflow.
_LARGEST = 1e6


class Refused(Exception):  # noqa: N818 - it is an answer, not an error
    """A chunk is refused: for which reason, and in words."""

    def __init__(self, refusal: Refusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


class StartTooFar(Refused):
    """The row to set out with is too far from where the robot stands."""

    def __init__(self, text: str, first_row: np.ndarray) -> None:
        super().__init__(Refusal.START_TOO_FAR, text)
        self.first_row = first_row


@dataclass(frozen=True)
class Stamped:
    """What comes with a chunk besides its actions.

    Attributes:
        observation_ns: stamp of its observation, ROS clock.
        episode: episode that it was made for.
        number: inference number.
        tied: it was made to continue the plan that the request carried.
    """

    observation_ns: int
    episode: int
    number: int
    tied: bool = True


class ChunkOrder:
    """The order in which chunks are taken: by the time of their observations.

    Inference numbers start anew when a policy process is restarted, times do not. So a newer
    observation with a lower number is a restarted policy, and an older one is out of order
    whatever its number.
    """

    def __init__(self) -> None:
        self._last: Stamped | None = None

    def clear(self) -> None:
        """Nothing was taken yet, or stamps of the past say nothing any more."""
        self._last = None

    def require_newer(self, stamped: Stamped) -> None:
        """Raise `Refused` unless its observation is newer than that of the last chunk taken."""
        last = self._last
        if last is None or stamped.observation_ns > last.observation_ns:
            return
        if stamped == last:
            raise Refused(Refusal.DUPLICATE, f'chunk {stamped.number} was already taken')
        behind_s = (last.observation_ns - stamped.observation_ns) * 1e-9
        raise Refused(
            Refusal.OUT_OF_ORDER,
            f'chunk {stamped.number} has an observation {behind_s:.3f} s before that of chunk '
            f'{last.number}, which is in force',
        )

    def restarted(self, stamped: Stamped) -> bool:
        """Whether the numbers went back: another policy process is speaking."""
        return self._last is not None and stamped.number <= self._last.number

    def take(self, stamped: Stamped) -> None:
        """Remember it as the last one taken."""
        self._last = stamped


def require_age(
    stamped: Stamped, now_ros_ns: int, max_age_s: float, future_tolerance_s: float
) -> None:
    """Raise `Refused` for an observation that is too old, or from the future."""
    age_s = (now_ros_ns - stamped.observation_ns) * 1e-9
    if age_s < -future_tolerance_s:
        raise Refused(
            Refusal.OBSERVATION_FROM_FUTURE,
            f'chunk {stamped.number} has an observation {-age_s:.3f} s in the future; do policy '
            'and executor use the same clock (use_sim_time)?',
        )
    if age_s > max_age_s:
        raise Refused(
            Refusal.OBSERVATION_TOO_OLD,
            f'chunk {stamped.number} has an observation {age_s:.3f} s old, at most {max_age_s:g} s '
            'allowed (max_observation_age_s)',
        )


def ordered_rows(chunk: ActionChunk, columns: Columns) -> np.ndarray:
    """The chunk's actions in the executor's order.

    Returns:
        (horizon, columns) float64, finite, a copy.

    Raises:
        Refused: wrong shape, wrong joints, wrong kinds, or a value that is not a number.
    """
    try:
        actions = np.array(chunk.actions, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise Refused(Refusal.MALFORMED, f'actions are no array of numbers: {error}') from error
    names, kinds = tuple(chunk.names), tuple(chunk.kinds)
    if actions.ndim != 2 or not len(actions) or actions.shape[1] != len(names):
        raise Refused(
            Refusal.MALFORMED,
            f'actions have shape {actions.shape}, expected (1 or more, {len(names)}) for the '
            f'names {list(names)}',
        )
    if len(kinds) != len(names):
        raise Refused(Refusal.MALFORMED, f'{len(kinds)} kinds for {len(names)} names')
    try:
        order = columns.order_of(names)
    except ValueError as error:
        raise Refused(Refusal.WRONG_JOINTS, str(error)) from error
    for name, expected, at in zip(columns.names, columns.kinds, order, strict=True):
        if kinds[at] != expected:
            raise Refused(
                Refusal.WRONG_JOINTS,
                f"the chunk gives '{name}' as {kinds[at]}, the executor commands its {expected}; "
                "make the bundle's action kinds and the robot file agree",
            )
    rows = actions[:, order]
    usable = np.abs(rows) <= _LARGEST
    if not usable.all():
        row, column = np.argwhere(~usable)[0]
        raise Refused(
            Refusal.NOT_FINITE,
            f"'{columns.names[column]}' in row {row} is {rows[row, column]}, expected a finite "
            f'number of at most {_LARGEST:g}',
        )
    return rows


def step_nanoseconds(chunk: ActionChunk, step_ns: int) -> int:
    """The chunk's step time in nanoseconds, which is the episode's.

    Args:
        chunk: the chunk.
        step_ns: step time of the episode, 0 when this chunk is its first.

    Raises:
        Refused: no sensible time, or another than that of the episode's first chunk.
    """
    step_s = chunk.step_time_s
    if not 1e-3 <= step_s <= 10.0:
        raise Refused(
            Refusal.WRONG_STEP_TIME, f'step time is {step_s} s, expected 0.001 to 10 seconds'
        )
    if step_ns and abs(step_s - step_ns * 1e-9) > _STEP_TIME_SLACK_S:
        raise Refused(
            Refusal.WRONG_STEP_TIME,
            f'step time is {step_s:g} s, but this episode runs at {step_ns * 1e-9:g} s; reset the '
            'executor after changing the policy',
        )
    return step_ns or round(step_s * 1e9)
