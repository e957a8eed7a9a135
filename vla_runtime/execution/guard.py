"""Faults that stop the motion at a tick.

In this order: the clocks, the measured state, its distance from the command, blocked joints, the
latch. The dead-man timer is timed here too (`silent_s`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_runtime.execution.blocked_joints import BlockedJoints
from vla_runtime.execution.clamp_latch import ClampLatch
from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.command import Command, CommandKind, Counters, Reason
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.dead_reckoning import DeadReckoning
from vla_runtime.execution.following import Following
from vla_runtime.execution.state import MeasuredState
from vla_runtime.execution.watchdog import LOOK, ClockWatch, StateWatch, tick_timeout

_MOTION = (CommandKind.TRACK, CommandKind.APPROACH)


class Guard:
    """Checks at every tick whether the robot may move.

    `fault` says why it may not, None where it may; `detail` says it in words, and stays while
    nothing clears it, so that a stop keeps its cause.
    """

    def __init__(
        self,
        model: ColumnModel,
        config: ExecutorConfig,
        blocked_joints: BlockedJoints,
        latch: ClampLatch,
        counters: Counters,
    ) -> None:
        parameters = config.watchdog
        self._columns = model.columns
        self._latch = latch
        self._counters = counters
        self._tick_timeout_s = tick_timeout(parameters, config.control_period_s)
        self._clock = ClockWatch(parameters, self._tick_timeout_s)
        self.blocked_joints = blocked_joints
        self._state_watch = StateWatch(parameters, model)
        self.state = MeasuredState(
            model,
            gap_ns=round(parameters.max_state_age_s * 1e9),
            outage_ns=round(config.restart_after_outage_s * 1e9),
            simulated=parameters.motion_clock == 'ros',
        )
        self._reckoning = DeadReckoning(model.columns)
        self._following = Following(model)
        self._started_s: float | None = None
        self.fault: Reason | None = None
        self.detail = ''

    @property
    def dt_ns(self) -> int:
        """Plan time since the last tick, nanoseconds; 0 after a fault of a clock."""
        return self._clock.dt_ns

    @property
    def elapsed_s(self) -> float:
        """Seconds since the last tick, a late one too; 0.0 where no clock can tell."""
        return self._clock.elapsed_ns * 1e-9

    def trusted_state(self, now_ros_ns: int, command: Command) -> MeasuredState | None:
        """Measured positions that may be acted on; None while there are none."""
        if self._state_watch.check(self.state, now_ros_ns) is not None:
            return None
        # Before the first command there is nothing that a measured angle could be near to.
        if self._columns.any_continuous and command.kind is not CommandKind.IDLE:
            self.state.bring_near(command.setpoints)
        if self._reckoning:
            self._reckoning.carry_on(self.state, now_ros_ns)
        return self.state

    def record(self, now_ros_ns: int, command: Command) -> None:
        """Note the command of a tick, by which the robot goes on until it is measured again."""
        if self._reckoning:
            sent = not command.dry_run and command.kind is not CommandKind.IDLE
            self._reckoning.record(now_ros_ns, command.setpoints, sent=sent)

    def observe(
        self,
        names: Sequence[str],
        positions: Sequence[float],
        stamp_ns: int,
        source: str,
        now_ros_ns: int | None,
        commanded: np.ndarray | None,
    ) -> None:
        """Add measured positions by name; see `MeasuredState.observe`."""
        latest_ns = None if now_ros_ns is None else self._state_watch.latest_ns(now_ros_ns)
        self.state.observe(names, positions, stamp_ns, source, latest_ns, commanded)
        self._counters.states_implausible = self.state.plausibility.refused
        self._counters.states_malformed = self.state.malformed
        self._counters.states_out_of_order = self.state.out_of_order

    def why_not_start(self, now_ros_ns: int) -> tuple[str, Reason | None]:
        """Describe what keeps the robot from starting, empty when nothing does; and its fault."""
        if self._latch.closed:
            return self._latch.text, Reason.CLAMP_LATCH
        fault = self._state_watch.check(self.state, now_ros_ns)
        if fault:
            return self._state_watch.describe(fault, self.state, now_ros_ns), fault
        return self.state.too_new(), None

    def restart(self, now_s: float, *, ticks_come: bool) -> None:
        """Clear earlier faults, at a start; without `ticks_come` the next tick is the first."""
        self._started_s = now_s
        self.blocked_joints.restart()
        self.fault = None
        self.detail = ''
        if not ticks_come:
            self._clock.restart()

    def take_waiting(self, now_ros_ns: int, commanded: np.ndarray | None) -> None:
        """Take a measurement that was a little ahead of the clock; see `MeasuredState`."""
        self.state.take_waiting(self._state_watch.latest_ns(now_ros_ns), commanded)

    def advance(self, now_s: float, now_ros_ns: int) -> Reason | None:
        """Take the time of a tick; return the fault of the clocks, if any."""
        fault = self._clock.advance(now_s, now_ros_ns)
        if fault is Reason.CLOCK_JUMP:
            self._counters.clock_jumps += 1
            # Stamps of before can no longer be compared with those to come.
            self.state.clear()
            self._reckoning.clear()
        elif fault is Reason.TICK_LATE:
            self._counters.late_ticks += 1
        return fault

    def check(
        self, clock_fault: Reason | None, now_ros_ns: int, command: Command, *, joins: bool
    ) -> Reason | None:
        """Check clocks and measured state; sets `fault`, and `detail` when one begins.

        `joins` is True while the command is on its way to a robot that rests far from it.
        """
        if clock_fault is not None:
            self.detail = self._clock.detail
            self.fault = clock_fault
        else:
            self.fault = self._check_state(now_ros_ns, command, joins=joins)
        return self.fault

    def _check_state(self, now_ros_ns: int, command: Command, *, joins: bool) -> Reason | None:
        state, watch = self.state, self._state_watch
        fault = watch.check(state, now_ros_ns)
        if fault is not None:
            if fault is not self.fault or state.refused:
                self.detail = watch.describe(fault, state, now_ros_ns)
            return fault
        if self._columns.any_continuous:
            state.bring_near(command.setpoints)
        if self._reckoning:
            self._reckoning.carry_on(state, now_ros_ns)
        if joins:
            self._following.restart(command.setpoints, state, now_ros_ns)
            return None
        if self.too_far(command, state.positions):
            refused = ''.join(f'; {text}' for text in state.refused)
            self.detail = watch.describe_distance(command.setpoints, state.positions) + refused
            return Reason.TRACKING_ERROR
        if self.blocked(command, state.positions):
            words = self.blocked_joints.describe(command.setpoints, state.positions)
            self.detail = (
                f'{words}. {LOOK}, an arm that sags so far under its load a larger max_step'
            )
            return Reason.TRACKING_ERROR
        if self._leaves_robot(command, now_ros_ns):
            words = self._following.describe(command.setpoints, state.positions)
            self.detail = f'{words}. A servo bus that repeats old positions looks the same'
            return Reason.TRACKING_ERROR
        if self._latch.closed:
            self.detail = self._latch.text
            return Reason.CLAMP_LATCH
        return None

    def _leaves_robot(self, command: Command, now_ros_ns: int) -> bool:
        if command.dry_run or command.kind not in _MOTION:
            self._following.restart(command.setpoints, self.state, now_ros_ns)
            return False
        return self._following.advance(command.setpoints, self.state, now_ros_ns)

    def too_far(self, command: Command, positions: np.ndarray | None) -> bool:
        return (
            positions is not None
            and not command.dry_run
            and self._state_watch.too_far(command.setpoints, positions)
        )

    def blocked(self, command: Command, positions: np.ndarray | None) -> bool:
        """Count the time since the last tick; return whether a joint is blocked. For every tick."""
        if positions is None or command.dry_run or command.kind is CommandKind.IDLE:
            return False
        dt_s = self.dt_ns * 1e-9
        return self.blocked_joints.advance(command.setpoints, positions, dt_s)

    def silent_s(self, now_s: float) -> float | None:
        """Seconds since the last tick, or the start, if longer than allowed, else `None`."""
        last_s = self._clock.last_s
        if last_s is None:
            last_s = self._started_s
        if last_s is None or now_s - last_s <= self._tick_timeout_s:
            return None
        return now_s - last_s
