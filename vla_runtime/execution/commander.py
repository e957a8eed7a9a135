"""The one command of an executor and the ways to change it: hold, approach, track, brake.

A hold gives way a little, at the speed of an approach (`CompliantHold`). A robot that is stopped
takes its command along: where a person has moved it, the command is set to where it is
(`MovedJoints`). To a place that nobody saw the robot go to, and to one where it may only seem to
stand, the command comes slowly (`Joining`). A gripper is left out: the distance is the force of its
grip.
"""

from __future__ import annotations

import numpy as np

from vla_runtime.execution.approach import NEGLIGIBLE, Approach
from vla_runtime.execution.blocked_joints import BlockedJoints
from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.command import Command, CommandKind, Counters, Reason
from vla_runtime.execution.compliant_hold import CompliantHold
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.joining import Joining
from vla_runtime.execution.leader import Leader
from vla_runtime.execution.motion_limiter import MotionLimiter
from vla_runtime.execution.moved_joints import MovedJoints
from vla_runtime.execution.state import MeasuredState
from vla_runtime.execution.timeline import Segment

_FULL_TURN = 2.0 * np.pi
_MOTION = (CommandKind.TRACK, CommandKind.APPROACH, CommandKind.LEAD)
_GOES_BACK = 'the robot is outside its limits: going back inside'
# A command that is no further from the robot than this share of `hold_follows`, nor than it may go
# in a control period, stays at a start.
_SAME_SHARE = 0.2
# A gripper whose command leads it by this share of what it may is stopped by an object.
_PRESSES_SHARE = 0.5


