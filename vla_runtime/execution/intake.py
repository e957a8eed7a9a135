"""Checks of a chunk against the present: order, age, step time, place in the plan, start."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_runtime.execution.columns import CommandColumns, write_alike
from vla_runtime.execution.command import ChunkRefusal
from vla_runtime.execution.handover import LiveChunk
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.state import clock_hint
from vla_runtime.execution.timeline import Timeline
from vla_runtime.types import ChunkHeader, same_step_time


class Refused(Exception):  # noqa: N818 - it is an answer, not an error
    """Refusal of a chunk: the reason, and a message."""

    def __init__(self, refusal: ChunkRefusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


class StartTooFar(Refused):
    """The row to set out with is too far from where the robot stands."""

    def __init__(self, text: str, first_row: np.ndarray) -> None:
        super().__init__(ChunkRefusal.START_TOO_FAR, text)
        self.first_row = first_row


@dataclass(frozen=True)
class RobotAtArrival:
    """Position of the robot when a chunk arrives, for the case that it holds.

    Attributes:
        setpoints: (columns,) last commanded values; the executor's own array. Columns of
            `unknown` are overwritten with the first row of the chunk that sets out.
        measured: (columns,) where the robot is; the last command where nothing is measured.
        unknown: (columns,) bool, positions that were neither measured nor commanded yet.
        lowest, highest: (columns,) bounds of what can be commanded; a row beyond is executed as the
            bound.
        cold: nothing was executed just before, so the chunk's start has to be near.
        starved: the robot holds because this chunk is late.
    """

    setpoints: np.ndarray
    measured: np.ndarray
    unknown: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray
    cold: bool
    starved: bool


class ChunkOrder:
    """The order in which chunks are accepted: by the time of their observations, then by number.

    A newer observation with a lower number is of a restarted policy; an older one is out of order
    whatever its number. The same observation with a higher number is a new inference from the
    newest frames that there are.
    """

    def __init__(self) -> None:
        self._last: ChunkHeader | None = None

    def clear(self) -> None:
        """Forget the chunks accepted so far."""
        self._last = None

    def require_newer(self, header: ChunkHeader) -> None:
        """Raise `Refused` for an observation, number or request before the last accepted one's."""
        last = self._last
        if last is None:
            return
        if header.request is not None and last.request is not None:
            self._require_newer_request(header, last, header.request, last.request)
        if header.observation_ns > last.observation_ns:
            return
        behind_s = (last.observation_ns - header.observation_ns) * 1e-9
        if not behind_s and header.number > last.number:
            return
        if not behind_s and header.number == last.number:
            raise Refused(ChunkRefusal.DUPLICATE, f'chunk {header.number} was already taken')
        if not behind_s:
            raise Refused(
                ChunkRefusal.OUT_OF_ORDER,
                f'chunk {header.number} is of the same observation as chunk {last.number}, which '
                'is in force and came later',
            )
        raise Refused(
            ChunkRefusal.OUT_OF_ORDER,
            f'chunk {header.number} has an observation {behind_s:.3f} s before that of chunk '
            f'{last.number}, which is in force',
        )

    @staticmethod
    def _require_newer_request(
        header: ChunkHeader, last: ChunkHeader, request: int, last_request: int
    ) -> None:
        if request < last_request:
            raise Refused(
                ChunkRefusal.OUT_OF_ORDER,
                f'chunk {header.number} answers request {request}, but chunk {last.number}, which '
                f'is in force, answers request {last_request}',
            )

    def restarted(self, header: ChunkHeader) -> bool:
        """Return whether the numbers went back: another policy process answers."""
        return self._last is not None and header.number <= self._last.number

    def take(self, header: ChunkHeader) -> None:
        self._last = header


