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

from vla_runtime.execution.columns import Columns
from vla_runtime.execution.command import (
    Command,
    CommittedSetpoints,
    Counters,
    Reason,
    Refusal,
    StartResult,
    SubmitResult,
)
from vla_runtime.execution.commander import Commander
from vla_runtime.execution.config import ExecutorConfig, ExecutorStatus, Mode
from vla_runtime.execution.handover import SeamReport
from vla_runtime.execution.intake import Refused, Stamped, StartTooFar
from vla_runtime.execution.limits import make_limits
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.replanner import Replanner, Standstill
from vla_runtime.execution.state import MeasuredState
from vla_runtime.execution.watchdog import ClockWatch, StateWatch
from vla_runtime.types import ActionChunk

# Chunks refused for these reasons are stray ones; the answer to the open request is yet to come.
_LEAVES_REQUEST_OPEN = (Refusal.DUPLICATE, Refusal.OUT_OF_ORDER, Refusal.OTHER_EPISODE)


class ChunkExecutor:
    """Turns action chunks into commands; see the module's invariants.

    Around it, at the control rate:

        executor.observe_state(names, positions, stamp_ns)      # with every joint state
        command = executor.tick(now_s, now_ros_ns)
        if command.kind is not CommandKind.IDLE and not command.dry_run:
            publish(command.setpoints)
        request = executor.poll_request(now_s, now_ros_ns, past_steps=8)
        if request is not None:
            publish_committed_plan(request)

    and with every chunk `executor.submit_chunk(chunk, observation_ns, episode, number, …)`.
    """

    def __init__(
        self, config: ExecutorConfig, parameters: ExecutorParameters, dry_run: bool = False
    ) -> None:
        self.config = config
        self.columns = Columns(config.columns)
        self.counters = Counters()
        self.detail = ''
        limits = config.limits or make_limits(self.columns.names)
        self._commander = Commander(self.columns, limits, config.start, self.counters, dry_run)
        self._replanner = Replanner(
            self.columns, limits, config.start, config.clamp_latch, parameters, self.counters
        )
        self._clock = ClockWatch(config.watchdog)
        self._state = MeasuredState(self.columns)
        self._state_watch = StateWatch(config.watchdog, self.columns)
        self._mode = Mode.IDLE
        self._stop_reason = Reason.NOT_STARTED
        self._fault: Reason | None = None
        # Whether the next chunk sets out anew and has to begin where the robot is.
        self._cold = True

    # ------------------------------------------------------------ the operator

    def start(self, now_s: float, now_ros_ns: int) -> StartResult:
        """Allow motion. Needs a fresh measured state; commands nothing by itself.

        The robot holds the last command where it is still near it, and the measured position
        otherwise: a robot that was moved by hand is not dragged back. Chunks whose observation
        was made before the start are not taken.
        """
        if self._mode is Mode.RUNNING:
            return StartResult(True, 'already started')
        fault = self._state_watch.check(self._state, now_ros_ns)
        if fault is not None:
            return StartResult(False, self._state_watch.describe(fault, self._state, now_ros_ns))
        refused = self._commander.take_position(self._state)
        if refused:
            return StartResult(False, refused)
        self._mode = Mode.RUNNING
        self._fault = None
        self.detail = ''
        self._clock.restart()
        self._drop_plan()
        # A camera frame may be as old as a joint state that one may start on.
        fresh_ns = round(self.config.watchdog.max_state_age_s * 1e9)
        self._replanner.history.forget_before(now_ros_ns - fresh_ns)
        self._commander.held_since_s = None
        self._commander.hold(Reason.WAITING_FOR_CHUNK, now_s)
        return StartResult(True)

    def stop(self, reason: Reason = Reason.STOPPED) -> Command:
        """Hold from now on, until `start`. The command returned is the last one to publish."""
        if self._mode is Mode.RUNNING:
            self._mode = Mode.STOPPED
            self._stop_reason = reason
            self._drop_plan()
            if reason is Reason.STOPPED:
                self.detail = ''
        return self._commander.hold(self._stop_reason)

    def reset(self, episode: int) -> None:
        """Begin an episode: no plan, no chunk, no delay and no latch of the last one survives.

        A started executor stays started and holds until a chunk of the new episode comes.
        """
        self._drop_plan()
        self._replanner.reset(episode, self._commander.command.setpoints)
        if self._fault is Reason.CLAMP_LATCH:
            self._fault = None
        if self._mode is Mode.RUNNING:
            self._commander.hold(Reason.WAITING_FOR_CHUNK)

    def set_parameters(self, parameters: ExecutorParameters) -> None:
        """Take up other parameters at the next chunk boundary.

        Raises:
            ValueError: they want more steps than the last chunk had.
        """
        self._replanner.stage(parameters)

    def set_dry_run(self, dry_run: bool) -> Command:
        """Publish commands, or compute them only. A change stops the executor.

        What a dry run commanded is nowhere near the robot, so it is forgotten.

        Returns:
            A copy of the last command to publish before the change: a hold.
        """
        self.stop()
        last = self._commander.snapshot()
        if dry_run != last.dry_run:
            self._mode = Mode.IDLE
            self._stop_reason = Reason.NOT_STARTED
            self._commander.forget(dry_run)
            self._commander.hold(Reason.NOT_STARTED)
        return last

    # ------------------------------------------------------------ what comes in

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
        tied: bool = True,
    ) -> SubmitResult:
        """Offer a chunk. It is checked in full and taken whole, or refused whole; never raises.

        Args:
            chunk: the actions; columns are mapped by name.
            observation_ns: stamp of its observation, ROS clock.
            episode: the episode that it was made for.
            number: its inference number.
            now_s: steady clock.
            now_ros_ns: ROS clock.
            tied: it was made to continue the plan that the request carried.
        """
        self.counters.received += 1
        try:
            self._require_motion()
            return self._replanner.take(
                chunk,
                Stamped(observation_ns, episode, number, tied),
                now_ros_ns,
                self.config.watchdog.future_tolerance_s,
                self._standstill(now_s),
            )
        except StartTooFar as far:
            refusal, text = far.refusal, str(far)
            if self.config.start.on_too_far == 'approach':
                self._commander.set_out_for(far.first_row)
                text += '; approaching it first'
        except Refused as refused:
            refusal, text = refused.refusal, str(refused)
        except Exception as error:  # a chunk comes from outside: it must not end the executor
            self.counters.internal_errors += 1
            refusal, text = Refusal.INTERNAL_ERROR, f'{type(error).__name__}: {error}'
        self.counters.refused[refusal] += 1
        if refusal not in _LEAVES_REQUEST_OPEN:
            self._replanner.requests.close()
        return SubmitResult(refusal, text)

    def _require_motion(self) -> None:
        """Raise `Refused` where no chunk would be taken, whatever is in it."""
        if self._mode is not Mode.RUNNING:
            raise Refused(Refusal.NOT_RUNNING, 'the executor is not started')
        if self._fault is not None and self._fault is not Reason.CLAMP_LATCH:
            raise Refused(Refusal.HOLDING, f'the robot holds: {self._fault.value}, {self.detail}')
        if self._commander.approach.active:
            raise Refused(Refusal.APPROACHING, 'the robot is on its way to the start of a plan')

    def _standstill(self, now_s: float) -> Standstill:
        commander, since_s = self._commander, self._commander.held_since_s
        held_s = now_s - since_s if since_s is not None else 0.0
        return Standstill(
            setpoints=commander.command.setpoints,
            unknown=commander.unknown,
            cold=self._cold or held_s >= self.config.start.cold_after_s,
            starved=commander.command.reason is Reason.STARVED,
        )

    # ------------------------------------------------------------ what goes out

    @property
    def wants_chunk(self) -> bool:
        """Whether a chunk is wanted and none has been asked for yet."""
        may_move = self._mode is Mode.RUNNING and self._fault is None
        replanner = self._replanner
        return (
            may_move
            and not self._commander.approach.active
            and not replanner.requests.open
            and replanner.due
        )

    def poll_request(
        self, now_s: float, now_ros_ns: int, past_steps: int = 0
    ) -> CommittedSetpoints | None:
        """The committed plan to publish as a request, when a chunk is wanted; counts as asked."""
        requests = self._replanner.requests
        if requests.timed_out(now_s, self._replanner.parameters.request_timeout_s):
            requests.close()
            self.counters.requests_timed_out += 1
        if not self.wants_chunk:
            return None
        requests.ask(now_s)
        self.counters.requests += 1
        return self.committed_plan(now_ros_ns, past_steps)

    def committed_plan(self, now_ros_ns: int, past_steps: int = 0) -> CommittedSetpoints:
        """What the executor will go on with, from the step that it is in.

        Args:
            now_ros_ns: ROS clock.
            past_steps: finished steps to put in front, as far as they are kept (a policy whose
                observation is older than the request needs them).
        """
        return self._replanner.committed_plan(now_ros_ns, past_steps)

    @property
    def seams(self) -> deque[SeamReport]:
        """The latest seams, oldest first."""
        return self._replanner.seams

    @property
    def parameters(self) -> ExecutorParameters:
        """Those in force: what was set meanwhile waits for the next boundary."""
        return self._replanner.parameters

    @property
    def mode(self) -> Mode:
        return self._mode

    @property
    def episode(self) -> int:
        return self._replanner.episode

    def status(self) -> ExecutorStatus:
        """A snapshot for a status message."""
        replanner, command = self._replanner, self._commander.command
        timeline = replanner.timeline
        return ExecutorStatus(
            mode=self._mode,
            kind=command.kind,
            reason=command.reason,
            detail=self.detail,
            episode=replanner.episode,
            step=timeline.current_step,
            parameters=replanner.parameters,
            untied=replanner.untied,
            delay_estimate=replanner.delays.estimate(replanner.parameters.delay),
            request_open=replanner.requests.open,
            chunk=timeline.in_force.chunk.number if timeline.in_force else -1,
            pending_chunk=timeline.pending.chunk.number if timeline.pending else -1,
            clamp_latched=replanner.latched,
            dry_run=command.dry_run,
        )

    # ------------------------------------------------------------ the tick

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
            self.detail = f'{type(error).__name__}: {error}'
            # Nothing more is touched than must be: what is left of the plan is dropped at `start`.
            if self._mode is Mode.RUNNING:
                self._mode = Mode.STOPPED
                self._stop_reason = Reason.INTERNAL_ERROR
            return self._commander.hold(self._stop_reason)

    def _tick(self, now_s: float, now_ros_ns: int) -> Command:
        self.counters.ticks += 1
        fault = self._clock.advance(now_s, now_ros_ns)
        if fault is Reason.CLOCK_JUMP:
            # Stamps of before can no longer be compared with those to come.
            self.counters.clock_jumps += 1
            self._replanner.history.clear()
            self._replanner.order.clear()
            self._state.clear()
        elif fault is Reason.TICK_LATE:
            self.counters.late_ticks += 1
        if self._mode is Mode.RUNNING:
            command = self._run(fault, now_s, now_ros_ns)
        else:
            command = self._commander.hold(self._stop_reason, now_s)
        if fault is not Reason.CLOCK_JUMP and fault is not Reason.CLOCK_INVALID:
            self._replanner.record(now_ros_ns)
        return command

    def _run(self, fault: Reason | None, now_s: float, now_ros_ns: int) -> Command:
        if fault is None:
            fault = self._check(now_ros_ns)
        else:
            self.detail = self._clock.detail
        self._fault = fault
        if fault is not None:
            return self._stop_for(fault, now_s)
        dt_ns = self._clock.dt_ns
        if dt_ns == 0:
            return self._commander.command
        self._replanner.elapsed_ns += dt_ns
        if self._commander.approach.active:
            return self._go_near(self._motion_time(dt_ns))
        if self._replanner.timeline.at_end:
            return self._wait(now_s)
        return self._track(dt_ns, now_s)

    def _check(self, now_ros_ns: int) -> Reason | None:
        """The measured state and the latch; sets `detail` when a fault begins."""
        state, watch, command = self._state, self._state_watch, self._commander.command
        fault = watch.check(state, now_ros_ns)
        if fault is not None:
            if fault is not self._fault:
                self.detail = watch.describe(fault, state, now_ros_ns)
            return fault
        if self.columns.any_continuous:
            state.bring_near(command.setpoints)
        if not command.dry_run and watch.too_far(command.setpoints, state.positions):
            self.detail = watch.describe_distance(command.setpoints, state.positions)
            return Reason.TRACKING_ERROR
        if self._replanner.latched:
            self.detail = self._replanner.latch_text()
            return Reason.CLAMP_LATCH
        return None

    def _stop_for(self, fault: Reason, now_s: float) -> Command:
        """Hold for a fault."""
        if fault is Reason.TRACKING_ERROR:
            # Whether to push on against whatever is in the way is for a person to decide.
            return self.stop(fault)
        # Only a clock that stands still leaves the plan what it was.
        if fault is not Reason.CLOCK_STOPPED:
            self._drop_plan()
        return self._commander.hold(fault, now_s)

    def _wait(self, now_s: float) -> Command:
        """Nothing is left to execute."""
        if self._replanner.timeline.in_force is not None:
            self._replanner.finish_plan(self._commander.command.setpoints)
        reason = Reason.STARVED
        if self._cold:
            reason = Reason.WAITING_FOR_CHUNK
        elif self._replanner.parameters.replan_mode == 'synchronous':
            reason = Reason.SYNCHRONOUS_WAIT
        else:
            self.counters.starved_ticks += 1
        return self._commander.hold(reason, now_s)

    def _track(self, dt_ns: int, now_s: float) -> Command:
        replanner, commander, measured = self._replanner, self._commander, self._state.positions
        self._cold = False
        segment = replanner.advance(dt_ns)
        step = replanner.timeline.sample_into(commander.target, commander.command.velocities)
        if replanner.timeline.at_end:
            commander.come_to_rest()
        if commander.refuses(measured):
            self.detail = 'the plan leads further from the measured position than allowed'
            self._fault = Reason.STEP_FROM_MEASURED
            return self._stop_for(self._fault, now_s)
        self.detail = ''
        return commander.track(measured, self._motion_time(dt_ns), segment, step)

    def _motion_time(self, dt_ns: int) -> float:
        """Seconds of motion that one command may contain."""
        return min(dt_ns * 1e-9, 1.5 * self.config.control_period_s)

    def _go_near(self, dt_s: float) -> Command:
        """One tick of the approach; at its end the plan is asked for anew, from where it led."""
        commander = self._commander
        command = commander.go_near(self._state.positions, dt_s)
        if commander.approach.arrived(command.setpoints):
            self._drop_plan()
        return command

    def _drop_plan(self) -> None:
        """Nothing of the past is executed any more; the next chunk makes a new start."""
        self._commander.approach.stop()
        self._cold = True
        self._replanner.drop(self._commander.command.setpoints)

    def dead_man(self, now_s: float) -> Command | None:
        """The hold to publish when ticks have stopped coming; `None` while they come.

        For a timer of its own, on a steady clock: whatever keeps `tick` from being called, the
        robot is told to hold. The next tick finds the gap, and drops the plan by itself.
        """
        last_s = self._clock.last_s
        if last_s is None or now_s - last_s <= self.config.watchdog.tick_timeout_s:
            return None
        if self._mode is Mode.RUNNING and self._fault is None:
            self._fault = Reason.TICK_LATE
            self.detail = f'no tick for {now_s - last_s:.3f} s'
            self._drop_plan()
            return self._commander.hold(Reason.TICK_LATE, now_s)
        return self._commander.command
