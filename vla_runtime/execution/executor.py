"""The chunk executor: chunks and measured positions in, one command a tick out.

Invariants:
- Pure: every call is given the time. Nothing here reads a clock, sleeps, logs or starts a thread.
- `tick` and `submit_chunk` never raise: what cannot be handled ends in a hold that says why.
- One thread at a time. A node that ticks in one thread and receives in another holds a lock.
- The `Command` returned by `tick`, `stop` and `dead_man` is one object that the next call
  overwrites.
- To hold is to repeat the last commanded position and to command zero velocity, from the very tick
  that finds the reason. Before anything was commanded there is nothing to hold: the command is
  `IDLE` and must not be published. `start` takes the measured position as the first command, so a
  started executor always has something to hold.
- A steady clock (`now_s`) times ticks and requests; the ROS clock (`now_ros_ns`) dates data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from vla_runtime.execution.approach import Approach, StartParameters
from vla_runtime.execution.columns import Column, Columns, unwrap_rows
from vla_runtime.execution.command import (
    Command,
    CommandKind,
    CommittedSetpoints,
    Counters,
    Reason,
    Refusal,
    StartResult,
    SubmitResult,
)
from vla_runtime.execution.handover import LiveChunk, SeamReport
from vla_runtime.execution.history import StepHistory
from vla_runtime.execution.intake import (
    ChunkOrder,
    Refused,
    Stamped,
    ordered_rows,
    require_age,
    step_nanoseconds,
)
from vla_runtime.execution.limits import Limits, MotionLimiter, check_rows, make_limits
from vla_runtime.execution.replanner import DelayEstimator, ExecutorParameters, Requests
from vla_runtime.execution.state import MeasuredState
from vla_runtime.execution.timeline import Segment, Timeline
from vla_runtime.execution.watchdog import ClockWatch, StateWatch, WatchdogParameters
from vla_runtime.types import ActionChunk

_HISTORY_TICKS = 8192
_SEAMS_KEPT = 256
_LIVE_CHUNKS = 256


class Mode(str, Enum):
    """What the operator wants: nothing yet, a stop, or motion."""

    IDLE = 'idle'
    STOPPED = 'stopped'
    RUNNING = 'running'


@dataclass(frozen=True)
class ExecutorConfig:
    """What is fixed while an executor lives.

    Attributes:
        columns: what is commanded, in the robot's order.
        limits: of these columns; none when not given.
        start: how to set out.
        watchdog: when to stop.
        clamp_latch: this many clamped chunks in a row stop the robot until `reset`; 0 never does.
    """

    columns: tuple[Column, ...]
    limits: Limits | None = None
    start: StartParameters = field(default_factory=StartParameters)
    watchdog: WatchdogParameters = field(default_factory=WatchdogParameters)
    clamp_latch: int = 0

    def __post_init__(self) -> None:
        names = tuple(column.name for column in self.columns)
        if self.limits is not None and self.limits.names != names:
            raise ValueError(f'limits are for {self.limits.names}, the columns are {names}')
        if self.clamp_latch < 0:
            raise ValueError(f'clamp_latch is {self.clamp_latch}, expected 0 (never) or more')


@dataclass(frozen=True)
class ExecutorStatus:
    """For a status message; made outside the tick."""

    mode: Mode
    kind: CommandKind
    reason: Reason
    detail: str
    episode: int
    step: int
    replan_interval: int
    delay_estimate: int
    request_open: bool
    chunk: int
    pending_chunk: int
    clamp_latched: bool
    dry_run: bool


class ChunkExecutor:
    """Turns action chunks into commands; see the module's invariants."""

    def __init__(
        self, config: ExecutorConfig, parameters: ExecutorParameters, dry_run: bool = False
    ) -> None:
        self.config = config
        self.columns = Columns(config.columns)
        self.counters = Counters()
        self.seams: deque[SeamReport] = deque(maxlen=_SEAMS_KEPT)
        self.detail = ''
        limits = config.limits or make_limits(self.columns.names)
        self._limits = limits
        self._limiter = MotionLimiter(limits, self.columns)
        self._clock = ClockWatch(config.watchdog)
        self._state = MeasuredState(self.columns)
        self._state_watch = StateWatch(config.watchdog, self.columns)
        self._history = StepHistory(_HISTORY_TICKS)
        self._timeline = Timeline(self.columns.count)
        self._approach = Approach(self.columns, config.start)
        self._order = ChunkOrder()
        self._delays = DelayEstimator()
        self._requests = Requests()
        self._live: deque[LiveChunk] = deque(maxlen=_LIVE_CHUNKS)
        # `_parameters` are in force, `_staged` take over at the next chunk boundary.
        self._parameters = self._staged = parameters
        self._pending_delay = 0
        self._mode = Mode.IDLE
        self._stop_reason = Reason.NOT_STARTED
        self._fault: Reason | None = None
        self._latched = False
        self._clamped_in_row = 0
        self._cold = True
        self._held_since_s: float | None = None
        self._elapsed_ns = 0
        self._horizon = 0
        self._has_commanded = False
        self._target = np.zeros(self.columns.count)
        self._command = Command(
            CommandKind.IDLE,
            Reason.NOT_STARTED,
            np.zeros(self.columns.count),
            np.zeros(self.columns.count),
            dry_run=dry_run,
        )
        self.episode = 0

    # ---------------------------------------------------------------- operator

    def start(self, now_s: float, now_ros_ns: int) -> StartResult:
        """Allow motion. Needs a fresh measured state; commands nothing by itself.

        The first command is the last one where the robot is still near it, and the measured
        position otherwise: a robot that was moved by hand is not dragged back.
        """
        fault = self._state_watch.check(self._state, now_ros_ns)
        if fault is not None:
            return StartResult(False, self._state_watch.describe(fault, self._state, now_ros_ns))
        command, tolerance = self._command, self.config.start.tolerance
        guarded = self.columns.has_feedback & self.columns.is_position
        measured = self._state.positions
        if self.columns.any_continuous:
            self._state.bring_near(command.setpoints)
        keep = self._has_commanded and bool(
            (np.abs(command.setpoints - measured)[guarded] <= tolerance).all()
        )
        first = np.where(guarded & (not keep), measured, command.setpoints)
        first = np.clip(first, self._limits.hard_lower, self._limits.hard_upper)
        outside = guarded & (np.abs(first - measured) > tolerance)
        if outside.any():
            worst = int(np.argmax(outside))
            return StartResult(
                False,
                f"'{self.columns.names[worst]}' is at {measured[worst]:.4g}, more than "
                f'{tolerance:g} outside its limits; move it back inside by hand',
            )
        np.copyto(command.setpoints, first, where=self.columns.is_position)
        command.setpoints[self.columns.is_velocity] = 0.0
        self._has_commanded = True
        self._mode = Mode.RUNNING
        self._clock.restart()
        self._drop_plan()
        self._fault = None
        self._hold(Reason.WAITING_FOR_CHUNK)
        return StartResult(True)

    def stop(self, reason: Reason = Reason.STOPPED) -> Command:
        """Hold from now on, until `start`. The command returned is the last one to publish."""
        if self._mode is Mode.RUNNING:
            self._mode = Mode.STOPPED
            self._stop_reason = reason
            self._drop_plan()
            self.detail = ''
        return self._hold(self._stop_reason)

    def reset(self, episode: int) -> None:
        """Begin an episode: no plan, no chunk, no delay and no latch of the last one survives."""
        self._drop_plan()
        self._timeline.restart(0, self._command.setpoints)
        self.episode = episode
        self._history.clear()
        self._delays.clear()
        self._order.clear()
        self._elapsed_ns = 0
        self._latched = False
        self._clamped_in_row = 0
        if self._mode is Mode.RUNNING:
            self._hold(Reason.WAITING_FOR_CHUNK)

    def set_parameters(self, parameters: ExecutorParameters) -> None:
        """Take up other parameters at the next chunk boundary.

        Raises:
            ValueError: the replan interval exceeds the horizon of the last chunk.
        """
        if self._horizon:
            parameters.require_horizon(self._horizon)
        self._staged = parameters
        if self._timeline.pending is not None:
            self._splice(self._pending_delay)
        elif self._timeline.in_force is None:
            self._parameters = parameters

    def set_dry_run(self, dry_run: bool) -> Command:
        """Publish commands, or compute them only. A change stops the executor.

        A dry run's commands are nowhere near the robot, so what it commanded is forgotten.

        Returns:
            The last command to publish before the change: a hold.
        """
        last = self.stop()
        if dry_run != last.dry_run:
            final = Command(
                last.kind,
                last.reason,
                last.setpoints.copy(),
                last.velocities.copy(),
                dry_run=last.dry_run,
            )
            self._mode = Mode.IDLE
            self._stop_reason = Reason.NOT_STARTED
            self._has_commanded = False
            self._command.dry_run = dry_run
            self._hold(Reason.NOT_STARTED)
            return final
        return last

    # ---------------------------------------------------------------- inputs

    def observe_state(
        self, names: Sequence[str], positions: Sequence[float], stamp_ns: int
    ) -> None:
        """Take measured positions by name; see `MeasuredState.observe`."""
        self._state.observe(names, positions, stamp_ns)
        self.counters.states_malformed = self._state.malformed
        self.counters.states_out_of_order = self._state.out_of_order

    def submit_chunk(
        self,
        chunk: ActionChunk,
        observation_ns: int,
        episode: int,
        number: int,
        now_s: float,
        now_ros_ns: int,
    ) -> SubmitResult:
        """Offer a chunk. It is checked in full and taken whole, or refused whole.

        Args:
            chunk: the actions; columns are mapped by name.
            observation_ns: stamp of its observation, ROS clock.
            episode: the episode that it was made for.
            number: its inference number.
            now_s: steady clock.
            now_ros_ns: ROS clock.
        """
        self.counters.received += 1
        try:
            return self._take(chunk, Stamped(observation_ns, episode, number), now_s, now_ros_ns)
        except Refused as refused:
            refusal, text = refused.refusal, str(refused)
        except Exception as error:  # a chunk is input from outside: it must not end the executor
            self.counters.internal_errors += 1
            refusal, text = Refusal.INTERNAL_ERROR, f'{type(error).__name__}: {error}'
        self.counters.refused[refusal] += 1
        if refusal not in (Refusal.DUPLICATE, Refusal.OUT_OF_ORDER, Refusal.OTHER_EPISODE):
            self._requests.close()
        return SubmitResult(refusal, text)

    def _take(
        self, chunk: ActionChunk, stamped: Stamped, now_s: float, now_ros_ns: int
    ) -> SubmitResult:
        self._require_readiness(stamped)
        self._order.require_newer(stamped)
        watchdog, parameters = self.config.watchdog, self._staged
        require_age(
            stamped, now_ros_ns, parameters.max_observation_age_s, watchdog.future_tolerance_s
        )
        past = self._history.at(stamped.observation_ns)
        if past is None:
            raise Refused(
                Refusal.OBSERVATION_UNKNOWN,
                f'chunk {stamped.number} has an observation from before this executor, its '
                'episode or its last clock jump; which step was current then is not known',
            )
        rows = ordered_rows(chunk, self.columns)
        timeline = self._timeline
        if not timeline.step_ns:
            timeline.restart(step_nanoseconds(chunk, 0), self._command.setpoints)
        step_nanoseconds(chunk, timeline.step_ns)
        first_step = past[0] // timeline.step_ns
        delay = self._observe_delay(stamped, past)
        if parameters.replan_interval > len(rows):
            raise Refused(
                Refusal.INTERVAL_EXCEEDS_HORIZON,
                f'replan_interval is {parameters.replan_interval} steps but the chunk has only '
                f'{len(rows)}; set replan_interval between 1 and {len(rows)}',
            )
        if timeline.in_force is not None and timeline.at_end:
            self._drop_plan_in_force()
        join = timeline.joins_at()
        if join - first_step >= len(rows):
            raise Refused(
                Refusal.USEFUL_PART_PAST,
                f'chunk {stamped.number} has {len(rows)} rows, but {join - first_step} steps were '
                'consumed since its observation before it could take over; the policy is too slow '
                'for its horizon',
            )
        if self.columns.any_continuous:
            rows = unwrap_rows(
                rows, self.columns.is_continuous, timeline.setpoint_at_join(), join - first_step
            )
        check = check_rows(rows, timeline.step_time_s, self._limits, self.columns)
        if check.rejected:
            raise Refused(Refusal.LIMIT, check.rejected)
        self._count_clamped(bool(check.clamped), check.clamped)
        rows = check.rows
        self._set_out(rows[join - first_step], now_s)
        self._order.take(stamped)
        self._horizon = len(rows)
        self._live = deque(
            (live for live in self._live if live.end_step > join), maxlen=_LIVE_CHUNKS
        )
        self._live.append(LiveChunk(stamped.number, first_step, rows))
        return self._accept(delay, check.clamped, now_s)

    def _require_readiness(self, stamped: Stamped) -> None:
        """Raise `Refused` where no chunk would be taken, whatever is in it."""
        if self._mode is not Mode.RUNNING:
            raise Refused(Refusal.NOT_RUNNING, 'the executor is not started')
        if self._latched:
            raise Refused(Refusal.CLAMP_LATCH, self._latch_text())
        if self._fault is not None:
            raise Refused(Refusal.HOLDING, f'the robot holds: {self._fault.value}, {self.detail}')
        if stamped.episode != self.episode:
            raise Refused(
                Refusal.OTHER_EPISODE,
                f'chunk {stamped.number} is of episode {stamped.episode}, this is {self.episode}',
            )
        if self._approach.active:
            raise Refused(Refusal.APPROACHING, 'the robot is on its way to the start of a plan')

    def _observe_delay(self, stamped: Stamped, past: tuple[int, int]) -> int:
        """Steps between observation and arrival; those held for want of a chunk count too."""
        timeline = self._timeline
        consumed = timeline.next_step - past[0] // timeline.step_ns
        stalled_ns = (self._elapsed_ns - past[1]) - (timeline.consumed_ns - past[0])
        delay = consumed + max(0, -(-stalled_ns // timeline.step_ns))
        if self._order.restarted(stamped):
            self.counters.policy_restarts += 1
            self._delays.clear()
        self._delays.observe(delay, self._staged.delay)
        return delay

    def _count_clamped(self, clamped: bool, text: str) -> None:
        """Count clamped chunks in a row, and raise `Refused` when there were too many."""
        if not clamped:
            self._clamped_in_row = 0
            return
        self.counters.clamped += 1
        self._clamped_in_row += 1
        if 0 < self.config.clamp_latch <= self._clamped_in_row:
            self._latched = True
            raise Refused(Refusal.CLAMP_LATCH, f'{self._latch_text()}; the last: {text}')

    def _latch_text(self) -> str:
        return (
            f'{self._clamped_in_row} chunks in a row were outside the limits; find out why, then '
            'reset the executor'
        )

    def _set_out(self, first_row: np.ndarray, now_s: float) -> None:
        """From standstill: raise `Refused` when the first row is too far away."""
        if self._timeline.in_force is not None:
            return
        start = self.config.start
        held_s = now_s - self._held_since_s if self._held_since_s is not None else 0.0
        if not self._cold and held_s < start.cold_after_s:
            return
        distance = np.abs(first_row - self._command.setpoints)
        distance[self.columns.is_velocity] = 0.0
        worst = int(np.argmax(distance))
        if distance[worst] <= start.tolerance:
            return
        text = (
            f"'{self.columns.names[worst]}' would start at {first_row[worst]:.4g}, the robot is "
            f'at {self._command.setpoints[worst]:.4g}; at most {start.tolerance:g} apart allowed '
            '(start tolerance)'
        )
        if start.on_too_far == 'approach':
            self._approach.begin(self._command.setpoints, first_row)
            text += '; approaching it first'
        raise Refused(Refusal.START_TOO_FAR, text)

    def _accept(self, delay: int, clamped: str, now_s: float) -> SubmitResult:
        counters, timeline = self.counters, self._timeline
        counters.accepted += 1
        counters.superseded += timeline.pending is not None
        if timeline.in_force is None:
            self._parameters = self._staged
        segment = self._splice(delay)
        counters.late += segment.seam.late
        if self._requests.open or self._asks_now():
            self._requests.answer()
        self._cold = False
        text = [f'clamped: {clamped}'] if clamped else []
        wanted, horizon = self._staged.replan_interval, segment.chunk.rows.shape[0]
        if wanted + segment.join_index > horizon:
            counters.short += 1
            text.append(
                f'replan_interval {wanted} + delay {segment.join_index} steps exceed the horizon '
                f'{horizon}: only {horizon - segment.join_index} steps can be executed; lower '
                'replan_interval'
            )
        return SubmitResult(
            None, '; '.join(text), segment.join_step, segment.join_index, delay, bool(clamped)
        )

    def _splice(self, delay: int) -> Segment:
        self._pending_delay = delay
        return self._timeline.splice(self._live, delay, self._staged)

    # ---------------------------------------------------------------- requests

    @property
    def wants_chunk(self) -> bool:
        """Whether a chunk is wanted and none has been asked for yet."""
        return not self._requests.open and self._asks_now()

    def _asks_now(self) -> bool:
        if self._mode is not Mode.RUNNING or self._fault is not None or self._latched:
            return False
        if self._approach.active or self._requests.answered:
            return False
        segment = self._timeline.in_force
        if segment is None or self._timeline.at_end:
            return self._timeline.pending is None
        if self._parameters.replan_mode == 'synchronous':
            return False
        lead = self._delays.estimate(self._parameters.delay)
        return self._timeline.next_step >= segment.boundary - lead

    def poll_request(
        self, now_s: float, now_ros_ns: int, past_steps: int = 0
    ) -> CommittedSetpoints | None:
        """The committed plan to publish as a request, when a chunk is wanted; counts as asked."""
        if self._requests.timed_out(now_s, self._parameters.request_timeout_s):
            self._requests.close()
            self.counters.requests_timed_out += 1
        if not self.wants_chunk:
            return None
        self._requests.ask(now_s)
        self.counters.requests += 1
        return self.committed_plan(now_ros_ns, past_steps)

    def committed_plan(self, now_ros_ns: int, past_steps: int = 0) -> CommittedSetpoints:
        """What the executor will go on with, from the step that it is in.

        Args:
            now_ros_ns: ROS clock.
            past_steps: finished steps to put in front (a policy whose observation is older than
                the request needs them).
        """
        timeline = self._timeline
        first, rows = timeline.committed_rows(past_steps)
        past = timeline.current_step - first
        since_ns = timeline.consumed_ns - first * timeline.step_ns
        takeover = max(
            timeline.joins_at(),
            timeline.next_step + self._delays.estimate(self._parameters.delay),
        )
        return CommittedSetpoints(
            rows=rows,
            names=self.columns.names,
            step_time_s=timeline.step_time_s,
            first_step=first,
            stamp_ns=now_ros_ns - since_ns,
            past=past,
            certain=min(takeover - first, len(rows)),
            episode=self.episode,
        )

    # ---------------------------------------------------------------- the tick

    def tick(self, now_s: float, now_ros_ns: int) -> Command:
        """The command for this moment. Call at the control rate; never raises.

        Args:
            now_s: steady clock, seconds.
            now_ros_ns: ROS clock, nanoseconds.
        """
        try:
            return self._tick(now_s, now_ros_ns)
        except Exception as error:  # whatever it is, the robot must be told to hold
            self.counters.internal_errors += 1
            self._mode = Mode.STOPPED if self._has_commanded else Mode.IDLE
            self._stop_reason = Reason.INTERNAL_ERROR
            self.detail = f'{type(error).__name__}: {error}'
            return self._hold(Reason.INTERNAL_ERROR)

    def _tick(self, now_s: float, now_ros_ns: int) -> Command:
        self.counters.ticks += 1
        fault = self._clock.advance(now_s, now_ros_ns)
        if fault is Reason.CLOCK_JUMP:
            self.counters.clock_jumps += 1
            self._history.clear()
            self._order.clear()
            self._state.clear()
        elif fault is Reason.TICK_LATE:
            self.counters.late_ticks += 1
        if self._mode is not Mode.RUNNING:
            command = self._hold(self._stop_reason)
        else:
            command = self._run(fault, now_s, now_ros_ns)
        if fault is not Reason.CLOCK_JUMP:
            self._history.record(now_ros_ns, self._timeline.consumed_ns, self._elapsed_ns)
        return command

    def _run(self, fault: Reason | None, now_s: float, now_ros_ns: int) -> Command:
        if fault is None:
            fault = self._check(now_ros_ns)
        elif fault is not self._fault:
            self.detail = self._clock.detail
        self._fault = fault
        if fault is not None:
            return self._stop_for(fault, now_s)
        dt_ns = self._clock.dt_ns
        if dt_ns == 0:
            return self._command
        self._elapsed_ns += dt_ns
        if self._approach.active:
            return self._go_near(dt_ns * 1e-9, now_s)
        if self._timeline.at_end:
            return self._wait(now_s)
        return self._track(dt_ns, now_s)

    def _check(self, now_ros_ns: int) -> Reason | None:
        """The measured state and the latch; sets `detail` when a fault begins."""
        state, watch = self._state, self._state_watch
        fault = watch.check(state, now_ros_ns)
        if fault is not None:
            if fault is not self._fault:
                self.detail = watch.describe(fault, state, now_ros_ns)
            return fault
        if self.columns.any_continuous:
            state.bring_near(self._command.setpoints)
        if not self._command.dry_run and watch.too_far(self._command.setpoints, state.positions):
            self.detail = watch.describe_distance(self._command.setpoints, state.positions)
            return Reason.TRACKING_ERROR
        if self._latched:
            self.detail = self._latch_text()
            return Reason.CLAMP_LATCH
        return None

    def _stop_for(self, fault: Reason, now_s: float) -> Command:
        """Hold for a fault. A clock that stands still is the one that leaves the plan valid."""
        if fault is Reason.TRACKING_ERROR:
            # Pushing on against whatever is in the way is for a person to decide.
            return self.stop_for_good(fault)
        if fault is not Reason.CLOCK_STOPPED:
            self._drop_plan()
        return self._hold(fault, now_s)

    def stop_for_good(self, reason: Reason) -> Command:
        """Hold until `start`, keeping the reason and its detail."""
        detail = self.detail
        self.stop(reason)
        self.detail = detail
        return self._command

    def _wait(self, now_s: float) -> Command:
        """Nothing left to execute."""
        if self._timeline.in_force is not None:
            self._drop_plan_in_force()
        if self._command.reason in (Reason.WAITING_FOR_CHUNK, Reason.SYNCHRONOUS_WAIT):
            return self._hold(self._command.reason, now_s)
        if self._cold:
            return self._hold(Reason.WAITING_FOR_CHUNK, now_s)
        if self._parameters.replan_mode == 'synchronous':
            return self._hold(Reason.SYNCHRONOUS_WAIT, now_s)
        self.counters.starved_ticks += 1
        if self._command.reason is not Reason.STARVED:
            self.counters.starvations += 1
        return self._hold(Reason.STARVED, now_s)

    def _track(self, dt_ns: int, now_s: float) -> Command:
        timeline, counters, command = self._timeline, self.counters, self._command
        begun = timeline.next_step
        before = timeline.in_force
        if timeline.advance(dt_ns):
            self._take_over(before)
        counters.steps += timeline.next_step - begun
        step = timeline.sample_into(self._target, command.velocities)
        segment = timeline.in_force
        assert segment is not None
        if timeline.at_end:
            # The last row is reached and nothing follows: arrive at rest.
            command.velocities[:] = 0.0
            self._target[self.columns.is_velocity] = 0.0
        limits = self._limits
        if (
            limits.actions.step_from_measured == 'reject'
            and not command.dry_run
            and self._limiter.too_far(self._target, self._state.positions)
        ):
            self.detail = 'the plan is further from the measured position than step_from_measured'
            self._fault = Reason.STEP_FROM_MEASURED
            return self._stop_for(Reason.STEP_FROM_MEASURED, now_s)
        command.limited = self._limit(dt_ns * 1e-9)
        counters.limited_ticks += command.limited
        command.kind = CommandKind.TRACK
        overrun = step >= segment.boundary
        command.reason = Reason.OVERRUN if overrun else Reason.TRACKING
        if overrun:
            counters.overrun_ticks += 1
            counters.overrun_steps += timeline.next_step - max(begun, segment.boundary)
        command.step = step
        command.chunk = segment.chunk.number
        command.row = step - segment.chunk.first_step
        self._held_since_s = None
        self.detail = ''
        return command

    def _limit(self, dt_s: float, speed: np.ndarray | None = None) -> bool:
        command = self._command
        return self._limiter.apply(
            command.setpoints,
            self._target,
            command.velocities,
            self._state.positions,
            dt_s,
            speed,
            stay_near=not command.dry_run,
        )

    def _go_near(self, dt_s: float, now_s: float) -> Command:
        """One tick of the approach to the first row of a plan."""
        command, approach = self._command, self._approach
        np.copyto(self._target, approach.advance(dt_s, command.velocities))
        command.limited = self._limit(dt_s, approach.speed)
        if approach.arrived(command.setpoints):
            approach.stop()
            self._drop_plan()
            return self._hold(Reason.WAITING_FOR_CHUNK, now_s)
        command.kind = CommandKind.APPROACH
        command.reason = Reason.APPROACHING
        return command

    def _take_over(self, before: Segment | None) -> None:
        """A boundary was passed: the pending chunk is in force now."""
        segment = self._timeline.in_force
        assert segment is not None
        self.counters.taken_over += 1
        if before is not None:
            self._finish(before, segment.join_step)
        self._parameters = self._staged
        self.seams.append(segment.seam)
        self._requests.renew()

    def _finish(self, segment: Segment, end_step: int) -> None:
        """Account for the rows of a chunk whose execution is over."""
        counters, horizon = self.counters, len(segment.chunk.rows)
        executed = end_step - segment.join_step
        counters.rows_skipped += segment.join_index
        counters.rows_executed += executed
        counters.rows_left += horizon - segment.join_index - executed
        counters.rows_finished += horizon

    # ---------------------------------------------------------------- holding

    def _hold(self, reason: Reason, now_s: float | None = None) -> Command:
        """Stop where the last command was, from this tick on."""
        command = self._command
        command.kind = CommandKind.HOLD if self._has_commanded else CommandKind.IDLE
        if command.reason is not reason:
            self.counters.holds[reason] += 1
        command.reason = reason
        command.setpoints[self.columns.is_velocity] = 0.0
        command.velocities[:] = 0.0
        command.step = command.chunk = command.row = -1
        command.limited = False
        self._limiter.stop()
        if self._held_since_s is None:
            self._held_since_s = now_s
        return command

    def _drop_plan(self) -> None:
        """A fault, a stop or a start: nothing of the past is executed any more."""
        self._approach.stop()
        self._requests.close()
        self._requests.renew()
        self._live.clear()
        self._cold = True
        self._drop_plan_in_force()

    def _drop_plan_in_force(self) -> None:
        timeline = self._timeline
        if timeline.in_force is not None:
            self._finish(timeline.in_force, timeline.next_step)
        self.counters.dropped += timeline.pending is not None
        held = self._command.setpoints.copy()
        held[self.columns.is_velocity] = 0.0
        timeline.hold_at(held)

    def dead_man(self, now_s: float) -> Command | None:
        """The hold to publish when ticks have stopped coming; `None` while they come.

        For a timer of its own, on a steady clock: whatever keeps `tick` from being called, the
        robot is told to hold. The next tick finds the gap and drops the plan.
        """
        last_s = self._clock.last_s
        if last_s is None or now_s - last_s <= self.config.watchdog.tick_timeout_s:
            return None
        if self._mode is Mode.RUNNING and self._fault is None:
            self._fault = Reason.TICK_LATE
            self.detail = f'no tick for {now_s - last_s:.3f} s'
            self._drop_plan()
            return self._hold(Reason.TICK_LATE)
        return self._command

    @property
    def mode(self) -> Mode:
        return self._mode

    def status(self) -> ExecutorStatus:
        """A snapshot for a status message."""
        timeline, command = self._timeline, self._command
        return ExecutorStatus(
            mode=self._mode,
            kind=command.kind,
            reason=command.reason,
            detail=self.detail,
            episode=self.episode,
            step=timeline.current_step,
            replan_interval=self._parameters.replan_interval,
            delay_estimate=self._delays.estimate(self._parameters.delay),
            request_open=self._requests.open,
            chunk=timeline.in_force.chunk.number if timeline.in_force else -1,
            pending_chunk=timeline.pending.chunk.number if timeline.pending else -1,
            clamp_latched=self._latched,
            dry_run=command.dry_run,
        )