def require_age(
    header: ChunkHeader, now_ros_ns: int, max_age_s: float, future_tolerance_s: float
) -> None:
    age_s = (now_ros_ns - header.observation_ns) * 1e-9
    if age_s < -future_tolerance_s:
        raise Refused(
            ChunkRefusal.OBSERVATION_FROM_FUTURE,
            f'chunk {header.number} has an observation {-age_s:.3f} s in the future'
            + clock_hint(age_s, '; do policy and executor use the same clock (use_sim_time)?'),
        )
    if age_s > max_age_s:
        raise Refused(
            ChunkRefusal.OBSERVATION_TOO_OLD,
            f'chunk {header.number} has an observation {age_s:.3f} s old, at most {max_age_s:g} s '
            f'allowed (max_observation_age_s){clock_hint(age_s)}',
        )


def step_nanoseconds(step_time_s: float, step_ns: int) -> int:
    """A chunk's step time in nanoseconds, which is the episode's (`step_ns`; 0: none yet).

    Raises:
        Refused: another than that of the episode's first chunk.
    """
    if step_ns and not same_step_time(step_time_s, step_ns * 1e-9):
        raise Refused(
            ChunkRefusal.WRONG_STEP_TIME,
            f'step time is {step_time_s:g} s, but this episode runs at {step_ns * 1e-9:g} s; reset '
            'the executor after changing the policy',
        )
    return step_ns or round(step_time_s * 1e9)


def place(
    header: ChunkHeader,
    first_step: int,
    rows: np.ndarray,
    timeline: Timeline,
    parameters: ExecutorParameters,
    columns: CommandColumns,
) -> LiveChunk:
    """Place a chunk on the grid of steps, its rotations written as in the plan before it.

    Args:
        first_step: the step that was current at its observation.
        rows: (horizon, columns) in the executor's order.

    Raises:
        Refused: it has too few rows to serve there.
    """
    if parameters.replan_interval > len(rows):
        raise Refused(
            ChunkRefusal.INTERVAL_EXCEEDS_HORIZON,
            f'replan_interval is {parameters.replan_interval} steps but the chunk has only '
            f'{len(rows)}; set replan_interval between 1 and {len(rows)}',
        )
    index = timeline.joins_at() - first_step
    if index >= len(rows):
        raise Refused(
            ChunkRefusal.USEFUL_PART_PAST,
            f'chunk {header.number} has {len(rows)} rows, but it could only be joined at row '
            f'{index}: {index} steps lie between its observation and the end of the replan '
            'interval in force; the policy is too slow for its horizon',
        )
    alike = write_alike(rows, columns, timeline.setpoint_at_join(), index)
    return LiveChunk(
        header.number, first_step, alike, header.tied, observation_ns=header.observation_ns
    )


def require_near(
    row: np.ndarray, start_state: RobotAtArrival, tolerance: np.ndarray, columns: CommandColumns
) -> None:
    """Raise `StartTooFar` for a first row far from both the command and the robot (it may sag)."""
    reached = np.clip(row, start_state.lowest, start_state.highest)
    from_command, from_robot = (
        columns.distance(place, reached) for place in (start_state.setpoints, start_state.measured)
    )
    # A position that is not a number is near to nothing.
    distance = np.fmin(from_command, from_robot) / tolerance
    distance[columns.is_velocity | start_state.unknown] = 0.0
    worst = int(np.argmax(distance))
    if distance[worst] > 1.0:
        if columns.in_rotation[worst]:
            raise StartTooFar(
                f"'{columns.labels[worst]}' would start {from_command[worst]:.3g} rad from its "
                f'command; at most {tolerance[worst]:g} allowed (start tolerance)',
                row,
            )
        raise StartTooFar(
            f"'{columns.names[worst]}' would start at {row[worst]:.4g}, the robot is at "
            f'{start_state.measured[worst]:.4g} and commanded to '
            f'{start_state.setpoints[worst]:.4g}; at most {tolerance[worst]:g} '
            'apart allowed (start tolerance)',
            row,
        )
