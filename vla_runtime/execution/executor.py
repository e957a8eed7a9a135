"""The chunk executor: chunks and measured positions in, one command a tick out.

Invariants:
- Pure: every call is given the time. Nothing here reads a clock, sleeps, logs or starts a thread.
- `tick` and `submit_chunk` never raise: what cannot be handled ends in a hold that says why.
- One thread at a time, but for `check_chunk`, which is any thread's. A node that ticks in one
  thread and receives in another holds a lock.
- The `Command` returned by `tick`, `stop_at_once` and `dead_man` is one object that the next call
  overwrites.
- A stop brakes within the limits, along the plan, and then holds; what the robot file says to
  freeze on (`StopActions`) holds from the very tick that finds the reason. To hold is to repeat the
  last commanded position and to command zero velocity. Before anything was commanded there is
  nothing to hold: the command is `IDLE` and must not be published. `start` takes the measured
  position as the first command, so a started executor always has something to hold.
- A steady clock (`now_s`) times ticks and requests; the ROS clock (`now_ros_ns`) dates data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vla_runtime.execution.anchor_check import AnchorCheck
from vla_runtime.execution.blocked_joints import BlockedJoints
from vla_runtime.execution.chunk_check import CheckedChunk, check_chunk
from vla_runtime.execution.command import (
    ChunkRefusal,
    Command,
    CommandKind,
    Counters,
    Driver,
    Reason,
    StartResult,
    SubmitResult,
)
from vla_runtime.execution.commander import Commander
from vla_runtime.execution.config import ExecutorConfig, ExecutorStatus, Mode
from vla_runtime.execution.guard import ClampLatch, Guard
from vla_runtime.execution.handover import Handover
from vla_runtime.execution.intake import Refused, StartTooFar
from vla_runtime.execution.leader import Leader
from vla_runtime.execution.motion import Motion, OperatorRequired
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.replanner import Replanner
from vla_runtime.execution.states import TRAITS, State
from vla_runtime.types import ActionChunk, ChunkHeader, PlanRequest

# Of a policy whose steps are not known yet.
_STEP_S = 0.05
# A person who was asked to look at the robot answers within so long.
_ANSWERS_WITHIN_S = 60.0


@dataclass(frozen=True)
class _Asked:
    """A refused start: its time, and the columns that nobody saw go where they are."""

    at_s: float
    columns: np.ndarray
    places: np.ndarray


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

    and with every chunk `executor.submit_chunk(chunk, header, now_s, now_ros_ns)`.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        parameters: ExecutorParameters,
        dry_run: bool = False,
        latch: ClampLatch | None = None,
    ) -> None:
        self.config = config
        self.model = config.column_model()
        self.columns = self.model.columns
        self.counters = Counters()
        # One that outlives this executor keeps it closed until the operator's `reset`.
        self.latch = latch or ClampLatch(config.clamp_latch)
        blocked_joints = BlockedJoints(self.model, config.watchdog.blocked_after_s)
        self._commander = Commander(
            self.model, config, blocked_joints, self.counters, dry_run=dry_run
        )
        self._replanner = Replanner(self.model, self.latch, parameters, self.counters)
        self._guard = Guard(self.model, config, blocked_joints, self.latch, self.counters)
        self._anchors = AnchorCheck(self.model)
        self._mode = Mode.IDLE
        self._stop_reason = Reason.NOT_STARTED
        # What a start was refused for, until a person answers.
        self._asked: _Asked | None = None
        # A change that waits until the robot has come to rest.
        self._wanted_dry_run = dry_run
        # A release and a dry run wait until a tick has commanded the rest.
        self._releases, self._was_at_rest = False, True
        self._motion = Motion(
            self.model, config, self._guard, self._commander, self._replanner, self.counters
        )

    # ------------------------------------------------------------ the operator

    def start(self, now_s: float, now_ros_ns: int) -> StartResult:
        """Allow motion; commands nothing by itself. `why_not_start` says what it needs.

        The robot sets out from where it is measured; where it merely sags below the last command
        (`hold_follows`) it goes back there at the approach speed. Chunks whose observation is more
        than `max_state_age_s` older than the start are not taken.

        A place that nobody saw the robot go to is refused once, so that a person looks at it. The
        next call within a minute accepts it, and the command comes there at the approach speed.
        """
        if self._mode is Mode.RUNNING:
            return StartResult(True, 'paused: call ~/resume' if self.paused else 'already started')
        refused, fault = self.why_not_start(now_s, now_ros_ns)
        if refused:
            if refused == self._question(now_s):
                self._asked = _Asked(now_s, self._unseen, self._guard.state.positions.copy())
            return StartResult(False, refused, fault)
        braking = self._motion.braking
        if not braking:
            self._commander.take_position(self._guard.state, self._motion.references, self._unseen)
        self._asked = None
        self._mode = Mode.RUNNING
        self._releases = False
        # While the robot moves ticks have been coming, and the time since the last one counts.
        self._guard.restart(now_s, ticks_come=not self.at_rest)
        self._motion.restart(now_s, now_ros_ns)
        self._replanner.history.forget_before(now_ros_ns - self._fresh_ns)
        if braking:
            return StartResult(True, 'the robot comes to rest from its last motion first')
        self._motion.drop_plan()
        self._commander.held_since_s = None
        if self.at_rest:
            self._commander.hold(Reason.WAITING_FOR_CHUNK, now_s)
        self.detail = self._commander.set_out_first()
        return StartResult(True, self.detail)

    def why_not_start(self, now_s: float, now_ros_ns: int) -> tuple[str, Reason | None]:
        """Describe what `start` would be refused for now, '' for nothing; changes nothing.

        The fault is of the measured state, or the latch; None otherwise.
        """
        if self._wanted_dry_run != self._commander.command.dry_run:
            return 'dry_run changes when the robot has come to rest; start it again then', None
        refused, fault = self._guard.why_not_start(now_ros_ns)
        if refused:
            return refused, fault
        state, references = self._guard.state, self._motion.references
        if not self._motion.braking:
            refused = self._commander.why_not_take(state, references)
        if refused:
            return refused, None
        question = self._question(now_s)
        if question:
            return question, Reason.STATE_IMPLAUSIBLE
        return self._commander.why_not_yet(), None

    def _question(self, now_s: float) -> str:
        """Return what a person has to say of unseen places before a start; empty where nothing."""
        unseen = self._unseen
        if not unseen.any() or (not self._motion.braking and self._was_asked(unseen, now_s)):
            return ''
        return self._describe_unseen(unseen)

    @property
    def _unseen(self) -> np.ndarray:
        """Columns that are said to be where nobody saw them go, (columns,) bool."""
        state = self._guard.state
        unseen = state.plausibility.unseen
        return unseen if self._commander.has_commanded else unseen | state.at_nothing

    def _was_asked(self, unseen: np.ndarray, now_s: float) -> bool:
        """Return whether a person was asked for these columns, where they are, a moment ago."""
        asked = self._asked
        if asked is None or not 0.0 <= now_s - asked.at_s <= _ANSWERS_WITHIN_S:
            return False
        moved = np.abs(self._guard.state.positions - asked.places)
        return not (unseen & ~(asked.columns & (moved <= self.model.follows))).any()

    def _describe_unseen(self, unseen: np.ndarray) -> str:
        state = self._guard.state
        again = '. Where it is there, call ~/start again within a minute'
        if not self._commander.has_commanded:
            again += ': the first command is that place'
        if state.plausibility.unseen.any():
            return f'{state.plausibility.describe_unseen(unseen)}{again}'
        name = self.columns.names[int(np.argmax(unseen))]
        return (
            f"'{name}' and {int(unseen.sum()) - 1} more joints have been at exactly 0 since the "
            'first joint state, as a driver says that has not heard from its robot: look at the '
            'robot. Where its joints really are at 0, call ~/start again within a minute'
        )

    def stop(self, reason: Reason = Reason.STOPPED) -> None:
        """Come to rest as `StopActions` says, with the next ticks, and hold until `start`."""
        if self._mode is not Mode.RUNNING:
            return
        self._mode = Mode.STOPPED
        self._replanner.requests.flush()
        self._stop_reason = reason
        if reason is Reason.STOPPED:
            self.detail = ''
        self._commander.joining.end()
        self._motion.begin_stop(reason)

    def pause(self, text: str = '') -> StartResult:
        """Come to rest and hold, started, until `resume`; no chunk is asked for or taken.

        `text` says why, where no person called for it.
        """
        if self._mode is not Mode.RUNNING:
            return StartResult(False, 'the executor is not started: there is nothing to pause')
        self._motion.begin_pause(text)
        return StartResult(True, 'paused until ~/resume')

    def resume(self, now_ros_ns: int) -> StartResult:
        """End a pause: the policy plans from where the robot is."""
        if self._mode is not Mode.RUNNING:
            return StartResult(False, 'the executor is not started: call ~/start')
        if not self.paused:
            return StartResult(True, 'not paused')
        if self.goes_home:
            return StartResult(
                False, 'it is on its way home: call ~/resume when it is there, or ~/pause before'
            )
        self._motion.end_pause()
        self._replanner.history.forget_before(now_ros_ns - self._fresh_ns)
        fault = self._guard.fault
        if fault is None:
            return StartResult(True, 'resumed')
        return StartResult(True, f'it goes on when this is over: {self.detail}', fault)

    def go_home(self, now_s: float, now_ros_ns: int, *, far: bool = False) -> StartResult:
        """Come to rest, go home at the approach speed, and pause there.

        A robot that is not started is started, with all that `start` asks for.

        Args:
            far: go there from far away too; see `HomePose`.
        """
        refused, fault = self._guard.why_not_start(now_ros_ns)
        if not refused:
            places = self._commander.measured_or_commanded(self._guard.state.positions)
            refused = self._motion.home.why_not(places, far=far)
        if refused:
            return StartResult(False, refused, fault)
        if self._mode is not Mode.RUNNING:
            result = self.start(now_s, now_ros_ns)
            if not result.started:
                return result
        self._motion.begin_pause()
        self._motion.pause.goes_home = True
        return StartResult(True, 'on its way home, and paused there until ~/resume')

    def take_over(self, now_ros_ns: int) -> StartResult:
        """Let a person's leader take over, from the next tick on; it begins where the robot is.

        The policy is asked on, for the record of what it would have done, and moves nothing.
        """
        state, leader = self.state, self._motion.leader
        if state is State.LEADING:
            return StartResult(True, 'the leader leads already')
        lost = leader.why_lost(now_ros_ns)
        if lost:
            return StartResult(False, lost)
        if not TRAITS[state].may_lead:
            started = self._mode is Mode.RUNNING
            text = f'the robot is {state.value}: call ~/take_over again when that is over'
            return StartResult(
                False, text if started else 'the executor is not started: call ~/start'
            )
        if self._commander.unknown.any():
            return StartResult(False, 'a joint is not measured, and was not commanded yet')
        self._motion.follow_leader()
        return StartResult(True, 'the leader leads')

    def give_back(self, now_ros_ns: int) -> StartResult:
        """Let the policy, or a pause that lasts, go on from where the leader has led the robot."""
        if not self.leading:
            return StartResult(True, 'no leader leads')
        self._motion.leave_leader()
        self._motion.leader.rest_first()
        # A chunk of a frame from before this moment would be one of another place.
        self._replanner.history.forget_before(now_ros_ns)
        return StartResult(True, 'paused until ~/resume' if self.paused else 'the policy goes on')

    def observe_leader(self, positions: np.ndarray, stamp_ns: int, now_ros_ns: int) -> None:
        """Take the leader's positions in its order and the robot's units; see `Leader.observe`."""
        self._motion.leader.observe(positions, stamp_ns, now_ros_ns)

    @property
    def leader(self) -> Leader:
        return self._motion.leader

    @property
    def leading(self) -> bool:
        return self._mode is Mode.RUNNING and self._motion.leader.engaged

    @property
    def driver(self) -> Driver:
        """Who moves the robot, or has let it rest."""
        if self.leading:
            return Driver.LEADER
        drives = self._mode is Mode.RUNNING and not self.paused
        return Driver.POLICY if drives else Driver.NOBODY

    @property
    def paused(self) -> bool:
        return self._mode is Mode.RUNNING and self._motion.pause.active

    @property
    def goes_home(self) -> bool:
        """True from `go_home` on until the robot is there, or something has ended the way."""
        return self.paused and self._motion.goes_home

    @property
    def _fresh_ns(self) -> int:
        """Age that a camera frame may have at a start: that of a joint state that allows it."""
        return round(self.config.watchdog.max_state_age_s * 1e9)

    def release(self) -> None:
        """Come to rest, then command nothing until `start`: others have the robot.

        What was commanded is forgotten, so that the next start sets out from where the robot is.
        """
        released = self._mode is Mode.STOPPED and self._stop_reason is Reason.RELEASED
        if self._mode is Mode.IDLE or released:
            return
        self.stop(Reason.RELEASED)
        self._stop_reason, self.detail = Reason.RELEASED, ''
        self._releases, self._was_at_rest = True, False

    def _finish_release(self) -> None:
        if self._releases and self._was_at_rest:
            self._releases = False
            self._commander.forget(self.dry_run)
            self._commander.hold(Reason.RELEASED)

    def stop_at_once(self) -> Command:
        """Hold at once, until `start`; return the last command to publish, for shutdown."""
        if self._mode is Mode.RUNNING:
            self._mode, self._stop_reason = Mode.STOPPED, Reason.STOPPED
            self._motion.leader.disengage()
            self._commander.command.settled = False
        self._motion.drop_plan()
        return self._commander.hold(self._stop_reason)

    @property
    def at_rest(self) -> bool:
        """True when the last command did not move, and no stop is under way."""
        return not self._commander.moving and not self._motion.braking

    def reset(self, episode: int) -> None:
        """Begin an episode and open the latch; only the operator may ask for it."""
        self.latch.open()
        if self._guard.fault is Reason.CLAMP_LATCH:
            self._guard.fault = None
        self.begin_episode(episode)

    def begin_episode(self, episode: int) -> None:
        """Forget plan, chunks and delays of the last episode; the latch stays.

        A started executor stays started and holds until a chunk of the new episode comes.
        """
        self._motion.begin_episode()
        self._replanner.begin_episode(episode, self._commander.command.setpoints)
        if self._mode is Mode.RUNNING and not self._motion.braking:
            self._commander.leave_plan(paused=self.paused)

    def set_parameters(self, parameters: ExecutorParameters) -> None:
        """Set other parameters from the next chunk boundary on.

        Raises:
            ValueError: they want more steps than the last chunk had.
        """
        self._replanner.stage(parameters)

    def set_dry_run(self, dry_run: bool) -> None:
        """Publish commands, or compute them only. A change stops the executor.

        It takes effect at rest. What a dry run commanded is forgotten.
        """
        self._wanted_dry_run = dry_run
        if self._commander.command.dry_run or (self._was_at_rest and self.at_rest):
            self.stop_at_once()
            self._take_up_dry_run()
        else:
            self.stop()

    def _take_up_dry_run(self) -> None:
        """Switch the dry run on or off once at rest, after a hold was published."""
        dry_run = self._commander.command.dry_run
        # A stop that freezes is at rest before any tick has commanded it.
        if (
            self._wanted_dry_run == dry_run
            or not (self._was_at_rest or dry_run)
            or not self.at_rest
        ):
            return
        self._mode = Mode.IDLE
        self._stop_reason = Reason.NOT_STARTED
        self._commander.forget(self._wanted_dry_run)
        self._commander.hold(Reason.NOT_STARTED)

    def note_references(self, positions: np.ndarray) -> None:
        """Note where the controllers hold or lead the robot, (columns,); NaN where unknown.

        A start sets out from there. Where it is not what was commanded last, another node has
        commanded a stopped robot: nothing is sent into its motion.
        """
        np.copyto(self._motion.references, positions)

    def note_unsent(self, columns: np.ndarray) -> None:
        """Note which columns (bool) are sent to nobody, and commanded to where they are held."""
        self._motion.note_unsent(columns)

    @property
    def unsent_placed(self) -> bool:
        return self._motion.unsent_placed

    @property
    def is_silent(self) -> bool:
        """True when the robot has come to rest, and its controllers need no more commands."""
        command = self._commander.command
        silent = command.settled and not self._releases
        silent |= command.dry_run or command.kind is CommandKind.IDLE
        return silent and self.at_rest and self._mode is not Mode.RUNNING

    def set_speed_scaling(self, factor: float) -> None:
        """Follow plans and approaches at this share of their speed: 0.0 holds, 1.0 is full speed.

        Braking for any other reason is not scaled. A factor that is not a number holds.
        """
        self._motion.scaling.wanted = min(factor, 1.0) if factor > 0.0 else 0.0

    # ------------------------------------------------------------ what comes in

    def observe_state(
        self,
        names: Sequence[str],
        positions: Sequence[float],
        stamp_ns: int,
        source: str = '',
        now_ros_ns: int | None = None,
    ) -> None:
        """Add measured positions by name; see `MeasuredState.observe`.

        `now_ros_ns` is the ROS clock when they came; None: not earlier than their stamp.
        """
        self._guard.observe(names, positions, stamp_ns, source, now_ros_ns, self._commander.places)

    def measured(self, now_ros_ns: int) -> dict[str, float]:
        """Return the measured positions by column; empty while they are not to be trusted."""
        state = self._guard.trusted_state(now_ros_ns, self._commander.command)
        if state is None:
            return {}
        pairs = zip(self.columns.names, state.positions.tolist(), strict=True)
        return {
            name: position
            for (name, position), seen in zip(pairs, self.columns.has_feedback, strict=True)
            if seen
        }

    def check_chunk(self, chunk: ActionChunk) -> CheckedChunk:
        """Check what is independent of the robot's motion; for any thread, never raises."""
        return check_chunk(
            chunk,
            self.columns,
            self.model.limits,
            self._motion.last_position(),
            self.config.step_time_s,
        )

    def submit_chunk(
        self,
        chunk: ActionChunk | CheckedChunk,
        header: ChunkHeader,
        now_s: float,
        now_ros_ns: int,
    ) -> SubmitResult:
        """Offer a chunk. It is checked in full and accepted whole, or refused whole; never raises.

        Args:
            chunk: columns are mapped by name. Checked already where time between two ticks is
                short.
            header: facts that came with it. A refused answer closes its request, so that another
                one is asked for at once.
        """
        self.counters.received += 1
        if header.episode == self._replanner.episode:
            self._motion.note_answer()
        try:
            self._require_motion()
            checked = chunk if isinstance(chunk, CheckedChunk) else self.check_chunk(chunk)
            result = self._replanner.take(
                checked,
                header,
                now_ros_ns,
                self.config.watchdog.future_tolerance_s,
                self._motion.start_state(now_s),
            )
            late = self._anchors.judge(header.observation_ns, checked.rows[0])
            return replace(result, text='; '.join(filter(None, (result.text, late))))
        except StartTooFar as far:
            refusal, text = far.refusal, str(far)
            if self.config.start.on_too_far == 'approach':
                self._commander.set_out_for(far.first_row)
                self.detail = text
                text += '; approaching it first'
        except Refused as refused:
            refusal, text = refused.refusal, str(refused)
        except Exception as error:  # a chunk comes from outside: it must not end the executor
            refusal, text = ChunkRefusal.INTERNAL_ERROR, f'{type(error).__name__}: {error}'
        self.counters.internal_errors += refusal is ChunkRefusal.INTERNAL_ERROR
        self.counters.refused[refusal] += 1
        # A chunk of another episode, or one twice that names no request, is a stray one; the answer
        # to the open request is yet to come.
        unnamed = header.request is None and refusal is ChunkRefusal.DUPLICATE
        if refusal is not ChunkRefusal.OTHER_EPISODE and not unnamed:
            self._replanner.requests.close(header.request)
        return SubmitResult(refusal, text)

    def _require_motion(self) -> None:
        """Raise `Refused` where no chunk would be taken, whatever is in it."""
        traits = TRAITS[self.state]
        if traits.refusal is not None:
            fault = self._guard.fault
            because = f': {fault.value}, {self.detail}' if fault else ''
            text = traits.text.format(because=because, latch=self.latch.text)
            raise Refused(traits.refusal, text)

    # ------------------------------------------------------------ what goes out

    @property
    def wants_chunk(self) -> bool:
        return TRAITS[self.state].asks and self._replanner.due

    def poll_request(
        self, now_s: float, now_ros_ns: int, past_steps: int = 0
    ) -> PlanRequest | None:
        """Return the plan to publish as a request if a chunk is wanted; counts as asked."""
        replanner = self._replanner
        timeout_s = replanner.parameters.request_timeout_s
        self.counters.requests_timed_out += replanner.requests.expire(now_s, timeout_s)
        if not self.wants_chunk or (self.leading and not self._asks_beside_leader(now_s)):
            return None
        return replanner.ask(now_s, now_ros_ns, past_steps)

    def _asks_beside_leader(self, now_s: float) -> bool:
        """Return whether to ask: as often as a policy that drives is asked."""
        step_s = self._replanner.timeline.step_time_s or self.config.step_time_s or _STEP_S
        return self._motion.leader.asks(now_s, self.parameters.replan_interval * step_s)

    def repeat_request(
        self, now_s: float, now_ros_ns: int, past_steps: int = 0
    ) -> PlanRequest | None:
        """Return an open request again, with its number, once its answer is overdue."""
        replanner = self._replanner
        asks = TRAITS[self.state].asks
        request = replanner.requests.send_again(now_s) if asks else None
        if request is None:
            return None
        return replanner.committed_plan(now_ros_ns, past_steps, request)

    def committed_plan(self, now_ros_ns: int, past_steps: int = 0) -> PlanRequest:
        """Return the setpoints still to be executed, from the current step on.

        `past_steps` finished steps are put in front, as far as they are kept, for a policy whose
        observation is older than the request.
        """
        return self._replanner.committed_plan(now_ros_ns, past_steps)

    @property
    def handovers(self) -> deque[Handover]:
        """The latest hand-overs, oldest first."""
        return self._replanner.handovers

    @property
    def parameters(self) -> ExecutorParameters:
        """Parameters in force; what was set meanwhile waits for the next boundary."""
        return self._replanner.parameters

    @property
    def detail(self) -> str:
        """Describe why the robot holds; empty while nothing is wrong."""
        return self._guard.detail

    @detail.setter
    def detail(self, text: str) -> None:
        self._guard.detail = text

    @property
    def mode(self) -> Mode:
        return self._mode

    @property
    def state(self) -> State:
        """State that follows from what the parts know; see `TRANSITIONS`."""
        motion, commander, fault = self._motion, self._commander, self._guard.fault
        if self._mode is Mode.IDLE:
            return State.IDLE
        if self._mode is Mode.STOPPED:
            if self._releases:
                return State.RELEASING
            if self._stop_reason is Reason.RELEASED:
                return State.RELEASED
            return State.STOPPING if motion.braking else State.STOPPED
        if motion.braking:
            return State.BRAKING
        if fault is not None and fault is not Reason.CLAMP_LATCH:
            return State.HOLDING
        if motion.leader.engaged:
            return State.LEADING
        if motion.pause.active and not commander.on_its_way:
            return State.PAUSED if fault is None else State.LATCHED
        if commander.approaches:
            return State.JOINING if commander.joining.active else State.APPROACHING
        if fault is not None:
            return State.LATCHED
        return State.WAITING if self._replanner.timeline.at_end else State.TRACKING

    @property
    def doubts_state(self) -> bool:
        """True while the robot stops, or is stopped, for a reading that was not believed."""
        doubted = Reason.STATE_IMPLAUSIBLE
        return doubted in (self._guard.fault, self._commander.command.reason)

    @property
    def dry_run(self) -> bool:
        return self._commander.command.dry_run

    @property
    def episode(self) -> int:
        return self._replanner.episode

    def status(self) -> ExecutorStatus:
        replanner, command = self._replanner, self._commander.command
        timeline = replanner.timeline
        tracks = command.kind is CommandKind.TRACK
        return ExecutorStatus(
            mode=self._mode,
            kind=command.kind,
            reason=command.reason,
            detail=self.detail,
            progress=self._commander.progress,
            gave_way=self._commander.compliant_hold.describe(),
            episode=replanner.episode,
            step=timeline.current_step,
            parameters=replanner.parameters,
            unconditioned=replanner.unconditioned,
            delay_estimate=replanner.delays.estimate(replanner.parameters.delay),
            horizon=replanner.horizon,
            open_requests=len(replanner.requests.open),
            most_open_requests=replanner.requests.most,
            silent_since_s=replanner.requests.silent_since_s,
            observation_age_ms=replanner.observation_age_ns * 1e-6 if tracks else 0.0,
            chunk=timeline.in_force.chunk.number if timeline.in_force else -1,
            pending_chunk=timeline.pending.chunk.number if timeline.pending else -1,
            clamp_latched=self.latch.text if self.latch.closed else '',
            dry_run=command.dry_run,
            wrong_stamps=self._anchors.warning,
            driver=self.driver,
        )

    # ------------------------------------------------------------ the tick

    def tick(self, now_s: float, now_ros_ns: int) -> Command:
        """Return the command for this moment. Call at the control rate; never raises."""
        try:
            return self._tick(now_s, now_ros_ns)
        except Exception as error:  # whatever it is, the robot must hold
            self.counters.internal_errors += 1
            self.detail = f'{type(error).__name__}: {error}'
            # Nothing more is touched than must be: what is left of the plan is dropped at `start`.
            if self._mode is Mode.RUNNING:
                self._mode = Mode.STOPPED
                self._stop_reason = Reason.INTERNAL_ERROR
            return self._commander.hold(self._stop_reason)

    def _tick(self, now_s: float, now_ros_ns: int) -> Command:
        self.counters.ticks += 1
        self._commander.begin_tick()
        self._guard.take_waiting(now_ros_ns, self._commander.places)
        fault = self._guard.advance(now_s, now_ros_ns)
        if fault is Reason.CLOCK_JUMP:
            self._replanner.history.clear()
            self._replanner.order.clear()
            self._motion.leader.clear()
            self._anchors.clear()
        if self._guard.state.complete:
            self._anchors.note(now_ros_ns, self._guard.state.positions)
        if self._mode is Mode.RUNNING:
            self._follow_hand(now_ros_ns)
            command = self._move(fault, now_s, now_ros_ns)
        else:
            self._take_up_dry_run()
            self._finish_release()
            command = self._motion.stopped_tick(self._stop_reason, fault, now_s, now_ros_ns)
        self._was_at_rest = self.at_rest
        self._motion.commanded_s = now_s
        if fault is not Reason.CLOCK_JUMP and fault is not Reason.CLOCK_INVALID:
            self._replanner.record(now_ros_ns)
            self._guard.record(now_ros_ns, command)
        return command

    def _follow_hand(self, now_ros_ns: int) -> None:
        """Let a leader that is engaged by its motion take over and give back."""
        leader = self._motion.leader
        if leader.parameters is None or leader.parameters.engage != 'motion':
            return
        if leader.moves and not leader.engaged and not self._motion.pause.active:
            self.take_over(now_ros_ns)
        elif leader.engaged and not leader.moves and not leader.why_lost(now_ros_ns):
            self.give_back(now_ros_ns)

    def _move(self, clock_fault: Reason | None, now_s: float, now_ros_ns: int) -> Command:
        try:
            return self._motion.run(clock_fault, now_s, now_ros_ns)
        except OperatorRequired as needed:
            self.stop(needed.reason)
            if self.at_rest:
                return self._commander.command
            return self._motion.stopped_tick(needed.reason, clock_fault, now_s, now_ros_ns)

    def dead_man(self, now_s: float) -> Command | None:
        """The command to publish when ticks have stopped coming; `None` while they come.

        For a timer of its own, on a steady clock. The next tick finds the gap and drops the plan.
        """
        return self._motion.dead_man(now_s, started=self._mode is Mode.RUNNING)
