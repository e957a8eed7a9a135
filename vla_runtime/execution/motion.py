"""One tick of a started executor: look whether the robot may move, then approach, track, or rest.

To hold is to stop at once: that is for faults and for the operator. A plan that ends without a
successor is no fault, so the robot brakes within its limits and holds where it comes to rest.
"""

from __future__ import annotations

from vla_runtime.execution.command import Command, Counters, Reason
from vla_runtime.execution.commander import Commander
from vla_runtime.execution.guard import Guard
from vla_runtime.execution.intake import Standstill
from vla_runtime.execution.replanner import Replanner


class PersonNeeded(Exception):  # noqa: N818 - it is an answer, not an error
    """The robot must hold until someone who looked at it starts it again."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Motion:
    """Moves the command along the plan; see the module's words.

    Args:
        guard: says whether the robot may move.
        commander: owns the command.
        replanner: owns the plan.
        counters: of the executor.
        longest_s: motion that one command may contain, in seconds.
        cold_after_s: a hold of this length makes the next chunk a new start.
    """

    def __init__(
        self,
        guard: Guard,
        commander: Commander,
        replanner: Replanner,
        counters: Counters,
        longest_s: float,
        cold_after_s: float,
    ) -> None:
        self._guard = guard
        self._commander = commander
        self._replanner = replanner
        self._counters = counters
        self._longest_s = longest_s
        self._cold_after_s = cold_after_s
        # Whether the next chunk sets out anew and has to begin where the robot is.
        self._cold = True

    def run(self, clock_fault: Reason | None, now_s: float, now_ros_ns: int) -> Command:
        """The command for this moment.

        Raises:
            PersonNeeded: the robot must hold, and not go on by itself.
        """
        fault = self._guard.check(clock_fault, now_ros_ns, self._commander.command)
        if fault is not None:
            return self._hold_for(fault, now_s)
        dt_ns = self._guard.dt_ns
        if dt_ns == 0:
            return self._commander.command
        self._replanner.elapsed_ns += dt_ns
        dt_s = min(dt_ns * 1e-9, self._longest_s)
        if self._commander.approach.active:
            return self._go_near(dt_s)
        if self._replanner.timeline.at_end:
            return self._rest(dt_s, now_s)
        return self._track(dt_ns, dt_s, now_s)

    def drop_plan(self) -> None:
        """Nothing of the past is executed any more; the next chunk makes a new start."""
        self._commander.approach.stop()
        self._cold = True
        self._replanner.drop(self._commander.command.setpoints)

    def standstill(self, now_s: float) -> Standstill:
        """Where the robot is, for a chunk that would set out from there."""
        commander, since_s = self._commander, self._commander.held_since_s
        held_s = now_s - since_s if since_s is not None else 0.0
        return Standstill(
            setpoints=commander.command.setpoints,
            unknown=commander.unknown,
            cold=self._cold or held_s >= self._cold_after_s,
            starved=commander.command.reason is Reason.STARVED,
        )

    def _hold_for(self, fault: Reason, now_s: float) -> Command:
        if fault is Reason.TRACKING_ERROR:
            # Whether to push on against whatever is in the way is for a person to decide.
            raise PersonNeeded(fault)
        # Only a clock that stands still leaves the plan what it was.
        if fault is not Reason.CLOCK_STOPPED:
            self.drop_plan()
        return self._commander.hold(fault, now_s)

    def _rest(self, dt_s: float, now_s: float) -> Command:
        """Nothing is left to execute: brake, and hold."""
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

    def _track(self, dt_ns: int, dt_s: float, now_s: float) -> Command:
        replanner, commander, guard = self._replanner, self._commander, self._guard
        self._cold = False
        segment = replanner.advance(dt_ns)
        step = replanner.timeline.sample_into(commander.target, commander.command.velocities)
        if replanner.timeline.at_end:
            commander.come_to_rest()
        if commander.refuses(guard.state.positions):
            guard.detail = 'the plan leads further from the measured position than allowed'
            guard.fault = Reason.STEP_FROM_MEASURED
            return self._hold_for(guard.fault, now_s)
        guard.detail = ''
        return commander.track(guard.state.positions, dt_s, segment, step)

    def _go_near(self, dt_s: float) -> Command:
        """One tick of the approach; at its end the plan is asked for anew, from where it led."""
        commander, guard = self._commander, self._guard
        command = commander.go_near(guard.state.positions, dt_s)
        if commander.arrived():
            guard.detail = ''
            self.drop_plan()
        elif commander.approach.overdue:
            guard.detail = commander.approach.describe(command.setpoints)
            raise PersonNeeded(Reason.APPROACH_TIMEOUT)
        return command