class Commander:
    """Owns the command, the motion limiter and the approach."""

    def __init__(
        self,
        model: ColumnModel,
        config: ExecutorConfig,
        blocked_joints: BlockedJoints,
        counters: Counters,
        *,
        dry_run: bool,
    ) -> None:
        self._model = model
        self._columns, self._limits = model.columns, model.limits
        self._returns_inside = config.start.on_too_far == 'approach'
        self._limiter = MotionLimiter(model.limits, model.columns, config.longest_s)
        self._counters = counters
        self._rejects_far_steps = model.limits.actions.step_from_measured == 'reject'
        self.approach = Approach(model, config.start.approach_timeout_s)
        self.moved_joints = MovedJoints(model)
        self.joining = Joining(model)
        self._same = np.minimum(
            model.limits.velocity * config.control_period_s, _SAME_SHARE * model.follows
        )
        # Whether the next tick's command begins where the robot is.
        self._seated = False
        self.compliant_hold = CompliantHold(model, blocked_joints)
        # Where to go first after a start away from the last command, or outside the limits.
        self._first_goal: np.ndarray | None = None
        self._found_outside = False
        self._was_moved = False
        # Where the plan or the approach is now; tracked within the limits.
        self.target = np.zeros(model.columns.count)
        # Whether the setpoints stand for something that may be published.
        self.has_commanded = False
        self.held_since_s: float | None = None
        self.command = Command(
            CommandKind.IDLE,
            Reason.NOT_STARTED,
            np.zeros(model.columns.count),
            np.zeros(model.columns.count),
            dry_run=dry_run,
        )

    @property
    def unknown(self) -> np.ndarray:
        """(columns,) bool: positions without a measurement that were never commanded."""
        return self._model.unguarded & (not self.has_commanded)

    def measured_or_commanded(self, positions: np.ndarray) -> np.ndarray:
        """Return the measured positions (columns,), and the last command where there are none."""
        return np.where(self._model.guarded, positions, self.command.setpoints)

    @property
    def moving(self) -> bool:
        return self._limiter.moving

    @property
    def in_motion(self) -> bool:
        """True when the last command followed a plan, an approach or a leader, and moved."""
        return self.moving and self.command.kind in _MOTION

    @property
    def places(self) -> np.ndarray | None:
        """Commanded positions (columns,), NaN where none; None before any, and in a dry run."""
        if not self.has_commanded or self.command.dry_run:
            return None
        return np.where(self._model.guarded, self.command.setpoints, np.nan)

    def forget(self, dry_run: bool) -> None:
        """Forget the last command, which says nothing about the robot now."""
        self.joining.end()
        self.has_commanded = False
        self.command.dry_run = dry_run

    def begin_tick(self) -> None:
        """Note whether the command of this tick begins where the robot is."""
        self.command.seats, self._seated = self._seated, False

    def why_not_yet(self) -> str:
        """Describe a hold on its way to the robot that is not to be cut short; '' without one."""
        where = self.joining.progress(self.command.setpoints)
        if not where:
            return ''
        return (
            f'the command is still on its way to where the robot was found: {where}; '
            'call ~/start again then'
        )

    def why_not_take(self, state: MeasuredState, references: np.ndarray) -> str:
        """Describe why `take_position` cannot be done; empty when it can."""
        _, measured, _ = self._found(state, references)
        _, _, excess = self._goal_of(measured)
        tolerated = 1.0 if self._goes_back else NEGLIGIBLE
        worst = int(np.argmax(excess))
        return self._describe_outside(worst, measured[worst]) if excess[worst] > tolerated else ''

    @property
    def _goes_back(self) -> bool:
        """Whether a robot that is found outside its limits is brought back inside."""
        return self._returns_inside and not self.unknown.any()

    def _found(
        self, state: MeasuredState, references: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return where the robot is measured and taken to be, and how far from its command."""
        # Where nothing that the setpoints say is of the robot the driver's own number counts.
        positions = state.near(self.command.setpoints if self.has_commanded else None)
        measured = self.held_at(references, positions)
        return positions, measured, np.abs(self.command.setpoints - measured)

    def _goal_of(self, measured: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which columns stay as they are commanded, where all go, and how far outside."""
        setpoints, guarded = self.command.setpoints, self._model.guarded
        near = self._model.grips | (np.abs(setpoints - measured) <= self._model.follows)
        stays = self._model.grips | near[guarded].all()
        goal = np.where(stays, setpoints, measured) if self.has_commanded else measured
        inside = np.where(guarded, self._inside(goal), setpoints)
        return stays, inside, np.where(guarded, np.abs(goal - inside) / self._model.tolerance, 0.0)

    def take_position(
        self, state: MeasuredState, references: np.ndarray, unseen: np.ndarray
    ) -> None:
        """Set the position to set out from: the measured one, or its controller's near to it.

        A command elsewhere is set to where the robot is, and `set_out_first` takes it back, as far
        as an arm sags (`hold_follows`). Grippers keep their grip. A robot outside its limits is
        held there and brought back inside the same way.

        Args:
            state: plausible measured positions; `why_not_take` has nothing against them.
            references: (columns,) where the controllers hold the robot; not-a-number where nobody
                says so.
            unseen: (columns,) bool, columns that nobody saw go there: the command comes slowly.
        """
        setpoints, guarded = self.command.setpoints, self._model.guarded
        positions, measured, away = self._found(state, references)
        np.copyto(state.positions, positions)
        stays, inside, excess = self._goal_of(measured)
        self._was_moved = self.has_commanded and not stays[guarded].all()
        joins = unseen & self._model.movable & (away > self._model.follows) & self.has_commanded
        if self.has_commanded:
            self._seat(guarded & ~self._model.grips & ~joins & (away > self._same), measured)
            self._leave_place()
        else:
            # A robot that is outside by a rounding is commanded inside at once.
            outside = self._goes_back & (excess > NEGLIGIBLE)
            np.copyto(setpoints, np.where(outside, measured, inside), where=guarded)
        state.trust(~joins)
        state.plausibility.after_gap[:] = False
        self.joining.begin(joins, positions, self._inside(positions))
        self._seated = not self.joining.active
        self._first_goal = None if self.joining.active or (setpoints == inside).all() else inside
        self._found_outside = self._goes_back and self._limiter.outside(setpoints)
        if not self._model.unguarded.any():
            self.has_commanded = True

    def held_at(self, references: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return where the controllers hold the robot (columns,): the references near to it.

        An arm that sags would drop by as much again from the measured position.
        """
        sags = np.abs(references - positions) <= self._model.follows
        return np.where(sags, references, positions)

    def go_along(self, columns: np.ndarray, references: np.ndarray, state: MeasuredState) -> None:
        """Set the command of columns (bool) that are sent to nobody to where the robot is held."""
        place = self.held_at(references, state.positions)
        inside = self._inside(place)
        place = np.where(np.abs(inside - place) <= self._model.tolerance, place, inside)
        columns = columns & (place != self.command.setpoints)
        if np.count_nonzero(columns):
            self.moved_joints.set_to_measured(columns, self.command.setpoints, place)
            self._seat(columns, place)

    def off_by_full_turn(self, measured: np.ndarray) -> np.ndarray:
        """Return the continuous columns (bool) that are whole turns from their command."""
        lead = self.command.setpoints - measured
        turns = np.round(lead / _FULL_TURN)
        off = np.abs(lead - turns * _FULL_TURN) <= self._model.follows
        return self._columns.is_continuous & (turns != 0.0) & off

    def describe_lead(self, columns: np.ndarray, measured: np.ndarray) -> str:
        """Name the column, of those given, that is furthest from its command, and how far."""
        lead = np.where(columns, np.abs(self.command.setpoints - measured), 0.0)
        worst = int(np.argmax(lead / self._columns.scale))
        return f"'{self._columns.names[worst]}' by {lead[worst]:.3g}"

    def join_returned(self, state: MeasuredState) -> None:
        """Let the hold of a stopped robot come to joints that rest where they were found.

        After a gap, by the same publisher's word: to joints that were found elsewhere, and to those
        that a braking command has left behind while their motors were off. A joint that is said to
        be a whole turn further is left to a person.
        """
        plausibility = state.plausibility
        short = plausibility.after_gap & ~plausibility.unseen
        short &= np.abs(self.command.setpoints - state.positions) > self._model.follows
        columns = (plausibility.returned | short) & self._model.movable
        if not np.count_nonzero(columns):
            return
        columns &= ~self.off_by_full_turn(state.positions)
        columns &= state.still_for(plausibility.rests_s)
        columns &= np.abs(self._inside(state.positions) - state.positions) <= self._model.tolerance
        plausibility.after_gap &= ~columns
        self.joining.begin(columns, state.positions, self._inside(state.positions))

    def give_up(self, columns: np.ndarray, state: MeasuredState) -> None:
        """Let the hold come to joints (columns,) that press on something, to where they rest."""
        if self.has_commanded and np.count_nonzero(columns):
            self.joining.begin(columns, state.positions, self._inside(state.positions))

    def join_tick(
        self, reason: Reason, state: MeasuredState, dt_s: float, now_s: float, pace: float = 1.0
    ) -> str:
        """One tick of a hold that comes to where the robot was found; return why it ended, or ''.

        Nothing is commanded where it ended. `dt_s` is 0.0 where unknown; `pace` a share of its
        speed.
        """
        command, joining = self.command, self.joining
        changed = joining.changed(state.positions)
        if np.count_nonzero(changed):
            joining.end()
            state.plausibility.give_up(changed & state.plausibility.unseen)
            return joining.describe_change(state.positions)
        if dt_s > 0.0:
            speed = joining.aim(command.setpoints, self.target, dt_s) * pace
            command.velocities[:] = 0.0
            # It is far from the robot and comes nearer: no distance from there limits it.
            around = np.where(self._columns.is_velocity, state.positions, command.setpoints)
            self._limiter.apply(
                command.setpoints, self.target, command.velocities, around, dt_s, speed
            )
            self.compliant_hold.set_to_measured(joining.columns, command.setpoints)
        self._describe_hold(reason, now_s)
        if joining.arrived(command.setpoints):
            joining.end()
            state.trust(joining.columns)
            self.moved_joints.set_to_measured(joining.columns, command.setpoints, state.positions)
            # Others may have been moved meanwhile, which nobody looked at.
            state.largest_step[:] = 0.0
        return ''

    def set_to_measured(self, columns: np.ndarray, measured: np.ndarray) -> bool:
        """Set the command of columns (bool) to `measured`, plausible; return whether it changed."""
        if not self.has_commanded or not np.count_nonzero(columns):
            return False
        inside = self._inside(measured)
        # A robot that a person has left a little outside its limits stays there. No
        # command leads further outside than a start may.
        outside = np.abs(inside - measured)
        stays = (outside > self._model.follows) & (outside <= self._model.tolerance)
        self.moved_joints.set_to_measured(columns, self.command.setpoints, measured)
        self._seat(columns, np.where(stays, measured, inside))
        self.command.seats = True
        return True

    def overridden(self, references: np.ndarray) -> np.ndarray:
        """Return the columns whose controllers do not hold the last command, (columns,) bool."""
        return ~self._model.grips & (
            np.abs(references - self.command.setpoints) > self._model.follows
        )

    def _seat(self, columns: np.ndarray, place: np.ndarray) -> None:
        np.copyto(self.command.setpoints, place, where=columns)
        self.command.velocities[:] = 0.0
        self._limiter.stop()
        self.compliant_hold.set_to_measured(columns, place)

    def _leave_place(self) -> None:
        self.moved_joints.leave()
        self.compliant_hold.leave()

    def _describe_outside(self, column: int, measured: float) -> str:
        limits, names = self._limits, self._columns.names
        why = (
            f'with start.on_too_far approach the executor itself goes back up to '
            f'{self._model.tolerance[column]:g}, the start tolerance, at the approach speed'
        )
        if self.unknown.any():
            why = (
                f"the executor cannot: nothing measures '{names[int(self.unknown.argmax())]}', "
                'which was not commanded yet'
            )
        return (
            f"'{names[column]}' is at {measured:.4g}, outside its limits "
            f'{limits.hard_lower[column]:.4g} to {limits.hard_upper[column]:.4g}; move it back '
            f'inside by hand ({why})'
        )

    def set_out_first(self) -> str:
        """Begin the approach that a start needs; return its description, empty without one."""
        goal, self._first_goal = self._first_goal, None
        if goal is None:
            return self._describe_move()
        self.approach.begin(self.command.setpoints, goal)
        if self.outside:
            return _GOES_BACK
        return self._describe_move()

    def _describe_move(self) -> str:
        if self.joining.active:
            return 'the command comes to where the robot is said to be, at the approach speed'
        if self._was_moved:
            return 'the robot was moved while it held: it sets out from where it is'
        return ''

    @property
    def outside(self) -> bool:
        """True while the command is outside the limits, because the robot was at the start."""
        # No command leads outside, so that the limits are looked at only until it is inside once.
        self._found_outside = self._found_outside and self._limiter.outside(self.command.setpoints)
        return self._found_outside

    @property
    def on_its_way(self) -> bool:
        """True while the command goes where an approach or a join leads it."""
        return self.approach.active or self.joining.active

    @property
    def approaches(self) -> bool:
        """True while the robot is on its way to where it may set out, and no chunk counts."""
        return self.on_its_way or self.outside

    @property
    def progress(self) -> str:
        """Name the column that is furthest from where the approach goes; empty without one."""
        setpoints = self.command.setpoints
        return self.joining.progress(setpoints) or self.approach.progress(setpoints)

    def go_back_inside(self) -> str:
        self.approach.begin(self.command.setpoints, self._inside(self.command.setpoints))
        return _GOES_BACK

    def _inside(self, positions: np.ndarray) -> np.ndarray:
        inside = np.clip(positions, self._model.lowest, self._model.highest)
        return np.where(self._model.guarded, inside, positions)

    def hold_tick(
        self, reason: Reason, state: MeasuredState | None, dt_s: float, now_s: float
    ) -> Command:
        """One tick of a hold, which gives way to a joint that rests too far from it.

        `state` is None where it is not to be trusted; `dt_s` 0.0 where it is unknown.
        """
        command = self.command
        if dt_s <= 0.0 or command.dry_run or not self.has_commanded:
            return self.hold(reason, now_s, dt_s)
        compliant_hold = self.compliant_hold
        if state is not None and compliant_hold.begins_or_goes_on(command.setpoints, state):
            reached = compliant_hold.aim(command.setpoints, state.positions, self.target)
            command.velocities[:] = 0.0
            speed = self._model.approach_speed
            self._limiter.apply(
                command.setpoints, self.target, command.velocities, reached, dt_s, speed
            )
            compliant_hold.count(command.setpoints)
        elif self.moving:
            self._brake(None if state is None else state.positions, dt_s)
        else:
            return self.hold(reason, now_s, dt_s)
        self._describe_hold(reason, now_s)
        return command

    def _brake(self, positions: np.ndarray | None, dt_s: float) -> None:
        """Slow the command down for one tick, each column on its own."""
        command = self.command
        self._limiter.brake(
            command.setpoints,
            command.velocities,
            positions,
            dt_s,
            stay_near=not command.dry_run,
        )

    def leave_plan(self, *, paused: bool) -> None:
        """React to a dropped plan: hold, or brake over the next ticks while in motion."""
        if not self.moving:
            self.hold(Reason.PAUSED if paused else Reason.WAITING_FOR_CHUNK)
            return
        if paused:
            self._describe_hold(Reason.PAUSED, None)
            return
        command = self.command
        command.reason = Reason.BRAKING
        command.leave_step()

    def hold(self, reason: Reason, now_s: float | None = None, dt_s: float = 0.0) -> Command:
        """Stop where the last command was, from this very tick on."""
        self._describe_hold(reason, now_s)
        command = self.command
        if self._columns.any_velocity:
            command.setpoints[self._columns.is_velocity] = 0.0
        command.velocities[:] = 0.0
        self._limiter.stop(dt_s)
        return command

    def hold_in_place(self, reason: Reason, now_s: float) -> Command:
        """Hold while the clock or the plan stands still; positions go on at the speed they had."""
        self._describe_hold(reason, now_s)
        if self._columns.any_velocity:
            self.command.setpoints[self._columns.is_velocity] = 0.0
            self._limiter.velocities[self._columns.is_velocity] = 0.0
        return self.command

    def _describe_hold(self, reason: Reason, now_s: float | None) -> None:
        """Mark the command as a hold, and count where one begins."""
        command = self.command
        command.kind = CommandKind.HOLD if self.has_commanded else CommandKind.IDLE
        if command.reason is not reason:
            self._counters.holds[reason] += 1
        command.reason = reason
        command.leave_step()
        command.limited = False
        if self.held_since_s is None:
            self.held_since_s = now_s

    def brake_tick(
        self, reason: Reason, state: MeasuredState | None, dt_s: float, now_s: float
    ) -> Command:
        """Brake within the limits for one tick, or hold: nothing is left to execute."""
        command = self.command
        if not self.moving or command.kind is CommandKind.HOLD:
            return self.hold_tick(reason, state, dt_s, now_s)
        if dt_s <= 0.0:
            return command
        self._brake(None if state is None else state.positions, dt_s)
        if not self.moving:
            return self.hold(reason, now_s, dt_s)
        command.reason = Reason.BRAKING
        command.limited = False
        return command

    def arrived(self, measured: np.ndarray) -> bool:
        """Return whether the approach is at its goal and inside the limits.

        A gripper that an object stops is there as soon as it presses as far as it may.
        """
        setpoints, target = self.command.setpoints, self.approach.target
        reached = np.clip(target, *self.press_bounds(measured))
        pressed = (reached != target) & (np.abs(setpoints - reached) <= self._model.tolerance)
        there = self.approach.arrived(np.where(pressed, target, setpoints))
        return there and not self.outside

    def press_bounds(self, measured: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return lowest and highest commands, (columns,), of pressing grippers; else infinite."""
        setpoints, step = self.command.setpoints, self._limits.step_from_measured
        lead = setpoints - measured
        presses = self._model.grips & (np.abs(lead) >= _PRESSES_SHARE * step)
        lowest, highest = measured - step, measured + step
        return (
            np.where(presses & (lead < 0.0), np.minimum(lowest, setpoints), -np.inf),
            np.where(presses & (lead > 0.0), np.maximum(highest, setpoints), np.inf),
        )

    def end_without_velocity(self) -> None:
        """Arrive at `target` without velocity, at the plan's end."""
        self.command.velocities[:] = 0.0
        if self._columns.any_velocity:
            self.target[self._columns.is_velocity] = 0.0

    def refuses(self, measured: np.ndarray) -> bool:
        """Return whether `target` is further from the measured position than may be commanded."""
        if not self._rejects_far_steps or self.command.dry_run:
            return False
        # An object keeps a gripper from its plan, which is no fault: it is clamped.
        return self._limiter.too_far(np.where(self._model.grips, measured, self.target), measured)

    def slower(self, dt_s: float) -> float:
        """Fraction of velocity that every column keeps after a tick of braking."""
        return 1.0 - self._limiter.slowing(dt_s)

    def slow_target(self, pace: float) -> None:
        self.command.velocities *= pace
        if self._columns.any_velocity:
            self.target[self._columns.is_velocity] *= pace

    def track(
        self,
        positions: np.ndarray | None,
        dt_s: float,
        segment: Segment,
        step: int,
        *,
        at_most: float | None = None,
    ) -> Command:
        """Follow the plan for one tick: `target` is its setpoint, `velocities` its velocity.

        `positions` (columns,) are None where not to be trusted; `at_most` is the share of its
        velocity that no column may exceed while the robot brakes.
        """
        command = self._move(positions, dt_s, at_most=at_most)
        command.kind = CommandKind.TRACK
        command.reason = Reason.TRACKING
        if step >= segment.boundary:
            command.reason = Reason.OVERRUN
            self._counters.overrun_ticks += 1
        command.step = step
        command.chunk = segment.chunk.number
        command.row = step - segment.chunk.first_step
        return command

    def set_out_for(self, row: np.ndarray) -> None:
        """Begin the approach to a row; unknown columns are taken to be there already."""
        np.copyto(self.command.setpoints, row, where=self.unknown)
        self.approach.begin(self.command.setpoints, row)

    def set_out_to(self, pose: np.ndarray) -> None:
        """Begin the approach to a pose (columns,), inside the limits."""
        self.approach.begin(self.command.setpoints, self._inside(pose))

    def track_approach(self, measured: np.ndarray, dt_s: float, pace: float) -> Command:
        np.copyto(self.target, self.approach.advance(dt_s * pace, self.command.velocities))
        self.command.velocities *= pace
        command = self._move(measured, dt_s, self._model.approach_speed)
        command.kind = CommandKind.APPROACH
        command.reason = Reason.APPROACHING
        return command

    def lead(self, leader: Leader, measured: np.ndarray, dt_s: float, pace: float) -> Command:
        """Follow the leader for one tick, at this share of the speed; other columns rest."""
        command = self.command
        np.copyto(self.target, command.setpoints)
        self.target[self._columns.is_velocity] = 0.0
        command.velocities[:] = 0.0
        speed = leader.advance(dt_s, command.setpoints, self.target, command.velocities)
        command = self._move(measured, dt_s, np.minimum(speed, self._limits.velocity) * pace)
        command.kind, command.reason = CommandKind.LEAD, Reason.LEADING
        command.leave_step()
        return command

    def _move(
        self,
        positions: np.ndarray | None,
        dt_s: float,
        speed: np.ndarray | None = None,
        *,
        at_most: float | None = None,
    ) -> Command:
        command = self.command
        self._leave_place()
        command.limited = self._limiter.apply(
            command.setpoints,
            self.target,
            command.velocities,
            positions,
            dt_s,
            speed,
            stay_near=not command.dry_run,
            at_most=at_most,
        )
        if command.limited:
            self._counters.count_limited(self._limiter.causes())
        self.has_commanded = True
        self.held_since_s = None
        return command
