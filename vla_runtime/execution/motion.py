"""One tick of the command: check whether the robot may move, then approach, track, brake, or hold.

A stop (`stop_tick`) goes on along the plan at a falling pace, so that all joints slow down
together and stay on their path; a cause that the robot file says to `freeze` on holds at once. The
plan is dropped at rest.
"""

from __future__ import annotations

import math

import numpy as np

from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.command import Command, Counters, Reason
from vla_runtime.execution.commander import Commander
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.guard import Guard
from vla_runtime.execution.home import HomePose
from vla_runtime.execution.intake import RobotAtArrival
from vla_runtime.execution.leader import Leader
from vla_runtime.execution.moved_joints import RESTS_AFTER_S
from vla_runtime.execution.pause import Pause
from vla_runtime.execution.replanner import Replanner
from vla_runtime.execution.state import MeasuredState

# --- Speed scaling: how fast plan time passes, as the person at the robot's slider wants it


# From standstill to full speed; the limits of acceleration come on top.
_RISE_S = 0.5
# Below this nothing visible moves: plan time stands still.
_NEGLIGIBLE = 1e-3


class SpeedScaling:
    """Plan time per time, which follows the wanted factor as fast as the robot may brake.

    `wanted` 0.0 holds the robot, 1.0 is full speed.
    """

    def __init__(self) -> None:
        self.wanted = 1.0
        self.factor = 1.0

    def advance(self, dt_s: float, slower: float) -> None:
        """Bring the factor nearer to the wanted one.

        `slower` is the share of its velocity that the robot keeps after a tick of braking.
        """
        if self.wanted < self.factor:
            self.factor = max(self.wanted, self.factor * slower)
            if self.factor < _NEGLIGIBLE:
                self.factor = 0.0
        elif self.wanted > self.factor:
            self.factor = min(self.wanted, self.factor + dt_s / _RISE_S)


# --------------------------------------------------------------------------------------------------

# A stopped robot is given its hold for so long, steady clock: its controller has it by then.
_REPEATED_S = 0.5
# A command that is set to where the robot is: shorter, since another node may lead the robot.
_SEAT_REPEATED_S = 0.1
# A policy is lost when it takes so many times its usual delay to answer.
_PATIENCE = 3
# Stops after which the robot may press on something, or be far from its command.
_PRESSES = (Reason.TRACKING_ERROR, Reason.APPROACH_TIMEOUT, Reason.CONTROLLER)
# Not an outage: the latch has a reset of its own, and a simulated clock may be paused.
_HEALTHY = (None, Reason.CLAMP_LATCH, Reason.CLOCK_STOPPED, Reason.CLOCK_JUMP)


