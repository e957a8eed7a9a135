"""Faults that stop the motion at a tick.

In this order: the clocks, the measured state, its distance from the command, blocked joints, the
latch. The dead-man timer is timed here too (`silent_s`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_runtime.execution.blocked_joints import BlockedJoints
from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.columns import CommandColumns
from vla_runtime.execution.command import Command, CommandKind, Counters, Reason
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.following import Following
from vla_runtime.execution.state import MeasuredState
from vla_runtime.execution.watchdog import LOOK, ClockWatch, StateWatch, tick_timeout

# --- Measured positions of columns that are commanded a velocity, carried on to the present


# At 1000 ticks a second this is more than any state may be old.
_TICKS = 1024


class DeadReckoning:
    """The commanded velocities of the last ticks, and the ways that they lead.

    A measurement is as old as its stamp; near a limit the way since then counts. Angles without end
    have no limits, so they are left out.
    """

    def __init__(self, columns: CommandColumns) -> None:
        which = columns.is_velocity & columns.has_feedback & ~columns.is_continuous
        self._columns = np.flatnonzero(which)
        self._stamps = np.zeros(_TICKS, dtype=np.int64)
        # Way since the first tick at each tick, and the velocity from then on.
        self._ways = np.zeros((_TICKS, len(self._columns)))
        self._velocities = np.zeros((_TICKS, len(self._columns)))
        self._count = 0

    def __bool__(self) -> bool:
        return len(self._columns) > 0

    def clear(self) -> None:
        """Forget all ticks, after a clock jump."""
        self._count = 0

    def record(self, now_ros_ns: int, setpoints: np.ndarray, *, sent: bool) -> None:
        """Note the command of a tick, (columns,), and whether it goes to the robot."""
        if self._count and now_ros_ns < self._stamps[(self._count - 1) % _TICKS]:
            self.clear()
        slot = self._count % _TICKS
        if self._count:
            last = (self._count - 1) % _TICKS
            dt_s = (now_ros_ns - self._stamps[last]) * 1e-9
            self._ways[slot] = self._ways[last] + dt_s * self._velocities[last]
        else:
            self._ways[slot] = 0.0
        self._stamps[slot] = now_ros_ns
        self._velocities[slot] = setpoints[self._columns] if sent else 0.0
        self._count += 1

    def carry_on(self, state: MeasuredState, now_ros_ns: int) -> None:
        """Set the positions of the state to where the robot is now."""
        if not self._count:
            return
        kept = min(self._count, _TICKS)
        slots = np.arange(self._count - kept, self._count) % _TICKS
        here = self._way(slots, np.full(len(self._columns), now_ros_ns))
        state.carry_on(self._columns, here - self._way(slots, state.stamps[self._columns]))

    def _way(self, slots: np.ndarray, times_ns: np.ndarray) -> np.ndarray:
        stamps = self._stamps[slots]
        at = np.maximum(np.searchsorted(stamps, times_ns, side='right') - 1, 0)
        places, columns = slots[at], np.arange(len(self._columns))
        since_s = np.maximum(times_ns - stamps[at], 0) * 1e-9
        return self._ways[places, columns] + since_s * self._velocities[places, columns]


# --- Latch closed by too many clamped chunks in a row; only the operator opens it


class ClampLatch:
    """Counts clamped chunks in a row; it may outlive the executor that counts with it.

    Args:
        allowed: number of clamped chunks in a row that closes it; 0 never does.
        cause: what closed it in the process before this one; empty: it is open.
        reset_call: what a person types to open it.

    Attributes:
        cause: joint, value and limit that closed it; empty while it is open.
    """

    def __init__(self, allowed: int, *, cause: str = '', reset_call: str = '~/reset') -> None:
        if allowed < 0:
            raise ValueError(f'clamp_latch is {allowed}, expected 0 (never) or more')
        self._allowed = allowed
        self._reset_call = reset_call
        self._in_row = 0
        self.cause = cause

    @property
    def closed(self) -> bool:
        return bool(self.cause)

    def count(self, clamped: str) -> None:
        """Count a usable chunk, and what was clamped of it in words; '' restarts the count."""
        self._in_row = self._in_row + 1 if clamped else 0
        if 0 < self._allowed <= self._in_row and not self.closed:
            self.cause = clamped

    def open(self) -> None:
        """Open the latch and count from zero; only the operator may ask for it."""
        self._in_row = 0
        self.cause = ''

    @property
    def text(self) -> str:
        """Reason of the closed latch, and what opens it."""
        return (
            f'{self._allowed} chunks in a row were outside the limits, the last by {self.cause}. '
            'Look at what the policy wants, or widen that limit if the robot may go there; then '
            f'{self._reset_call} (a stopped robot needs ~/start after it)'
        )


# --------------------------------------------------------------------------------------------------

_MOTION = (CommandKind.TRACK, CommandKind.APPROACH, CommandKind.LEAD)


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
