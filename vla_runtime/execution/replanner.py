"""Replanning: the way of a chunk from its arrival to its last executed row.

A chunk is checked against what the robot is doing (order, age, the step at the hand-over), then
spliced into the timeline at the index that the robot has reached since its observation. It takes
over at the boundary of the one in force; parameters that were set meanwhile do so with it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from vla_runtime.execution.chunk_check import CheckedChunk
from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.command import ChunkRefusal, Counters, SubmitResult
from vla_runtime.execution.guard import ClampLatch
from vla_runtime.execution.handover import Handover, LiveChunk
from vla_runtime.execution.history import StepHistory
from vla_runtime.execution.intake import (
    ChunkOrder,
    Refused,
    RobotAtArrival,
    place,
    require_age,
    require_near,
    step_nanoseconds,
)
from vla_runtime.execution.limits import check_handed_over
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.requests import (
    MOST_OPEN,
    DelayEstimator,
    FrameAge,
    OpenRequest,
    Requests,
)
from vla_runtime.execution.timeline import Segment, Timeline
from vla_runtime.types import ChunkHeader, PlanRequest

# The oldest observation that may be allowed (60 s), at 1000 ticks a second.
_HISTORY_TICKS = 65_536
_SEAMS_KEPT = 256
_LIVE_CHUNKS = 256


class Replanner:
    """Takes chunks, keeps the timeline, asks for more; see the module's docstring."""

    def __init__(
        self,
        model: ColumnModel,
        latch: ClampLatch,
        parameters: ExecutorParameters,
        counters: Counters,
    ) -> None:
        self._columns, self._limits = model.columns, model.limits
        self._start_tolerance = model.tolerance
        self._latch = latch
        self._counters = counters
        self.parameters = parameters
        self.staged = parameters
        self.timeline = Timeline(model.columns.is_velocity)
        self.history = StepHistory(_HISTORY_TICKS)
        self.order = ChunkOrder()
        self.delays = DelayEstimator()
        self.frame_age = FrameAge()
        self.requests = Requests()
        self.handovers: deque[Handover] = deque(maxlen=_SEAMS_KEPT)
        self.episode = 0
        # Plan time that would have passed had the next chunk always been there, now and when a
        # chunk was asked for last.
        self.elapsed_ns = 0
        self._asked_elapsed_ns = 0
        # Age of the observation behind what is executed, at the last tick.
        self.observation_age_ns = 0
        self._live: deque[LiveChunk] = deque(maxlen=_LIVE_CHUNKS)
        # Rows of the last chunk taken; 0 before the first of an episode.
        self.horizon = 0
        # Those that the pending chunk was spliced with.
        self._spliced = parameters
        self._pending_delay = 0
        self._pending_clamped = False
        self._pending_cold = False
        self._pending_starved = False

    # ------------------------------------------------------------ episodes and parameters

    @property
    def unconditioned(self) -> bool:
        """True when, under `rtc`, the chunk in force was not conditioned on the plan before it."""
        segment = self.timeline.in_force
        if segment is None or self.parameters.handover.mode != 'rtc':
            return False
        return segment.seam.mode != 'rtc' and not segment.seam.from_hold

    def begin_episode(self, episode: int, setpoints: np.ndarray) -> None:
        """Hold at the setpoints; nothing of the last episode survives."""
        self.drop(setpoints)
        self.timeline.restart(0, setpoints)
        self.history.clear()
        self.delays.clear()
        self.frame_age.clear()
        self.order.clear()
        self.episode = episode
        self.elapsed_ns = self._asked_elapsed_ns = 0
        self.horizon = 0
        self.requests.most = 1

    def stage(self, parameters: ExecutorParameters) -> None:
        """Take up other parameters at the next chunk boundary.

        A chunk that waits there is handed over anew, unless that would be too fast where speed is
        rejected: they then come into force with the next one.

        Raises:
            ValueError: they want more steps than the last chunk had.
        """
        if self.horizon:
            parameters.require_horizon(self.horizon)
        self.staged = parameters
        if self.timeline.pending is not None:
            self._splice_anew()
        elif self.timeline.in_force is None:
            self.parameters = parameters

    # ------------------------------------------------------------ chunks

    def take(
        self,
        checked: CheckedChunk,
        header: ChunkHeader,
        now_ros_ns: int,
        future_tolerance_s: float,
        start_state: RobotAtArrival,
    ) -> SubmitResult:
        """Let a chunk take over at the next boundary (Refused: nothing of it is used)."""
        unset = self.timeline.step_ns == 0
        try:
            return self._take(checked, header, now_ros_ns, future_tolerance_s, start_state)
        except BaseException:
            # The step time of an episode is that of the first chunk taken, not of one refused.
            if unset:
                self.timeline.restart(0, start_state.setpoints)
            raise

    def _take(
        self,
        checked: CheckedChunk,
        header: ChunkHeader,
        now_ros_ns: int,
        future_tolerance_s: float,
        start_state: RobotAtArrival,
    ) -> SubmitResult:
        if self._latch.closed:
            raise Refused(ChunkRefusal.CLAMP_LATCH, self._latch.text)
        if header.episode != self.episode:
            raise Refused(
                ChunkRefusal.OTHER_EPISODE,
                f'chunk {header.number} is of episode {header.episode}, this is {self.episode}',
            )
        self.order.require_newer(header)
        asked = self.requests.find(header.request)
        if asked is None and header.request is not None:
            raise Refused(
                ChunkRefusal.REQUEST_CLOSED,
                f'chunk {header.number} answers request {header.request}, which is not open: it '
                'timed out (request_timeout_s), was answered already, or was dropped with its plan',
            )
        require_age(header, now_ros_ns, self.staged.max_observation_age_s, future_tolerance_s)
        past = self._past_of(header)
        if asked is not None:
            self.frame_age.observe(asked.asked_ros_ns - header.observation_ns)
        if checked.refusal is not None:
            raise Refused(checked.refusal, checked.text)
        timeline = self.timeline
        step_ns = step_nanoseconds(checked.step_time_s, timeline.step_ns)
        if not timeline.step_ns:
            timeline.restart(step_ns, start_state.setpoints)
        late = start_state.starved
        if timeline.in_force is not None and timeline.at_end:
            late = late or timeline.joins_at() > timeline.in_force.boundary
            self.finish_plan(start_state.setpoints)
        delay = self._observe_delay(header, past)
        first_step = past[0] // step_ns
        if header.tied and header.step is not None and header.step <= timeline.joins_at():
            # The policy counted rows in time; steps stand still while the robot holds.
            first_step = header.step
        # A chunk that was taken since it was asked for has replaced the plan that it continues.
        same_plan = asked is None or asked.accepted == self._counters.accepted
        live = replace(
            place(header, first_step, checked.rows, timeline, self.staged, self._columns),
            written=checked.written,
            tied=header.tied and same_plan,
        )
        join_step = timeline.joins_at()
        lives = [other for other in self._live if other.end_step > join_step] + [live]
        rows = None
        if timeline.in_force is not None or not start_state.cold:
            rows = timeline.handed_over(lives, self.staged)
        clamped = self._check_clamps(checked, rows)
        if timeline.in_force is None:
            self._set_out(live, start_state)
        self._counters.superseded += timeline.pending is not None
        self._counters.policy_restarts += self.order.restarted(header)
        self.order.take(header)
        self._live = deque(lives, maxlen=_LIVE_CHUNKS)
        self.requests.most = min(max(header.open_requests, 1), MOST_OPEN)
        return self._accept(header.request, delay, clamped, late, rows)

    def _past_of(self, header: ChunkHeader) -> tuple[int, int]:
        past = self.history.at(header.observation_ns)
        # A policy of an earlier release names no request that a stop could have closed.
        unnamed = header.request is None
        if past is None or (unnamed and self.history.before_drop(header.observation_ns)):
            raise Refused(
                ChunkRefusal.OBSERVATION_UNKNOWN,
                f'chunk {header.number} has an observation from before the last start, reset or '
                'clock jump; where the robot was in its plan then says nothing about now',
            )
        return past

    def _observe_delay(self, header: ChunkHeader, past: tuple[int, int]) -> int:
        """Count the delay in steps from observation to arrival, held steps included."""
        timeline = self.timeline
        consumed = timeline.next_step - past[0] // timeline.step_ns
        stalled_ns = (self.elapsed_ns - past[1]) - (timeline.consumed_ns - past[0])
        delay = consumed + max(0, -(-stalled_ns // timeline.step_ns))
        if self.order.restarted(header):
            self.delays.clear()
        self.delays.observe(delay, self.staged.delay)
        return delay

    def _check_clamps(self, checked: CheckedChunk, rows: np.ndarray | None) -> str:
        """Describe what is clamped, in the chunk or across its hand-over; may raise `Refused`."""
        found = [checked.clamped]
        if rows is not None:
            too_fast = self._too_fast(rows)
            if too_fast and self._limits.actions.velocity == 'reject':
                raise Refused(ChunkRefusal.LIMIT, too_fast)
            found.append(too_fast)
        clamped = '; '.join(text for text in found if text)
        self._counters.clamped += bool(clamped)
        self._latch.count(clamped)
        if self._latch.closed:
            raise Refused(ChunkRefusal.CLAMP_LATCH, self._latch.text)
        return clamped

    def _too_fast(self, rows: np.ndarray) -> str:
        wanted = self.staged.replan_interval + self.staged.overrun_steps
        before, step_s = self.timeline.setpoint_at_join(), self.timeline.step_time_s
        return check_handed_over(before, rows[:wanted], step_s, self._limits, self._columns)

    def _set_out(self, live: LiveChunk, start_state: RobotAtArrival) -> None:
        """Begin from standstill; unknown positions are taken to be the first row's."""
        row = live.rows[self.timeline.joins_at() - live.first_step]
        if start_state.cold:
            require_near(row, start_state, self._start_tolerance, self._columns)
        if start_state.unknown.any():
            np.copyto(start_state.setpoints, row, where=start_state.unknown)
            self.timeline.set_out_from(self._at_rest(start_state.setpoints))

    def _accept(
        self, request: int | None, delay: int, clamped: str, starved: bool, rows: np.ndarray | None
    ) -> SubmitResult:
        counters, timeline = self._counters, self.timeline
        counters.accepted += 1
        if timeline.in_force is None:
            self.parameters = self.staged
        # A request is answered; one that is due need not be sent.
        if self.requests.open or self.due:
            self.requests.answer(request)
        self._pending_delay, self._pending_starved = delay, starved
        self._pending_clamped, self._pending_cold = bool(clamped), rows is None
        segment = self._splice(rows)
        counters.late += segment.seam.late
        self.horizon = len(segment.chunk.rows)
        text = [f'clamped: {clamped}'] if clamped else []
        interval, left = self.staged.replan_interval, self.horizon - segment.join_index
        if interval > left:
            counters.short += 1
            text.append(
                f'replan_interval {interval} + delay {segment.join_index} steps exceed the '
                f'horizon {self.horizon}: only {left} steps can be executed; lower '
                'replan_interval'
            )
        return SubmitResult(
            None, '; '.join(text), segment.join_step, segment.join_index, delay, bool(clamped)
        )

    def _splice_anew(self) -> None:
        rows = self.timeline.handed_over(self._live, self.staged)
        too_fast = '' if self._pending_cold else self._too_fast(rows)
        if too_fast and self._limits.actions.velocity == 'reject':
            return
        if too_fast and not self._pending_clamped:
            self._pending_clamped = True
            self._counters.clamped += 1
            self._latch.count(too_fast)
        self._splice(rows)

    def _splice(self, rows: np.ndarray | None = None) -> Segment:
        self._spliced = self.staged
        return self.timeline.splice(
            self._live, self._pending_delay, self.staged, self._pending_starved, rows
        )

    # ------------------------------------------------------------ requests

    @property
    def due(self) -> bool:
        timeline, requests = self.timeline, self.requests
        segment = timeline.in_force
        if self._latch.closed:
            return False
        if requests.open or requests.answered:
            return self._due_beside(len(requests.open) + requests.answered)
        if segment is None or timeline.at_end:
            return timeline.pending is None and self._leaves_rows_at(timeline.next_step)
        if self.parameters.replan_mode == 'synchronous':
            return False
        if timeline.current_step < segment.boundary - self._lead:
            return False
        return self._leaves_rows_at(segment.end_step)

    def _due_beside(self, served: int) -> bool:
        """Return whether to ask for another chunk while others are awaited or wait to take over."""
        requests, parameters, timeline = self.requests, self.parameters, self.timeline
        if len(requests.open) >= requests.most or requests.most == 1:
            return False
        if parameters.replan_mode == 'synchronous' or not timeline.step_ns:
            return False
        apart_ns = parameters.replan_interval * timeline.step_ns
        if self.elapsed_ns - self._asked_elapsed_ns < apart_ns:
            return False
        segment = timeline.in_force
        boundary = timeline.next_step if segment is None else segment.boundary
        return self._leaves_rows_at(boundary + served * parameters.replan_interval)

    @property
    def _lead(self) -> int:
        """Steps before the boundary of the chunk in force at which the next one is asked for."""
        lead = self.delays.estimate(self.parameters.delay)
        if self.parameters.interpolation == 'cubic':
            # A step that has begun keeps its curve. So where the last one brakes, its successor
            # has to be there before it begins.
            lead += self.timeline.brakes_early
        if lead < self.horizon:
            return lead
        # An inference takes longer than a chunk lasts, and the robot has to wait for it. It goes
        # furthest with chunks that have a whole interval left.
        return self.horizon - self.parameters.replan_interval

    def _leaves_rows_at(self, end_step: int) -> bool:
        """Return whether a chunk of the newest frames has rows left when the plan ends."""
        ages = self.frame_age
        # An answer without rows left costs an inference. A robot that is at rest meanwhile waits
        # until even an old frame leaves some.
        age_ns = ages.longest_of_many_ns if self._outlasted else ages.longest_ns
        seen = self.history.before_newest(age_ns)
        if seen is None or not self.horizon:
            return True
        return end_step - seen[0] // self.timeline.step_ns < self.horizon

    @property
    def _outlasted(self) -> bool:
        return self.delays.shortest >= self.horizon

    def ask(self, now_s: float, now_ros_ns: int, past_steps: int) -> PlanRequest:
        self._asked_elapsed_ns = self.elapsed_ns
        self._counters.requests += 1
        request = self.requests.ask(now_s, now_ros_ns, self._counters.accepted)
        return self.committed_plan(now_ros_ns, past_steps, request)

    def committed_plan(
        self, now_ros_ns: int, past_steps: int, request: OpenRequest | None = None
    ) -> PlanRequest:
        """Return the setpoints still to be executed, from the current step on."""
        timeline, requests = self.timeline, self.requests
        first, rows = timeline.committed_rows(past_steps)
        takeover = timeline.joins_at()
        if not requests.open or request is None or request is requests.open[0]:
            delay = self.delays.estimate(self.parameters.delay)
            takeover = max(takeover, timeline.next_step + delay)
        return PlanRequest(
            rows=self._as_written(first, rows),
            names=self._columns.chunk_names,
            kinds=self._columns.chunk_kinds,
            step_time_s=timeline.step_time_s,
            stamp_ns=now_ros_ns - (timeline.consumed_ns - first * timeline.step_ns),
            episode=self.episode,
            certain=min(takeover - first, len(rows)),
            request=requests.number if request is None else request.number,
            step=first,
        )

    def _as_written(self, first: int, rows: np.ndarray) -> np.ndarray:
        """Convert the plan's rows, from a step on, to the form of the newest chunk's rows."""
        form, segment = self._columns.form, self.timeline.pending or self.timeline.in_force
        if form is None:
            return rows
        steps = np.arange(first, first + len(rows))
        return form.to_chunk(rows, segment.chunk.written_at(steps) if segment else None)

    # ------------------------------------------------------------ plan time

    def note_age(self, segment: Segment, now_ros_ns: int) -> None:
        """Count how old the observation behind a tick of this segment is."""
        self.observation_age_ns = now_ros_ns - segment.chunk.observation_ns
        self._counters.tracked_ticks += 1
        self._counters.observation_age_ns += self.observation_age_ns

    def record(self, now_ros_ns: int) -> None:
        self.history.record(now_ros_ns, self.timeline.consumed_ns, self.elapsed_ns)

    def advance(self, dt_ns: int) -> Segment:
        """Let plan time pass, where the timeline is not at its end; return the segment in force."""
        timeline, counters = self.timeline, self._counters
        begun = timeline.next_step
        took_over = timeline.advance(dt_ns)
        segment = timeline.in_force
        assert segment is not None
        counters.steps += timeline.next_step - begun
        if took_over:
            counters.taken_over += 1
            self.parameters = self._spliced
            self.handovers.append(segment.seam)
            self.requests.renew()
        past_boundary = timeline.next_step - max(begun, segment.boundary)
        counters.overrun_steps += max(0, past_boundary)
        return segment

    def finish_plan(self, setpoints: np.ndarray) -> None:
        """Hold at the setpoints, at the plan's end, and forget what chunks said."""
        self._live.clear()
        self.parameters = self.staged
        self._counters.dropped += self.timeline.pending is not None
        self.timeline.hold_at(self._at_rest(setpoints))

    def drop(self, setpoints: np.ndarray) -> None:
        """Drop the plan and all chunks, after a fault, a stop or a start."""
        self.requests.flush()
        self.history.note_drop()
        self.finish_plan(setpoints)

    def _at_rest(self, setpoints: np.ndarray) -> np.ndarray:
        return np.where(self._columns.is_velocity, 0.0, setpoints)
