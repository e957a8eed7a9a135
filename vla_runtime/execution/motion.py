"""One tick of the command: check whether the robot may move, then approach, track, brake, or hold.

Every stop goes through `halt`. It walks on along the plan at a falling pace, so that all joints
slow down together and stay on their path, and holds where they come to rest; a cause that the robot
file says to `freeze` on holds at once. The plan is dropped when the robot has come to rest.
"""

from __future__ import annotations

import math

import numpy as np

from vla_runtime.execution.command import Command, Counters, Reason
from vla_runtime.execution.commander import Commander
from vla_runtime.execution.guard import Guard
from vla_runtime.execution.intake import Standstill
from vla_runtime.execution.replanner import Replanner
from vla_runtime.execution.speed_scaling import SpeedScaling
from vla_runtime.execution.stopping import StopActions


class PersonNeeded(Exception):  # noqa: N818 - it is an answer, not an error
    """The robot must stop until a person has looked at it and starts it again."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Motion:
    """Moves the command along the plan; see the module's docstring.

    Args:
        guard: check of every tick that the robot may move.
        commander: owns the command.
        replanner: owns the plan.
        counters: counters of the executor.
        on_stop: way to stop, by cause.
        cold_after_s: a hold of this length makes the next chunk a new start.
        on_ros_clock: time passes as the ROS clock says, in a simulated world.

    Attributes:
        commanded_s: steady time of the last command, a tick's or the dead-man's; None before it.
        scaling: speed at which plans and approaches are followed.
    """

    def __init__(
        self,
        guard: Guard,
        commander: Commander,
        replanner: Replanner,
        counters: Counters,
        on_stop: StopActions,
        cold_after_s: float,
        *,
        on_ros_clock: bool,
    ) -> None:
        self._guard = guard
        self._commander = commander
        self._replanner = replanner
        self._counters = counters
        self._on_stop = on_stop
        self._cold_after_s = cold_after_s
        self._on_ros_clock = on_ros_clock
        self.commanded_s: float | None = None
        self.scaling = SpeedScaling()
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
        """The command of a started executor for this moment.

        Args:
            clock_fault: fault of the clocks; None without one.
            now_s: steady clock.
            now_ros_ns: ROS clock.

        Raises:
            PersonNeeded: the robot must stop, and not go on by itself.
        """
        fault = self._guard.check(clock_fault, now_ros_ns, self._commander.command)
        if fault is Reason.TRACKING_ERROR:
            # Whether to push on against whatever is in the way is for a person to decide.
            raise PersonNeeded(fault)
        if fault is Reason.CLOCK_STOPPED:
            # The plan waits for the clock as well, and goes on at the speed it had.
            return self._commander.pause(fault, now_s)
        if fault is not None or self.braking:
            elapsed_s = self._elapsed_s(now_s)
            if clock_fault is None and self._between_clock_messages(elapsed_s):
                return self._commander.command
            return self.halt(fault or self._cause, elapsed_s, now_s, now_ros_ns)
        dt_ns = self._guard.dt_ns
        if dt_ns == 0:
            return self._commander.command
        dt_s = dt_ns * 1e-9
        if self.scaling.factor != self.scaling.wanted:
            self.scaling.advance(dt_s, self._commander.slower(dt_s))
        factor = self.scaling.factor
        if factor == 0.0 and not self._commander.moving:
            return self._commander.pause(Reason.SPEED_SCALED_TO_ZERO, now_s)
        # A step that takes longer is no delay of the policy.
        plan_ns = round(dt_ns * factor)
        self._replanner.elapsed_ns += plan_ns
        if self._commander.approach.active:
            return self._go_near(dt_s, factor)
        if self._replanner.timeline.at_end:
            if self._commander.outside and not self._commander.moving:
                self._guard.detail = self._commander.go_back_inside()
            return self._rest(dt_s, now_s)
        return self._track(dt_ns, plan_ns, factor, now_s, now_ros_ns)

    def begin_halt(self, reason: Reason) -> bool:
        """Stop for this reason, braking or at once; return whether the robot brakes."""
        commander = self._commander
        commander.approach.stop()
        if commander.in_motion and not self._on_stop.freezes(reason):
            if self._pace is None:
                self._pace, self._cause = 1.0, reason
            return True
        self.drop_plan()
        if commander.in_motion or not commander.moving:
            commander.hold(reason)
        return False

    def stand(
        self, reason: Reason, clock_fault: Reason | None, now_s: float, now_ros_ns: int
    ) -> Command:
        """One tick of an executor that is not started: come to rest, then hold.

        Args:
            reason: reason why it is not started.
            clock_fault: fault of the clocks; None without one.
            now_s: steady clock.
            now_ros_ns: ROS clock.
        """
        dt_s = self._elapsed_s(now_s)
        if self._between_clock_messages(dt_s):
            if clock_fault is None:
                return self._commander.command
            return self._commander.pause(reason, now_s)
        positions = self._trusted_positions(now_ros_ns)
        blocked = self._guard.blocked(self._commander.command, positions)
        if self.braking:
            # What is in the way is not pushed any further.
            reason = Reason.TRACKING_ERROR if blocked else reason
            return self.halt(reason, dt_s, now_s, now_ros_ns)
        return self._commander.stay(reason, positions, dt_s, now_s)

    def halt(self, reason: Reason, dt_s: float, now_s: float, now_ros_ns: int | None) -> Command:
        """One tick of a stop, or of the hold that it ends in.

        Args:
            reason: why.
            dt_s: seconds since the last command; 0.0 where that is unknown.
            now_s: steady clock.
            now_ros_ns: ROS clock; None where no measured position is to be looked at.
        """
        commander = self._commander
        positions = None if now_ros_ns is None else self._trusted_positions(now_ros_ns)
        if self.braking and self._guard.too_far(commander.command, positions):
            # Whatever the stop was for, what is in the way is not pushed any further.
            reason = Reason.TRACKING_ERROR
        if self._on_stop.freezes(reason) and (self.braking or commander.in_motion):
            self.drop_plan()
            return commander.hold(reason, now_s, dt_s)
        if not self.begin_halt(reason):
            return commander.stay(reason, positions, dt_s, now_s)
        if dt_s > 0.0:
            self._replanner.elapsed_ns += round(dt_s * 1e9)
            if self._brake(positions, dt_s):
                return commander.command
        # A stop keeps the reason that it began with, whatever else was found meanwhile.
        commander.rest(self._cause, positions, dt_s, now_s)
        if not commander.moving:
            self.drop_plan()
        return commander.command

    def dead_man(self, now_s: float, *, started: bool) -> Command | None:
        """The command when ticks have stopped coming; `None` while they come.

        Args:
            now_s: steady clock.
            started: the executor is, so that the silence is a fault that begins.
        """
        guard, commander = self._guard, self._commander
        silent_s = guard.silent_s(now_s)
        if silent_s is None:
            return None
        begins = started and guard.fault is None
        if begins:
            guard.fault = Reason.TICK_LATE
            guard.detail = f'no tick for {silent_s:.3f} s'
        if self._on_ros_clock:
            # How fast the simulated world goes on is not known here.
            if begins:
                self.drop_plan()
                commander.hold(Reason.TICK_LATE, now_s)
        else:
            elapsed_s, self.commanded_s = self._elapsed_s(now_s), now_s
            if begins or self.braking:
                self.halt(Reason.TICK_LATE, elapsed_s, now_s, None)
            else:
                commander.stay(commander.command.reason, None, elapsed_s, now_s)
        return commander.command

    def _between_clock_messages(self, elapsed_s: float) -> bool:
        """Return whether the robot moves in a simulated world whose time stands still just now.

        Braking and giving way take time; without any they would be a step.
        """
        return self._on_ros_clock and elapsed_s <= 0.0 and self._commander.moving

    def _elapsed_s(self, now_s: float) -> float:
        """Seconds since the last command, a tick's or the dead-man's; 0.0 where that is unknown."""
        if self._on_ros_clock:
            return self._guard.elapsed_s
        elapsed_s = 0.0 if self.commanded_s is None else now_s - self.commanded_s
        return elapsed_s if 0.0 < elapsed_s < math.inf else 0.0

    def _trusted_positions(self, now_ros_ns: int) -> np.ndarray | None:
        return self._guard.trusted_positions(now_ros_ns, self._commander.command)

    def drop_plan(self) -> None:
        """Drop the plan; the next chunk makes a new start."""
        self._commander.approach.stop()
        self._cold = True
        self._pace = None
        self._replanner.drop(self._commander.command.setpoints)

    def standstill(self, now_s: float) -> Standstill:
        """Return the position of the robot, for a chunk that would set out from there."""
        commander, since_s = self._commander, self._commander.held_since_s
        held_s = now_s - since_s if since_s is not None else 0.0
        positions = self._guard.state.positions
        lowest, highest = commander.press_bounds(positions)
        return Standstill(
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

    def _rest(self, dt_s: float, now_s: float) -> Command:
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
        command = commander.rest(reason, self._guard.state.positions, dt_s, now_s)
        if was_moving or replanner.timeline.in_force is not None:
            # The next chunk sets out from where the robot comes to rest.
            replanner.finish_plan(command.setpoints)
        return command

    def _track(
        self, dt_ns: int, plan_ns: int, factor: float, now_s: float, now_ros_ns: int
    ) -> Command:
        replanner, commander, guard = self._replanner, self._commander, self._guard
        self._cold = False
        segment = replanner.advance(plan_ns)
        step = replanner.timeline.sample_into(commander.target, commander.command.velocities)
        if factor != 1.0:
            commander.slow_target(factor)
        if replanner.timeline.at_end:
            commander.come_to_rest()
        if commander.refuses(guard.state.positions):
            guard.detail = 'the plan leads further from the measured position than allowed'
            guard.fault = Reason.STEP_FROM_MEASURED
            return self.halt(guard.fault, dt_ns * 1e-9, now_s, now_ros_ns)
        guard.detail = ''
        return commander.track(guard.state.positions, dt_ns * 1e-9, segment, step)

    def _go_near(self, dt_s: float, factor: float) -> Command:
        """Run one tick of the approach; drop the plan at its end and ask for a new one."""
        commander, guard = self._commander, self._guard
        # First, because the stop moves the command in this very tick.
        if commander.approach.overdue:
            guard.detail = commander.approach.describe(commander.command.setpoints)
            raise PersonNeeded(Reason.APPROACH_TIMEOUT)
        command = commander.go_near(guard.state.positions, dt_s, factor)
        if commander.arrived(guard.state.positions):
            guard.detail = ''
            self.drop_plan()
        return command