class OperatorRequired(Exception):  # noqa: N818 - it is an answer, not an error
    """The robot must stop until a person has looked at it and starts it again."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Motion:
    """Moves the command along the plan; see the module's docstring.

    Attributes:
        commanded_s: steady time of the last command, a tick's or the dead-man's; None before it.
        references: (columns,) where the controllers hold or lead the robot; not-a-number where
            nobody says so.
        unsent: (columns,) bool, columns whose controllers are off, or were and have had nothing
            since.
        unsent_placed: the last command of the unsent columns is where the robot is.
        pause: what a person has asked for in place of the policy.
        leader: the arm that a person leads the robot by.
    """

    def __init__(
        self,
        model: ColumnModel,
        config: ExecutorConfig,
        guard: Guard,
        commander: Commander,
        replanner: Replanner,
        counters: Counters,
    ) -> None:
        count = model.columns.count
        self._model = model
        self._guard = guard
        self._commander = commander
        self._replanner = replanner
        self._counters = counters
        self._on_stop = config.on_stop
        self._cold_after_s = config.start.cold_after_s
        self._on_ros_clock = config.watchdog.motion_clock == 'ros'
        self._restart_after_s = config.restart_after_outage_s
        # Time of the last tick without a fault, on the clock that motion follows.
        self._good_s = -math.inf
        # Plan time for which a robot that has moved has been waiting for an answer.
        self._waited_s = 0.0
        self._has_moved = False
        # Steady time of the last command that moved, or was for a started robot.
        self._changed_s = -math.inf
        # Whether this stop may give up what the robot presses on, and where it has done so.
        self._presses = False
        self._gave_up = np.zeros(count, dtype=bool)
        # Readings that were refused, as far as a person was told.
        self._refused = 0
        self.commanded_s: float | None = None
        self.scaling = SpeedScaling()
        self.pause = Pause()
        self.home = HomePose(model, config.home)
        self.leader = Leader(model, config.leader)
        self.references = np.full(count, np.nan)
        self.unsent = np.zeros(count, dtype=bool)
        self.unsent_placed = False
        # Where they were measured when a stop for something that they press on began.
        self._pressed_at = np.full(count, np.nan)
        # Grippers among them that moved when it began, and so hold nothing.
        self._free = np.zeros(count, dtype=bool)
        # Plan time per time while the robot brakes, 1.0 to 0.0; None while it does not.
        self._pace: float | None = None
        self._cause = Reason.NOT_STARTED
        # Whether the next chunk sets out anew and has to begin where the robot is.
        self._cold = True

    @property
    def braking(self) -> bool:
        """True when a stop has begun and the robot has not come to rest yet."""
        return self._pace is not None

    def run(self, clock_fault: Reason | None, now_s: float, now_ros_ns: int) -> Command:
        """The command of a started executor for this moment; may raise `OperatorRequired`."""
        joining = self._commander.joining
        fault = self._guard.check(
            clock_fault, now_ros_ns, self._commander.command, joins=joining.active
        )
        self._changed_s = now_s
        self._commander.command.settled = False
        self._require_no_person(fault, now_s, now_ros_ns)
        if fault is Reason.CLOCK_STOPPED:
            # The plan waits for the clock as well, and goes on at the speed it had.
            return self._commander.hold_in_place(fault, now_s)
        if fault is not None or self.braking:
            self._let_go(f'a fault ended the way of the leader: {self._guard.detail}')
            elapsed_s = self._elapsed_s(now_s)
            if clock_fault is None and self._between_clock_messages(elapsed_s):
                return self._commander.command
            return self.stop_tick(fault or self._cause, elapsed_s, now_s, now_ros_ns)
        dt_ns = self._guard.dt_ns
        if dt_ns == 0:
            return self._commander.command
        dt_s = dt_ns * 1e-9
        if joining.active:
            return self._join_tick(dt_s, now_s)
        if self.scaling.factor != self.scaling.wanted:
            self.scaling.advance(dt_s, self._commander.slower(dt_s))
        factor = self.scaling.factor
        if self.leader.engaged:
            return self._lead_tick(dt_s, factor, now_s, now_ros_ns)
        if factor == 0.0 and not self._commander.moving:
            return self._commander.hold_in_place(Reason.SPEED_SCALED_TO_ZERO, now_s)
        # A step that takes longer is no delay of the policy.
        plan_ns = round(dt_ns * factor)
        self._replanner.elapsed_ns += plan_ns
        if self._commander.approach.active:
            return self._approach_tick(dt_s, factor)
        if self.pause.active:
            return self._paused_tick(dt_s, factor, now_s)
        if self._replanner.timeline.at_end:
            if self._commander.outside and not self._commander.moving:
                self._guard.detail = self._commander.go_back_inside()
            return self._end_of_plan_tick(dt_s, now_s)
        return self._track(dt_ns, plan_ns, factor, now_s, now_ros_ns)

    def _join_tick(self, dt_s: float, now_s: float) -> Command:
        """Come to where the robot was found, as a person said; raise where it is not there."""
        commander, guard = self._commander, self._guard
        pace = self.scaling.wanted
        ended = commander.join_tick(Reason.APPROACHING, guard.state, dt_s, now_s, pace)
        if ended:
            guard.detail = ended
            raise OperatorRequired(Reason.STATE_IMPLAUSIBLE)
        if not commander.joining.active:
            guard.detail = ''
            self.drop_plan()
        return commander.command

    def restart(self, now_s: float, now_ros_ns: int) -> None:
        """Note a start: no outage lasts, and the robot has not moved since."""
        self._good_s = now_ros_ns * 1e-9 if self._on_ros_clock else now_s
        self._presses = False
        self._gave_up[:] = False
        self.pause.end()
        self.leader.disengage()
        self.expect_first_answer()

    def expect_first_answer(self) -> None:
        """Wait for the next answer without an end: it is the first."""
        self._has_moved = False
        self._waited_s = 0.0

    def note_answer(self) -> None:
        """Note that the policy has answered, whatever becomes of it."""
        self._waited_s = 0.0

    def _require_no_person(self, fault: Reason | None, now_s: float, now_ros_ns: int) -> None:
        """Raise `OperatorRequired` after a fault that does not heal alone, or lasts too long."""
        guard, plausibility = self._guard, self._guard.state.plausibility
        unseen = plausibility.unseen
        settled = fault in (None, Reason.TRACKING_ERROR, Reason.CLAMP_LATCH)
        if settled and np.count_nonzero(unseen) and not self._commander.joining.active:
            guard.detail = (
                plausibility.describe_unseen(unseen) + ', then call ~/start, which asks once more'
            )
            raise OperatorRequired(Reason.STATE_IMPLAUSIBLE)
        if fault is Reason.TRACKING_ERROR or fault is Reason.STATE_DOUBLED:
            # Whether to push on against whatever is in the way is for a person to decide.
            self._presses = fault is Reason.TRACKING_ERROR
            raise OperatorRequired(fault)
        clock_s = now_ros_ns * 1e-9 if self._on_ros_clock else now_s
        if fault in _HEALTHY:
            self._good_s = clock_s
            return
        lasts_s = clock_s - self._good_s
        if fault is Reason.STATE_STALE:
            lasts_s = max(lasts_s, (now_ros_ns - guard.state.oldest_stamp_ns) * 1e-9)
        if lasts_s > self._restart_after_s:
            self._need_restart()
            raise OperatorRequired(fault)

    def _need_restart(self) -> None:
        self._guard.detail += (
            f'; this lasted for more than {self._restart_after_s:g} s (restart_after_outage_s): '
            'call ~/start'
        )

    def begin_pause(self, text: str = '') -> None:
        """Come to rest and hold until the pause ends."""
        self.pause.begin(text)
        self._replanner.requests.flush()
        # A fault holds the robot already.
        if self._guard.fault is None:
            self._guard.detail = text
            self.begin_stop(Reason.PAUSED)

    def end_pause(self) -> None:
        self.pause.end()
        self.expect_first_answer()

    @property
    def goes_home(self) -> bool:
        return self.pause.goes_home or (self.pause.active and self._commander.approach.active)

    def follow_leader(self) -> None:
        """Follow the leader from the next tick on, from where the command is."""
        self.pause.goes_home = False
        self.drop_plan()
        self.leader.engage(self._commander.command.setpoints)

    def leave_leader(self) -> None:
        """Come to rest, and let the policy, or the pause, go on from there."""
        self.leader.disengage()
        self.drop_plan()
        self.expect_first_answer()

    def _let_go(self, why: str) -> None:
        """Pause a robot that has lost its leader: the policy does not go on by itself."""
        if self.leader.engaged:
            self.leader.disengage()
            self.pause.begin(why)

    def _lead_tick(self, dt_s: float, factor: float, now_s: float, now_ros_ns: int) -> Command:
        lost = self.leader.why_lost(now_ros_ns)
        if not lost and factor == 0.0:
            lost = "the robot's speed scaling is 0"
        if lost:
            self._let_go(lost)
            self._guard.detail = lost
            return self.stop_tick(Reason.PAUSED, dt_s, now_s, now_ros_ns)
        self._guard.detail = ''
        return self._commander.lead(self.leader, self._guard.state.positions, dt_s, factor)

    def _paused_tick(self, dt_s: float, factor: float, now_s: float) -> Command:
        """Rest, and set out for home where that was asked for."""
        commander, pause = self._commander, self.pause
        if pause.goes_home and not commander.moving:
            pause.goes_home = False
            commander.set_out_to(self.home.goal_from(commander.command.setpoints))
            return self._approach_tick(dt_s, factor)
        self._guard.detail = pause.text
        return commander.hold_tick(Reason.PAUSED, self._guard.state, dt_s, now_s)

    def begin_stop(self, reason: Reason) -> bool:
        """Stop for this reason, braking or at once; return whether the robot brakes."""
        commander = self._commander
        self.leader.disengage()
        commander.approach.stop()
        if reason in _PRESSES:
            self._presses = True
            np.copyto(self._pressed_at, self._guard.state.positions)
        if commander.in_motion and not self._on_stop.freezes(reason):
            if self._pace is None:
                self._pace, self._cause = 1.0, reason
            return True
        self.drop_plan()
        if commander.in_motion or not commander.moving:
            commander.hold(reason)
        return False

    def stopped_tick(
        self, reason: Reason, clock_fault: Reason | None, now_s: float, now_ros_ns: int
    ) -> Command:
        """One tick of an executor that is not started: come to rest, then hold."""
        dt_s = self._elapsed_s(now_s)
        if self._between_clock_messages(dt_s):
            if clock_fault is None:
                return self._commander.command
            return self._commander.hold_in_place(reason, now_s)
        commander = self._commander
        self._name_refused_readings()
        state = self._trusted_state(now_ros_ns)
        self._place_unsent(state)
        blocked = self._guard.blocked(commander.command, None if state is None else state.positions)
        if self.braking:
            # What is in the way is not pushed any further.
            reason = Reason.TRACKING_ERROR if blocked else reason
            self.stop_tick(reason, dt_s, now_s, now_ros_ns)
        elif commander.command.settled and self._others_lead(state):
            return commander.hold(reason, now_s, dt_s)
        elif commander.joining.active and state is not None:
            if ended := commander.join_tick(reason, state, dt_s, now_s):
                self._guard.detail = ended
                # What did not change is given up anew.
                joining = commander.joining
                self._gave_up &= ~(joining.columns & ~joining.changed(state.positions))
                commander.hold_tick(reason, state, dt_s, now_s)
        else:
            commander.hold_tick(reason, state, dt_s, now_s)
            if state is not None and not commander.moving and not commander.command.dry_run:
                self._take_along(state)
                if not commander.joining.active:
                    commander.join_returned(state)
        command = commander.command
        if self.braking or commander.moving:
            self._changed_s = now_s
        elif command.seats:
            self._changed_s = now_s - _REPEATED_S + _SEAT_REPEATED_S
        command.settled = now_s - self._changed_s > _REPEATED_S
        return command

    def note_unsent(self, columns: np.ndarray) -> None:
        begun = columns & ~self.unsent
        if np.count_nonzero(begun):
            rests = self._guard.state.still_for(RESTS_AFTER_S)
            self._free |= begun & self._model.grips & ~rests
        self._free &= columns
        np.copyto(self.unsent, columns)

    def _place_unsent(self, state: MeasuredState | None) -> None:
        self.unsent_placed = False
        commander = self._commander
        if self.braking or commander.moving or not commander.has_commanded:
            return
        columns = self.unsent & (self._model.movable | self._free)
        if np.count_nonzero(columns):
            if state is None:
                return
            plausibility = state.plausibility
            rested = plausibility.returned & state.still_for(plausibility.rests_s)
            doubted = plausibility.unseen & (plausibility.taken_over | ~rested)
            if np.count_nonzero(columns & doubted):
                return
            commander.go_along(columns, self.references, state)
            state.trust(columns)
        self.unsent_placed = True

    def _name_refused_readings(self) -> None:
        """Say of a stopped robot, too, what was not believed."""
        plausibility = self._guard.state.plausibility
        if plausibility.refused != self._refused:
            self._refused = plausibility.refused
            self._guard.detail = self._guard.detail or plausibility.describe()

    def _others_lead(self, state: MeasuredState | None) -> bool:
        """Return whether a controller follows another node; the command follows it unsent."""
        commander = self._commander
        led = commander.overridden(self.references)
        if not np.count_nonzero(led):
            return False
        if state is not None and commander.set_to_measured(
            led & state.still_for(RESTS_AFTER_S) & ~state.plausibility.unseen, state.positions
        ):
            self._replanner.drop(commander.command.setpoints)
        return True

    def _take_along(self, state: MeasuredState) -> None:
        """Set the command of joints that a person moved, and that rest, to where they are.

        What a joint presses on is given up once in a stop: one that hangs below every command would
        sink further each time. A joint that has stood still since the stop began is given up
        slowly: a bus that repeats an old position says the same.
        """
        commander = self._commander
        blocked = self._guard.blocked_joints.blocked
        pressed = (blocked | self._presses) & ~self._gave_up
        setpoints = commander.command.setpoints
        moved = commander.moved_joints.find(setpoints, state, pressed=pressed)
        doubted = pressed & moved & ~blocked
        doubted &= commander.joining.same(self._pressed_at, state.positions)
        self._seat(moved & ~doubted, state)
        commander.give_up(doubted, state)
        self._gave_up |= pressed & moved

    def _seat(self, columns: np.ndarray, state: MeasuredState) -> bool:
        """Set the command of columns to where they are, and say so; return whether any was set."""
        commander = self._commander
        text = commander.describe_lead(columns, state.positions)
        if not commander.set_to_measured(columns, state.positions):
            return False
        self._replanner.drop(commander.command.setpoints)
        if not self._guard.detail:
            self._guard.detail = f'the robot was moved while it held, {text}: it is held there'
        return True

    def stop_tick(
        self, reason: Reason, dt_s: float, now_s: float, now_ros_ns: int | None
    ) -> Command:
        """One tick of a stop, or of the hold that it ends in.

        `dt_s` is 0.0 where unknown; without `now_ros_ns` no measured position is looked at.
        """
        commander = self._commander
        state = None if now_ros_ns is None else self._trusted_state(now_ros_ns)
        positions = None if state is None else state.positions
        if self.braking and self._guard.too_far(commander.command, positions):
            # Whatever the stop was for, what is in the way is not pushed any further.
            reason = Reason.TRACKING_ERROR
        if self._on_stop.freezes(reason) and (self.braking or commander.in_motion):
            self.drop_plan()
            return commander.hold(reason, now_s, dt_s)
        if not self.begin_stop(reason):
            return commander.hold_tick(reason, state, dt_s, now_s)
        if dt_s > 0.0:
            self._replanner.elapsed_ns += round(dt_s * 1e9)
            if self._brake(positions, dt_s):
                return commander.command
        # A stop keeps the reason that it began with, whatever else was found meanwhile.
        commander.brake_tick(self._cause, state, dt_s, now_s)
        if not commander.moving:
            self.drop_plan()
        return commander.command

    def dead_man(self, now_s: float, *, started: bool) -> Command | None:
        """The command when ticks have stopped coming, which is a fault; `None` while they come."""
        guard, commander = self._guard, self._commander
        silent_s = guard.silent_s(now_s)
        if silent_s is None:
            return None
        begins = started and guard.fault is None
        if started:
            commander.command.settled = False
        if begins:
            guard.fault = Reason.TICK_LATE
            guard.detail = f'no tick for {silent_s:.3f} s'
            self._let_go(guard.detail)
        if self._on_ros_clock:
            # How fast the simulated world goes on is not known here.
            if begins:
                self.drop_plan()
                commander.hold(Reason.TICK_LATE, now_s)
        else:
            elapsed_s, self.commanded_s = self._elapsed_s(now_s), now_s
            if begins or self.braking:
                self.stop_tick(Reason.TICK_LATE, elapsed_s, now_s, None)
            else:
                commander.hold_tick(commander.command.reason, None, elapsed_s, now_s)
        return commander.command

    def _between_clock_messages(self, elapsed_s: float) -> bool:
        """Return whether the robot moves in a simulated world whose time stands still just now."""
        return self._on_ros_clock and elapsed_s <= 0.0 and self._commander.moving

    def _elapsed_s(self, now_s: float) -> float:
        if self._on_ros_clock:
            return self._guard.elapsed_s
        elapsed_s = 0.0 if self.commanded_s is None else now_s - self.commanded_s
        return elapsed_s if 0.0 < elapsed_s < math.inf else 0.0

    def _trusted_state(self, now_ros_ns: int) -> MeasuredState | None:
        return self._guard.trusted_state(now_ros_ns, self._commander.command)

    def drop_plan(self) -> None:
        """Drop the plan; the next chunk makes a new start."""
        self._commander.approach.stop()
        self._cold = True
        self._pace = None
        self._replanner.drop(self._commander.command.setpoints)

    def begin_episode(self) -> None:
        """Drop the plan of the last episode; a stop that is under way goes on without it."""
        braking = self.braking
        self.drop_plan()
        if braking:
            self._pace = 0.0
            self._commander.command.leave_step()
        self.expect_first_answer()

    def last_position(self) -> np.ndarray:
        """Return the last command, or where the robot was measured before the first: (columns,)."""
        commander, positions = self._commander, self._guard.state.positions
        return np.where(commander.unknown, positions, commander.command.setpoints)

    def start_state(self, now_s: float) -> RobotAtArrival:
        """Return the position of the robot, for a chunk that would set out from there."""
        commander, since_s = self._commander, self._commander.held_since_s
        held_s = now_s - since_s if since_s is not None else 0.0
        positions = self._guard.state.positions
        lowest, highest = commander.press_bounds(positions)
        return RobotAtArrival(
            setpoints=commander.command.setpoints,
            measured=commander.measured_or_commanded(positions),
            unknown=commander.unknown,
            lowest=lowest,
            highest=highest,
            cold=self._cold or held_s >= self._cold_after_s,
            starved=commander.command.reason is Reason.STARVED,
        )

    def _brake(self, positions: np.ndarray | None, dt_s: float) -> bool:
        """Continue along the plan more slowly; return False at its end."""
        replanner, commander = self._replanner, self._commander
        assert self._pace is not None
        left = commander.slower(dt_s)
        self._pace *= left
        plan_ns = round(dt_s * 1e9 * self._pace)
        if plan_ns == 0 or replanner.timeline.at_end:
            self._pace = 0.0
            return False
        segment = replanner.advance(plan_ns)
        step = replanner.timeline.sample_into(commander.target, commander.command.velocities)
        commander.slow_target(self._pace)
        commander.track(positions, dt_s, segment, step, at_most=left).reason = Reason.BRAKING
        return True

    def _end_of_plan_tick(self, dt_s: float, now_s: float) -> Command:
        """Brake and hold: nothing is left to execute."""
        replanner, commander = self._replanner, self._commander
        reason = Reason.STARVED
        if self._cold:
            reason = Reason.WAITING_FOR_CHUNK
        elif replanner.parameters.replan_mode == 'synchronous':
            reason = Reason.SYNCHRONOUS_WAIT
        else:
            self._counters.starved_ticks += 1
        was_moving = commander.moving
        if self._has_moved and not was_moving:
            self._require_policy(dt_s)
        command = commander.brake_tick(reason, self._guard.state, dt_s, now_s)
        if was_moving or replanner.timeline.in_force is not None:
            # The next chunk sets out from where the robot comes to rest.
            replanner.finish_plan(command.setpoints)
        return command

    def _require_policy(self, dt_s: float) -> None:
        self._waited_s += dt_s
        replanner = self._replanner
        usual_steps = replanner.delays.estimate(replanner.parameters.delay)
        usual_s = usual_steps * replanner.timeline.step_ns * 1e-9
        if self._waited_s > max(self._restart_after_s, _PATIENCE * usual_s):
            self._guard.detail = 'the policy has not answered'
            self._need_restart()
            raise OperatorRequired(Reason.STARVED)

    def _track(
        self, dt_ns: int, plan_ns: int, factor: float, now_s: float, now_ros_ns: int
    ) -> Command:
        replanner, commander, guard = self._replanner, self._commander, self._guard
        self._cold = False
        self._has_moved = True
        self._waited_s = 0.0
        segment = replanner.advance(plan_ns)
        replanner.note_age(segment, now_ros_ns)
        step = replanner.timeline.sample_into(commander.target, commander.command.velocities)
        if factor != 1.0:
            commander.slow_target(factor)
        if replanner.timeline.at_end:
            commander.end_without_velocity()
        if commander.refuses(guard.state.positions):
            guard.detail = 'the plan leads further from the measured position than allowed'
            guard.fault = Reason.STEP_FROM_MEASURED
            return self.stop_tick(guard.fault, dt_ns * 1e-9, now_s, now_ros_ns)
        guard.detail = ''
        return commander.track(guard.state.positions, dt_ns * 1e-9, segment, step)

    def _approach_tick(self, dt_s: float, factor: float) -> Command:
        """Run one tick of the approach; drop the plan at its end and ask for a new one."""
        commander, guard = self._commander, self._guard
        # First, because the stop moves the command in this very tick.
        if commander.approach.overdue:
            guard.detail = commander.approach.describe(commander.command.setpoints)
            raise OperatorRequired(Reason.APPROACH_TIMEOUT)
        command = commander.track_approach(guard.state.positions, dt_s, factor)
        if commander.arrived(guard.state.positions):
            guard.detail = ''
            self.drop_plan()
        return command
