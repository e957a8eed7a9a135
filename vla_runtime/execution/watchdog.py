"""Watchdog: hold the robot on late ticks, faulty clocks, or an unusable measured state.

A clock is faulty that jumps or stands still. A state is unusable that is missing, stale, not a
number, or too far from the command. Late ticks are timed on a steady clock, ages on the ROS clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from vla_runtime.execution.column_model import MAX_TRACKING_ERROR, ColumnModel
from vla_runtime.execution.command import Reason
from vla_runtime.execution.state import UNSTAMPED, MeasuredState, clock_hint
from vla_runtime.files.quotes import named
from vla_runtime.files.setting_fields import check_settings, setting

MotionClock = Literal['steady', 'ros']

# A clock message of a simulated world comes so much later than what is stamped by it.
_SIMULATED_LATE_NS = 100_000_000
# Advice after a stop that only a person may end.
LOOK = (
    'The robot holds near where it is: look what is in its way and whether its motors are on, then '
    'call ~/start; a gripper that holds something needs grips: true in the robot file'
)


@dataclass(frozen=True)
class WatchdogParameters:
    """Bounds beyond which the robot holds or stops. Fixed while the executor lives.

    Attributes:
        tick_timeout_s: longest time between two ticks, steady clock; after a longer one the plan is
            dropped. None: see `tick_timeout`.
        future_tolerance_s: time by which a stamp may lie ahead of the ROS clock.
        max_tracking_error: distance for columns whose limits name none (`ColumnModel`), rad or m.
        blocked_after_s: see `BlockedJoints`.
        clock_jump_s: jump against the steady clock, or between ticks under `motion_clock` ros.
        clock_timeout_s: longest time for which the ROS clock may stand still, `motion_clock` ros
            only.
        motion_clock: clock that plan time follows: `steady` on a robot, `ros` under `use_sim_time`.
    """

    tick_timeout_s: float | None = setting(
        None,
        'watchdog: hold the robot and drop the plan when no control tick came for this long; acts '
        'one control period later at most; 0: three control periods, at least 0.02 s',
        0.0,
        1.0,
    )
    max_state_age_s: float = setting(
        0.2, 'measured positions older than this, on the ROS clock, hold the robot', 0.01, 10.0
    )
    future_tolerance_s: float = 0.05
    max_tracking_error: float = setting(
        MAX_TRACKING_ERROR,
        'largest distance between measured and commanded position, rad or m; beyond it the robot '
        'stops until ~/start; for joints without one in the robot file; at most three quarters of '
        'their range',
        0.001,
        100.0,
    )
    blocked_after_s: float = setting(
        1.0,
        'a joint that does not move while its command leads it by 90% of max_step or more for this '
        'long stops the robot until ~/start',
        0.1,
        60.0,
    )
    clock_jump_s: float = setting(0.2, 'a step of the ROS clock that drops the plan', 0.01, 10.0)
    clock_timeout_s: float = 0.5
    motion_clock: MotionClock = 'steady'

    def __post_init__(self) -> None:
        for name in ('tick_timeout_s', 'future_tolerance_s', 'clock_timeout_s'):
            value = getattr(self, name)
            if value is not None and not value > 0.0:
                raise ValueError(f'{name} is {value}: it must be more than 0 s')
        check_settings(self)
        if self.motion_clock not in get_args(MotionClock):
            raise ValueError(
                f"motion_clock is '{self.motion_clock}': it must be one of "
                f'{", ".join(get_args(MotionClock))}'
            )


def tick_timeout(parameters: WatchdogParameters, control_period_s: float) -> float:
    """Return the longest time between two ticks: by default three periods, at least 0.02 s.

    It is 0.05 s where the period is unknown (infinite).
    """
    if parameters.tick_timeout_s is not None:
        return parameters.tick_timeout_s
    return max(3.0 * control_period_s, 0.02) if math.isfinite(control_period_s) else 0.05


class ClockWatch:
    """Turns the two clocks into the plan time that passed between two ticks.

    Attributes:
        dt_ns: plan time since the last tick; 0 after a fault.
        elapsed_ns: the same where ticks are late or the other clock jumped, so that a robot in
            motion can brake; 0 where that is unknown.
    """

    def __init__(self, parameters: WatchdogParameters, tick_timeout_s: float) -> None:
        self._parameters = parameters
        self._tick_timeout_s = tick_timeout_s
        self.restart()

    def restart(self) -> None:
        """The next tick is the first."""
        self.last_s: float | None = None
        self._last_ros_ns = 0
        self._still_s = 0.0
        self._drift_s = 0.0
        self._drift_age_s = 0.0
        self.dt_ns = 0
        self.elapsed_ns = 0
        self.detail = ''

    def advance(self, now_s: float, now_ros_ns: int) -> Reason | None:
        """Count a tick in `dt_ns`; return why the robot must hold, if it must (`detail`)."""
        self.dt_ns = self.elapsed_ns = 0
        if not math.isfinite(now_s):
            self.detail = f'the steady clock reads {now_s}'
            return Reason.CLOCK_INVALID
        if self.last_s is None:
            self.last_s, self._last_ros_ns = now_s, now_ros_ns
            return None
        steady_s = now_s - self.last_s
        ros_ns = now_ros_ns - self._last_ros_ns
        self.last_s, self._last_ros_ns = now_s, now_ros_ns
        if self._parameters.motion_clock == 'steady':
            fault = self._check_steady(steady_s, ros_ns)
            self.dt_ns = self.elapsed_ns = max(0, round(steady_s * 1e9))
        else:
            fault = self._check_ros(steady_s, ros_ns)
            self.dt_ns = self.elapsed_ns = ros_ns if fault is None else 0
        if fault is None and steady_s > self._tick_timeout_s:
            self.detail = (
                f'{steady_s:.3f} s between two ticks, at most '
                f'{self._tick_timeout_s:g} s allowed (tick_timeout_s)'
            )
            fault = Reason.TICK_LATE
        if fault is not None:
            self.dt_ns = 0
        return fault

    def _check_steady(self, steady_s: float, ros_ns: int) -> Reason | None:
        """Compare the ROS clock with the steady one, over windows of a second."""
        if steady_s < 0.0:
            return self._jumped('the steady clock', steady_s)
        self._drift_s += ros_ns * 1e-9 - steady_s
        self._drift_age_s += steady_s
        drift_s = self._drift_s
        if abs(drift_s) > self._parameters.clock_jump_s:
            return self._jumped('the ROS clock', drift_s)
        if self._drift_age_s > 1.0:
            self._drift_s = self._drift_age_s = 0.0
        return None

    def _check_ros(self, steady_s: float, ros_ns: int) -> Reason | None:
        if steady_s < 0.0:
            return self._jumped('the steady clock', steady_s)
        if ros_ns < 0 or ros_ns * 1e-9 > self._parameters.clock_jump_s:
            return self._jumped('the ROS clock', ros_ns * 1e-9)
        self._still_s = 0.0 if ros_ns else self._still_s + steady_s
        if self._still_s > self._parameters.clock_timeout_s:
            self.detail = f'the ROS clock has stood still for {self._still_s:.2f} s'
            return Reason.CLOCK_STOPPED
        return None

    def _jumped(self, clock: str, by_s: float) -> Reason:
        self._drift_s = self._drift_age_s = self._still_s = 0.0
        self.detail = f'{clock} jumped by {by_s:+.3f} s'
        return Reason.CLOCK_JUMP


class StateWatch:
    """Checks the measured state at every tick."""

    def __init__(self, parameters: WatchdogParameters, model: ColumnModel) -> None:
        columns = model.columns
        self._parameters = parameters
        self._columns = columns
        self._allowed = model.tracking_error
        self._error = np.zeros(columns.count)
        self._far = np.zeros(columns.count, dtype=bool)
        self._ones = np.ones(columns.count)
        self._max_age_ns = round(parameters.max_state_age_s * 1e9)
        self._future_ns = round(parameters.future_tolerance_s * 1e9)

    def latest_ns(self, now_ros_ns: int) -> int:
        """Return the stamp beyond which a message is of the future when it comes."""
        late_ns = _SIMULATED_LATE_NS if self._parameters.motion_clock == 'ros' else 0
        return now_ros_ns + self._future_ns + late_ns

    def check(self, state: MeasuredState, now_ros_ns: int) -> Reason | None:
        """Return why the robot must not move on the measured state; None when it may."""
        if not state.guarded:
            return None
        # Every source counts: one that is ahead would otherwise hide behind one that is not.
        latest_ns = now_ros_ns + self._future_ns
        if state.ahead(latest_ns) is not None:
            return Reason.STATE_FROM_FUTURE
        if not state.complete:
            return Reason.STATE_MISSING
        if now_ros_ns < state.doubled.until_ns:
            return Reason.STATE_DOUBLED
        if now_ros_ns < state.plausibility.doubted_until_ns:
            return Reason.STATE_IMPLAUSIBLE
        if state.newest_stamp_ns > latest_ns:
            state.distrust_beyond(latest_ns)
            return Reason.STATE_FROM_FUTURE
        if now_ros_ns - state.oldest_stamp_ns > self._max_age_ns:
            return Reason.STATE_STALE
        # A sum is finite exactly when all its parts are (positions are nowhere near overflow).
        if not math.isfinite(np.dot(state.positions, self._ones)):
            return Reason.STATE_NOT_FINITE
        return None

    def describe(self, reason: Reason, state: MeasuredState, now_ros_ns: int) -> str:
        refused = ''.join(f'; {text}' for text in state.refused)
        if reason is Reason.STATE_MISSING:
            return (
                f'no measured position has come for {named(state.missing)}; check the '
                f"joint_states topics and the robot file's joint names{refused}"
            )
        if reason is Reason.STATE_DOUBLED:
            return state.doubled.describe()
        if reason is Reason.STATE_IMPLAUSIBLE:
            return state.plausibility.describe()
        if reason is Reason.STATE_NOT_FINITE:
            wrong = np.flatnonzero(~np.isfinite(state.positions))
            names = self._columns.measured_by(wrong)
            return f'the measured position of {named(names)} is not a number that a joint can have'
        if reason is Reason.STATE_FROM_FUTURE:
            ahead = state.ahead(now_ros_ns + self._future_ns)
            newest_ns, columns = ahead or (state.newest_stamp_ns, state.newest_columns())
            ahead_s = (newest_ns - now_ros_ns) * 1e-9
            question = (
                "; are the computers' clocks synchronised, is use_sim_time the same everywhere? A "
                "driver with a clock of its own needs 'stamp: receive' in the robot file"
            )
            when = f'{ahead_s:.3f} s in' if ahead_s > 0.0 else 'in'
            return (
                f'the measured position of {named(columns)} is stamped {when} '
                f'the future{clock_hint(-ahead_s, question)}'
            )
        if state.oldest_stamp_ns == 0:
            return f'the measured position of {named(state.oldest_columns())}: {UNSTAMPED}{refused}'
        age_s = (now_ros_ns - state.oldest_stamp_ns) * 1e-9
        limit_s = self._parameters.max_state_age_s
        return (
            f'the measured position of {named(state.oldest_columns())} is {age_s:.3f} s old, at '
            f'most {limit_s:g} s allowed (max_state_age_s){clock_hint(age_s)}{refused}'
        )

    def too_far(self, commanded: np.ndarray, measured: np.ndarray) -> bool:
        np.subtract(commanded, measured, out=self._error)
        np.abs(self._error, out=self._error)
        np.greater(self._error, self._allowed, out=self._far)
        return bool(np.count_nonzero(self._far))

    def describe_distance(self, commanded: np.ndarray, measured: np.ndarray) -> str:
        worst = int(np.argmax(np.abs(commanded - measured) / self._allowed))
        return (
            f"'{self._columns.names[worst]}' is at {measured[worst]:.4g} but commanded to "
            f'{commanded[worst]:.4g}; at most {self._allowed[worst]:g} apart allowed '
            f'(max_tracking_error). {LOOK}'
        )
