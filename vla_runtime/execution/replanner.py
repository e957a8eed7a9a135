"""Which chunk is executed when: the way of a chunk from its arrival to its last executed row.

A chunk is checked in full (order, age, joints, values, limits), then spliced into the timeline
behind the one in force, at the index that the robot has reached since its observation. It takes
over at the boundary of the one in force. Whether the robot may move at all is not decided here but
in `executor`.

Parameters are staged: they come into force with the next chunk that takes over.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from vla_runtime.execution.approach import StartParameters
from vla_runtime.execution.columns import Columns, write_alike
from vla_runtime.execution.command import CommittedSetpoints, Counters, Refusal, SubmitResult
from vla_runtime.execution.handover import LiveChunk, SeamReport
from vla_runtime.execution.history import StepHistory
from vla_runtime.execution.intake import (
    ChunkOrder,
    Refused,
    Stamped,
    StartTooFar,
    ordered_rows,
    require_age,
    step_nanoseconds,
)
from vla_runtime.execution.limits import Limits, check_rows
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.requests import DelayEstimator, Requests
from vla_runtime.execution.timeline import Segment, Timeline
from vla_runtime.types import ActionChunk

_HISTORY_TICKS = 8192
_SEAMS_KEPT = 256
_LIVE_CHUNKS = 256


@dataclass(frozen=True)
class Standstill:
    """Where the robot is when a chunk arrives, in case that it holds.

    Attributes:
        setpoints: (columns,) last commanded values; the executor's own array. Columns of
            `unknown` are overwritten with the first row of the chunk that sets out.
        unknown: (columns,) bool, positions that were neither measured nor commanded yet.
        cold: the chunk's start has to be near, because nothing was executed just before.
        starved: the robot holds because this chunk is late.
    """

    setpoints: np.ndarray
    unknown: np.ndarray
    cold: bool
    starved: bool


class Replanner:
    """Takes chunks, keeps the timeline, asks for more; see the module's words."""

    def __init__(
        self,
        columns: Columns,
        limits: Limits,
        start: StartParameters,
        clamp_latch: int,
        parameters: ExecutorParameters,
        counters: Counters,
    ) -> None:
        self._columns = columns
        self._limits = limits
        self._start = start
        self._clamp_latch = clamp_latch
        self._counters = counters
        self.parameters = parameters
        self.staged = parameters
        self.timeline = Timeline(columns.count)
        self.history = StepHistory(_HISTORY_TICKS)
        self.order = ChunkOrder()
        self.delays = DelayEstimator()
        self.requests = Requests()
        self.seams: deque[SeamReport] = deque(maxlen=_SEAMS_KEPT)
        self.episode = 0
        # Plan time that would have passed had the next chunk always been there.
        self.elapsed_ns = 0
        self.latched = False
        self._clamped_in_row = 0
        self._live: deque[LiveChunk] = deque(maxlen=_LIVE_CHUNKS)
        self._horizon = 0
        self._pending_delay = 0
        self._pending_starved = False

    # ------------------------------------------------------------ episodes and parameters

    @property
    def untied(self) -> bool:
        """Whether, under `rtc`, the chunk in force took over from a plan it was not tied to."""
        segment = self.timeline.in_force
        if segment is None or self.parameters.handover.mode != 'rtc':
            return False
        return segment.seam.mode != 'rtc' and not segment.seam.from_hold

    def reset(self, episode: int, setpoints: np.ndarray) -> None:
        """Begin an episode, holding at the setpoints; nothing of the last one survives."""
        self.drop(setpoints)
        self.timeline.restart(0, setpoints)
        self.history.clear()
        self.delays.clear()
        self.order.clear()
        self.episode = episode
        self.elapsed_ns = 0
        self.latched = False
        self._clamped_in_row = 0
        self._horizon = 0

    def stage(self, parameters: ExecutorParameters) -> None:
        """Take up other parameters at the next chunk boundary.

        Raises:
            ValueError: they want more steps than the last chunk had.
        """
        if self._horizon:
            parameters.require_horizon(self._horizon)
        self.staged = parameters
        if self.timeline.pending is not None:
            self._splice()
        elif self.timeline.in_force is None:
            self.parameters = parameters

    # ------------------------------------------------------------ chunks

    def take(
        self,
        chunk: ActionChunk,
        stamped: Stamped,
        now_ros_ns: int,
        future_tolerance_s: float,
        standstill: Standstill,
    ) -> SubmitResult:
        """Check a chunk in full and let it take over at the next boundary.

        Raises:
            Refused: nothing of it is used.
        """
        unset = self.timeline.step_ns == 0
        try:
            return self._take(chunk, stamped, now_ros_ns, future_tolerance_s, standstill)
        except BaseException:
            # The step time of an episode is that of the first chunk taken, not of one refused.
            if unset:
                self.timeline.restart(0, standstill.setpoints)
            raise

    def _take(
        self,
        chunk: ActionChunk,
        stamped: Stamped,
        now_ros_ns: int,
        future_tolerance_s: float,
        standstill: Standstill,
    ) -> SubmitResult:
        if self.latched:
            raise Refused(Refusal.CLAMP_LATCH, self.latch_text())
        if stamped.episode != self.episode:
            raise Refused(
                Refusal.OTHER_EPISODE,
                f'chunk {stamped.number} is of episode {stamped.episode}, this is {self.episode}',
            )
        self.order.require_newer(stamped)
        require_age(stamped, now_ros_ns, self.staged.max_observation_age_s, future_tolerance_s)
        past = self._past_of(stamped)
        rows = ordered_rows(chunk, self._columns)
        timeline = self.timeline
        step_ns = step_nanoseconds(chunk, timeline.step_ns)
        if not timeline.step_ns:
            timeline.restart(step_ns, standstill.setpoints)
        if timeline.in_force is not None and timeline.at_end:
            self.finish_plan(standstill.setpoints)
        delay = self._observe_delay(stamped, past)
        live = self._place(stamped, past[0] // timeline.step_ns, rows)
        checked = self._check(live)
        if timeline.in_force is None:
            self._set_out(live, standstill)
        self._counters.superseded += timeline.pending is not None
        self.order.take(stamped)
        self._live = deque(
            (other for other in self._live if other.end_step > timeline.joins_at()),
            maxlen=_LIVE_CHUNKS,
        )
        self._live.append(live)
        return self._accept(delay, checked, standstill.starved)

    def _past_of(self, stamped: Stamped) -> tuple[int, int]:
        past = self.history.at(stamped.observation_ns)
        if past is None:
            raise Refused(
                Refusal.OBSERVATION_UNKNOWN,
                f'chunk {stamped.number} has an observation from before the last start, reset or '
                'clock jump; where the robot was in its plan then says nothing about now',
            )
        return past

    def _observe_delay(self, stamped: Stamped, past: tuple[int, int]) -> int:
        """Steps between observation and arrival; those held for want of a chunk count too."""
        timeline = self.timeline
        consumed = timeline.next_step - past[0] // timeline.step_ns
        stalled_ns = (self.elapsed_ns - past[1]) - (timeline.consumed_ns - past[0])
        delay = consumed + max(0, -(-stalled_ns // timeline.step_ns))
        if self.order.restarted(stamped):
            self._counters.policy_restarts += 1
            self.delays.clear()
        self.delays.observe(delay, self.staged.delay)
        return delay

    def _place(self, stamped: Stamped, first_step: int, rows: np.ndarray) -> LiveChunk:
        """The chunk on the grid of steps; raise `Refused` when it cannot serve there."""
        if self.staged.replan_interval > len(rows):
            raise Refused(
                Refusal.INTERVAL_EXCEEDS_HORIZON,
                f'replan_interval is {self.staged.replan_interval} steps but the chunk has only '
                f'{len(rows)}; set replan_interval between 1 and {len(rows)}',
            )
        index = self.timeline.joins_at() - first_step
        if index >= len(rows):
            raise Refused(
                Refusal.USEFUL_PART_PAST,
                f'chunk {stamped.number} has {len(rows)} rows, but it could only be joined at row '
                f'{index}: {index} steps lie between its observation and the end of the replan '
                'interval in force; the policy is too slow for its horizon',
            )
        alike = write_alike(rows, self._columns, self.timeline.setpoint_at_join(), index)
        return LiveChunk(stamped.number, first_step, alike, stamped.tied)

    def _check(self, live: LiveChunk) -> str:
        """Check the limits and clamp in place; what was clamped, or raise `Refused`."""
        check = check_rows(live.rows, self.timeline.step_time_s, self._limits, self._columns)
        if check.rejected:
            raise Refused(Refusal.LIMIT, check.rejected)
        if not check.clamped:
            self._clamped_in_row = 0
            return ''
        self._counters.clamped += 1
        self._clamped_in_row += 1
        if 0 < self._clamp_latch <= self._clamped_in_row:
            self.latched = True
            raise Refused(Refusal.CLAMP_LATCH, f'{self.latch_text()}; the last: {check.clamped}')
        live.rows[:] = check.rows
        return check.clamped

    def latch_text(self) -> str:
        """Why the latch is closed, and what opens it."""
        return (
            f'{self._clamped_in_row} chunks in a row were outside the limits; find out why, then '
            'reset the executor'
        )

    def _set_out(self, live: LiveChunk, standstill: Standstill) -> None:
        """From standstill: raise `StartTooFar` when the first row is too far away."""
        row = live.rows[self.timeline.joins_at() - live.first_step]
        distance = np.abs(row - standstill.setpoints) / self._columns.scale
        distance[self._columns.is_velocity | standstill.unknown] = 0.0
        worst = int(np.argmax(distance))
        if standstill.cold and distance[worst] > self._start.tolerance:
            allowed = self._start.tolerance * self._columns.scale[worst]
            raise StartTooFar(
                f"'{self._columns.names[worst]}' would start at {row[worst]:.4g}, the robot is "
                f'at {standstill.setpoints[worst]:.4g}; at most {allowed:g} apart '
                'allowed (start tolerance)',
                row,
            )
        if standstill.unknown.any():
            np.copyto(standstill.setpoints, row, where=standstill.unknown)
            self.timeline.set_out_from(self._at_rest(standstill.setpoints))

    def _accept(self, delay: int, clamped: str, starved: bool) -> SubmitResult:
        counters, timeline = self._counters, self.timeline
        counters.accepted += 1
        if timeline.in_force is None:
            self.parameters = self.staged
        # Whoever asked is answered, and nobody need ask whose time to ask had come.
        if self.requests.open or self.due:
            self.requests.answer()
        self._pending_delay, self._pending_starved = delay, starved
        segment = self._splice()
        counters.late += segment.seam.late
        self._horizon = len(segment.chunk.rows)
        text = [f'clamped: {clamped}'] if clamped else []
        interval, left = self.staged.replan_interval, self._horizon - segment.join_index
        if interval > left:
            counters.short += 1
            text.append(
                f'replan_interval {interval} + delay {segment.join_index} steps exceed the '
                f'horizon {self._horizon}: only {left} steps can be executed; lower '
                'replan_interval'
            )
        return SubmitResult(
            None, '; '.join(text), segment.join_step, segment.join_index, delay, bool(clamped)
        )

    def _splice(self) -> Segment:
        return self.timeline.splice(
            self._live, self._pending_delay, self.staged, self._pending_starved
        )

    # ------------------------------------------------------------ requests

    @property
    def due(self) -> bool:
        """Whether the time has come to have the next chunk made."""
        timeline = self.timeline
        segment = timeline.in_force
        if self.latched or self.requests.answered:
            return False
        if segment is None or timeline.at_end:
            return timeline.pending is None
        if self.parameters.replan_mode == 'synchronous':
            return False
        lead = self.delays.estimate(self.parameters.delay)
        return timeline.current_step >= segment.boundary - lead

    def committed_plan(self, now_ros_ns: int, past_steps: int) -> CommittedSetpoints:
        """What will be executed, from the step that plan time is in; see the executor's."""
        timeline = self.timeline
        first, rows = timeline.committed_rows(past_steps)
        takeover = max(
            timeline.joins_at(),
            timeline.next_step + self.delays.estimate(self.parameters.delay),
        )
        return CommittedSetpoints(
            rows=rows,
            names=self._columns.names,
            step_time_s=timeline.step_time_s,
            first_step=first,
            stamp_ns=now_ros_ns - (timeline.consumed_ns - first * timeline.step_ns),
            past=timeline.current_step - first,
            certain=min(takeover - first, len(rows)),
            episode=self.episode,
        )

    # ------------------------------------------------------------ plan time

    def record(self, now_ros_ns: int) -> None:
        """Remember which step is current at this ROS time."""
        self.history.record(now_ros_ns, self.timeline.consumed_ns, self.elapsed_ns)

    def advance(self, dt_ns: int) -> Segment:
        """Let plan time pass; only where the timeline is not at its end.

        Returns:
            The segment in force now.
        """
        timeline, counters = self.timeline, self._counters
        before, begun = timeline.in_force, timeline.next_step
        took_over = timeline.advance(dt_ns)
        segment = timeline.in_force
        assert segment is not None
        counters.steps += timeline.next_step - begun
        if took_over:
            counters.taken_over += 1
            self.parameters = self.staged
            self.seams.append(segment.seam)
            self.requests.renew()
            if before is not None:
                self._finish(before, segment.join_step)
        past_boundary = timeline.next_step - max(begun, segment.boundary)
        counters.overrun_steps += max(0, past_boundary)
        return segment

    def _finish(self, segment: Segment, end_step: int) -> None:
        """Account for the rows of a chunk whose execution is over."""
        counters, horizon = self._counters, len(segment.chunk.rows)
        executed = end_step - segment.join_step
        counters.rows_skipped += segment.join_index
        counters.rows_executed += executed
        counters.rows_left += horizon - segment.join_index - executed
        counters.rows_finished += horizon

    def finish_plan(self, setpoints: np.ndarray) -> None:
        """The plan is executed to its end: hold at the setpoints.

        What chunks said is forgotten with it: steps stand still in a hold, so that a chunk would
        stay live for ever, and a robot at rest has nothing to average with.
        """
        self._live.clear()
        timeline = self.timeline
        if timeline.in_force is not None:
            self._finish(timeline.in_force, timeline.next_step)
        self._counters.dropped += timeline.pending is not None
        timeline.hold_at(self._at_rest(setpoints))

    def drop(self, setpoints: np.ndarray) -> None:
        """A fault, a stop or a start: nothing of the past is executed any more."""
        self.requests.close()
        self.requests.renew()
        self.finish_plan(setpoints)

    def _at_rest(self, setpoints: np.ndarray) -> np.ndarray:
        return np.where(self._columns.is_velocity, 0.0, setpoints)
