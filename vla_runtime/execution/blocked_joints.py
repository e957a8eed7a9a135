"""Joints that do not move although their command leads them as far as it may.

The motion limiter keeps a command within `max_step` of the measured position. Where that is less
than `max_tracking_error`, an obstacle never causes a tracking error: the joint would be pressed
against it for ever.
"""

from __future__ import annotations

import numpy as np

from vla_runtime.execution.column_model import ColumnModel

# Shares of max_step. A joint is pressed while its command leads it by the first. The time adds up
# until it has moved by the second or the command is back as near as that (each replanning takes the
# command back a little).
_FULL_LEAD = 0.9
_SMALL = 0.1


class BlockedJoints:
    """Measures for how long each joint has been pressed without moving.

    Guarded position columns with a `max_step` are watched, but no grippers: an object keeps them
    from their command.

    Args:
        after_s: time for which a joint is pressed until it counts as blocked.

    Attributes:
        blocked: (columns,) bool; only `advance` and `restart` change it.
    """

    def __init__(self, model: ColumnModel, after_s: float) -> None:
        columns = model.columns
        watched = model.guarded & ~model.grips
        step = np.where(watched, model.limits.step_from_measured, np.inf)
        self._names = columns.names
        self._after_s = after_s
        self._step = step
        self._full = _FULL_LEAD * step
        self._small = _SMALL * step
        self._lead = np.zeros(columns.count)
        self._scratch = np.zeros(columns.count)
        self._presses = np.zeros(columns.count, dtype=bool)
        self._begins = np.zeros(columns.count, dtype=bool)
        self._stays = np.zeros(columns.count, dtype=bool)
        # Columns whose time counts; where they were and which way they were pressed as it began.
        self._counts = np.zeros(columns.count, dtype=bool)
        self._place = np.zeros(columns.count)
        self._side = np.zeros(columns.count)
        self._pressed_s = np.zeros(columns.count)
        self._blocked = np.zeros(columns.count, dtype=bool)
        self.blocked = self._blocked.view()
        self.blocked.flags.writeable = False

    def restart(self) -> None:
        """Count anew: a person has looked at the robot."""
        self._counts[:] = False
        self._pressed_s[:] = 0.0
        self._blocked[:] = False

    def advance(self, commanded: np.ndarray, measured: np.ndarray, dt_s: float) -> bool:
        """Count a tick; return whether any joint is blocked.

        Args:
            commanded: (columns,) last command.
            measured: (columns,) finite.
            dt_s: seconds since the last tick; 0.0 where time stood still or is unknown.
        """
        lead, presses = self._lead, self._presses
        np.subtract(commanded, measured, out=lead)
        np.abs(lead, out=self._scratch)
        np.greater_equal(self._scratch, self._full, out=presses)
        if not np.count_nonzero(presses) and not np.count_nonzero(self._counts):
            return False
        self._forget(measured)
        begins = np.greater(presses, self._counts, out=self._begins)
        np.copyto(self._place, measured, where=begins)
        np.copyto(self._side, lead, where=begins)
        np.sign(self._side, out=self._side)
        np.logical_or(self._counts, presses, out=self._counts)
        np.add(self._pressed_s, dt_s, out=self._pressed_s, where=presses)
        np.greater(self._pressed_s, self._after_s, out=self._blocked)
        return bool(np.count_nonzero(self._blocked))

    def _forget(self, measured: np.ndarray) -> None:
        """Drop the time of joints that moved or whose command came back."""
        np.subtract(measured, self._place, out=self._scratch)
        np.abs(self._scratch, out=self._scratch)
        np.less_equal(self._scratch, self._small, out=self._stays)
        np.logical_and(self._counts, self._stays, out=self._counts)
        np.multiply(self._lead, self._side, out=self._scratch)
        np.greater(self._scratch, self._small, out=self._stays)
        np.logical_and(self._counts, self._stays, out=self._counts)
        self._pressed_s *= self._counts

    def describe(self, commanded: np.ndarray, measured: np.ndarray) -> str:
        """Describe the joint that has been pressed for longest."""
        worst = int(np.argmax(self._pressed_s))
        lead = abs(commanded[worst] - measured[worst])
        return (
            f"'{self._names[worst]}' is blocked: it has stayed near {measured[worst]:.4g} while "
            f'its command led it by {lead:.3g} of at most {self._step[worst]:g} (max_step) for '
            f'{self._pressed_s[worst]:.1f} s (blocked_after_s)'
        )
