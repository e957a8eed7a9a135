"""`joint_trajectory_controller` in the tests: its rules, without its process.

Each rule was compared with ros2_controllers 4.26.0 (ros2_control 4.32.0), where
`benchmark/ros2_control.py` runs the real one:
- a message replaces the trajectory with the next cycle; a zero stamp begins it there;
- a cycle reads the trajectory one period ahead of its time;
- trajectory time is the clock's at the first cycle of a message, and goes on by the measured
  period times the speed scaling;
- between points it goes in a straight line, or, where both have velocities, along a cubic; before
  the first one from the measured position; behind the last one it stands, with velocity 0;
- switched on, it holds the measured position until the first message comes; what came while it was
  off counts for nothing;
- a message whose joints are not all of its own, or that ends in the past, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from trajectory_msgs.msg import JointTrajectory


def _seconds(time) -> float:
    return time.sec + time.nanosec * 1e-9


@dataclass
class TrajectoryController:
    """See the module's rules. Times are seconds of its own clock.

    Attributes:
        joints: its joints, in the order of its outputs.
        period_s: one of its cycles.
        measured: (joints,) where the arm is; whoever uses it moves it.
        active: False: what it is sent counts for nothing.
        scaling: speed scaling.
        output: (joints,) commanded to the hardware.
        velocity: (joints,) commanded to a velocity interface beside a position's error.
        reference: (joints,) where its trajectory is.
        refused: messages that it refused.
    """

    joints: Sequence[str]
    period_s: float
    measured: np.ndarray
    active: bool = True
    scaling: float = 1.0
    refused: int = 0
    output: np.ndarray = field(init=False)
    velocity: np.ndarray = field(init=False)
    reference: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.switch(on=self.active)

    def switch(self, *, on: bool) -> None:
        """Switch it on or off; on, it holds where the arm is."""
        self.active = on
        self.output, self.reference = self.measured.copy(), self.measured.copy()
        self.velocity = np.zeros(len(self.joints))
        self._new: JointTrajectory | None = None
        self._points: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def take(self, message: JointTrajectory, now_s: float) -> None:
        """Get a message."""
        start_s = _seconds(message.header.stamp)
        ends_s = start_s + _seconds(message.points[-1].time_from_start)
        moves_at_end = any(message.points[-1].velocities)
        if (
            sorted(message.joint_names) != sorted(self.joints)
            or moves_at_end
            or (start_s and ends_s < now_s)
        ):
            self.refused += 1
        elif self.active:
            self._new = message

    def update(self, now_s: float, period_s: float) -> np.ndarray:
        """Run a cycle; return the output."""
        if self._new is not None:
            self._begin(self._new, now_s)
        elif self._points is not None:
            self._time_s += period_s * self.scaling
        if self.active and self._points is not None:
            self.reference, _ = self._sample(self._time_s)
            self.output, self.velocity = self._sample(self._time_s + self.period_s)
        return self.output

    def _begin(self, message: JointTrajectory, now_s: float) -> None:
        self._new = None
        order = [list(message.joint_names).index(name) for name in self.joints]
        times_s = np.array([_seconds(point.time_from_start) for point in message.points])
        assert (np.diff(times_s) > 0.0).all()
        start_s = _seconds(message.header.stamp)
        positions = np.array([list(point.positions) for point in message.points])[:, order]
        speeds = [list(point.velocities) or [np.nan] * len(order) for point in message.points]
        self._points = times_s + (start_s or now_s), positions, np.array(speeds)[:, order]
        self._before = now_s, self.measured.copy()
        self._time_s = now_s

    def _sample(self, at_s: float) -> tuple[np.ndarray, np.ndarray]:
        times_s, positions, speeds = self._points
        if at_s < times_s[0]:
            times_s = np.array([self._before[0], times_s[0]])
            positions = np.array([self._before[1], positions[0]])
            speeds = np.full_like(positions, np.nan)
        index = int(np.searchsorted(times_s, at_s, side='right')) - 1
        if index >= len(times_s) - 1:
            return positions[-1].copy(), np.zeros(len(self.joints))
        span_s = times_s[index + 1] - times_s[index]
        way = positions[index + 1] - positions[index]
        if not np.isfinite(speeds[index : index + 2]).all():
            return positions[index] + way * (at_s - times_s[index]) / span_s, way / span_s
        begin, end = speeds[index], speeds[index + 1]
        cubic = [
            (begin + end - 2.0 * way / span_s) / span_s**2,
            (3.0 * way / span_s - 2.0 * begin - end) / span_s,
            begin,
            positions[index],
        ]
        since_s = at_s - times_s[index]
        return (
            np.array([np.polyval(column, since_s) for column in np.array(cubic).T]),
            np.array([np.polyval(np.polyder(column), since_s) for column in np.array(cubic).T]),
        )
