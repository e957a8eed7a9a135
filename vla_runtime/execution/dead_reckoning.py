"""Measured positions of columns that are commanded a velocity, carried on to the present."""

from __future__ import annotations

import numpy as np

from vla_runtime.execution.columns import CommandColumns
from vla_runtime.execution.state import MeasuredState

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
