"""The one command of an executor and the ways to change it: hold, approach, track, brake.

To hold is to repeat the last commanded position and to command zero velocity. Before anything was
commanded there is nothing to hold: the command is `IDLE` and must not be published.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vla_runtime.execution.approach import NEGLIGIBLE, Approach, StartParameters
from vla_runtime.execution.columns import Columns
from vla_runtime.execution.command import Command, CommandKind, Counters, Reason
from vla_runtime.execution.limits import Limits
from vla_runtime.execution.motion_limiter import MotionLimiter
from vla_runtime.execution.state import MeasuredState
from vla_runtime.execution.timeline import Segment


class Commander:
    """Owns the command, the motion limiter and the approach."""

    def __init__(
        self,
        columns: Columns,
        limits: Limits,
        start: StartParameters,
        counters: Counters,
        dry_run: bool,
    ) -> None:
        self._columns = columns
        self._limits = limits
        self._start = start
        self._tolerance = start.tolerance * columns.scale
        self._limiter = MotionLimiter(limits, columns)
        self._counters = counters
        self._guarded = columns.has_feedback & columns.is_position
        self._unguarded = ~columns.has_feedback & columns.is_position
        self._rejects_far_steps = limits.actions.step_from_measured == 'reject'
        self.approach = Approach(columns, start, limits.velocity)
        # Where to go first after a start outside the limits.
        self._inside: np.ndarray | None = None
        # Where the plan or the approach is now; tracked within the limits.
        self.target = np.zeros(columns.count)
        # Whether the setpoints stand for something that may be published.
        self.has_commanded = False
        self.held_since_s: float | None = None
        self.command = Command(
            CommandKind.IDLE,
            Reason.NOT_STARTED,
            np.zeros(columns.count),
            np.zeros(columns.count),
            dry_run=dry_run,
        )

    @property
    def unknown(self) -> np.ndarray:
        """(columns,) bool: positions that nobody measures and that were never commanded."""
        return self._unguarded & (not self.has_commanded)

    @property
    def moving(self) -> bool:
        """Whether the last command moved."""
        return self._limiter.moving

    def snapshot(self) -> Command:
        """A copy that later ticks leave alone."""
        command = self.command
        return replace(
            command, setpoints=command.setpoints.copy(), velocities=command.velocities.copy()
        )

    def forget(self, dry_run: bool) -> None:
        """What was commanded says nothing about the robot."""
        self.has_commanded = False
        self.command.dry_run = dry_run

    def take_position(self, state: MeasuredState) -> str:
        """Set the position to hold at: the last one where the robot is near it, or the measured.

        A robot that is found outside its limits is held where it is; `return_inside` then brings
        it back.

        Returns:
            Why that cannot be done; empty when it was.
        """
        setpoints, guarded, limits = self.command.setpoints, self._guarded, self._limits
        if self._columns.any_continuous:
            state.bring_near(setpoints)
        measured = state.positions
        near = (np.abs(setpoints - measured) <= self._tolerance)[guarded].all()
        first = setpoints if self.has_commanded and near else measured
        inside = np.clip(first, limits.hard_lower, limits.hard_upper)
        excess = np.where(guarded, np.abs(first - inside) / self._columns.scale, 0.0)
        goes_back = self._start.on_too_far == 'approach' and not self.unknown.any()
        share = 1.0 if goes_back else NEGLIGIBLE
        worst = int(np.argmax(excess))
        if excess[worst] > share * self._start.tolerance:
            return self._describe_outside(worst, measured[worst])
        np.copyto(setpoints, first if goes_back else inside, where=guarded)
        self._inside = inside if goes_back and excess[worst] > 0.0 else None
        if not self._unguarded.any():
            self.has_commanded = True
        return ''

    def _describe_outside(self, column: int, measured: float) -> str:
        limits = self._limits
        return (
            f"'{self._columns.names[column]}' is at {measured:.4g}, outside its limits "
            f'{limits.hard_lower[column]:.4g} to {limits.hard_upper[column]:.4g}; move it back '
            f'inside by hand (with start.on_too_far approach up to {self._tolerance[column]:g}, '
            'the start tolerance, is gone back at the approach speed)'
        )

    def return_inside(self) -> bool:
        """Begin the approach to the limits after a start outside; whether there is one."""
        inside, self._inside = self._inside, None
        if inside is None:
            return False
        self.approach.begin(self.command.setpoints, inside)
        return True

    def hold(self, reason: Reason, now_s: float | None = None) -> Command:
        """Stop where the last command was, from this very tick on."""
        command = self.command
        command.kind = CommandKind.HOLD if self.has_commanded else CommandKind.IDLE
        if command.reason is not reason:
            self._counters.holds[reason] += 1
        command.reason = reason
        if self._columns.any_velocity:
            command.setpoints[self._columns.is_velocity] = 0.0
        command.velocities[:] = 0.0
        command.step = command.chunk = command.row = -1
        command.limited = False
        self._limiter.stop()
        if self.held_since_s is None:
            self.held_since_s = now_s
        return command

    def rest(self, reason: Reason, measured: np.ndarray, dt_s: float, now_s: float) -> Command:
        """Nothing is left to go on with: brake within the limits for one tick, or hold.

        In motion the command stays what it is, but for its reason, until it stands still.
        """
        command = self.command
        if not self.moving:
            return self.hold(reason, now_s)
        self._limiter.brake(
            command.setpoints, command.velocities, measured, dt_s, stay_near=not command.dry_run
        )
        if not self.moving:
            return self.hold(reason, now_s)
        command.reason = Reason.BRAKING
        command.limited = True
        self._counters.limited_ticks += 1
        return command

    def arrived(self) -> bool:
        """Whether the approach is over: at its goal, and inside the limits."""
        setpoints = self.command.setpoints
        return self.approach.arrived(setpoints) and not self._limiter.outside(setpoints)

    def come_to_rest(self) -> None:
        """The plan ends at `target`: arrive there without velocity."""
        self.command.velocities[:] = 0.0
        if self._columns.any_velocity:
            self.target[self._columns.is_velocity] = 0.0

    def refuses(self, measured: np.ndarray) -> bool:
        """Whether `target` is further from the measured position than may be commanded."""
        return (
            self._rejects_far_steps
            and not self.command.dry_run
            and self._limiter.too_far(self.target, measured)
        )

    def track(self, measured: np.ndarray, dt_s: float, segment: Segment, step: int) -> Command:
        """Follow the plan for one tick: `target` is its setpoint, `velocities` its velocity."""
        command = self._move(measured, dt_s)
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
        """Begin the approach to a row; columns that nobody knows are taken to be there already."""
        np.copyto(self.command.setpoints, row, where=self.unknown)
        self.approach.begin(self.command.setpoints, row)

    def go_near(self, measured: np.ndarray, dt_s: float) -> Command:
        """One tick of the approach."""
        np.copyto(self.target, self.approach.advance(dt_s, self.command.velocities))
        command = self._move(measured, dt_s, self.approach.speed)
        command.kind = CommandKind.APPROACH
        command.reason = Reason.APPROACHING
        return command

    def _move(self, measured: np.ndarray, dt_s: float, speed: np.ndarray | None = None) -> Command:
        """Move the command towards `target` within the limits."""
        command = self.command
        command.limited = self._limiter.apply(
            command.setpoints,
            self.target,
            command.velocities,
            measured,
            dt_s,
            speed,
            stay_near=not command.dry_run,
        )
        self._counters.limited_ticks += command.limited
        self.has_commanded = True
        self.held_since_s = None
        return command
