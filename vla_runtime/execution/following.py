"""A robot that stands still while its command goes on.

A protective stop, motors without power or a controller that was switched off leave the command
alone on its way. Where the robot comes back on it would make up for all of it in one step. An
obstacle is another matter (`BlockedJoints`): the other joints go on moving.
"""

from __future__ import annotations

import numpy as np

from vla_runtime.execution.columns import CommandColumns
from vla_runtime.execution.state import MeasuredState

# A joint that was moving has stopped following after so long at rest. One that sets out from
# standstill may take longer: its controller and its gears have to get going.
_STOPS_AFTER_S, _STARTS_AFTER_S = 0.2, 0.5


class Following:
    """Watches for a robot of which no joint moves while its command does.

    All guarded position columns are watched. Columns of grippers do not count as pulled: an object
    keeps them from their command. A single pulled joint of several may be held by an object; at
    least two are, where there are as many.

    Args:
        columns: the executor's.
        grips: (columns,) bool.
        allowed: (columns,) distance by which a command may go on ahead of a joint that stands
            still.
    """

    def __init__(self, columns: CommandColumns, grips: np.ndarray, allowed: np.ndarray) -> None:
        self._names = columns.names
        watched = columns.has_feedback & columns.is_position
        self._ignored = ~watched
        self._allowed = np.where(watched & ~grips, allowed, np.inf)
        self._needed = min(2, int(np.isfinite(self._allowed).sum()))
        self._since_ns = np.zeros(columns.count, dtype=np.int64)
        self._command = np.zeros(columns.count)
        # Stamps of the measurements when the command was last at rest, and of the newest ones.
        self._left_ns = self._newest_ns = 0
        self._run = np.zeros(columns.count)
        self._pulled = np.zeros(columns.count, dtype=bool)
        self._moves = np.zeros(columns.count, dtype=bool)
        # Columns that have moved since the command set out.
        self._under_way = np.zeros(columns.count, dtype=bool)

    def restart(self, command: np.ndarray, state: MeasuredState) -> None:
        """Begin anew: the command is at rest."""
        np.copyto(self._command, command)
        np.copyto(self._since_ns, state.since_ns)
        self._left_ns = state.newest_stamp_ns
        self._under_way[:] = False

    def advance(self, command: np.ndarray, state: MeasuredState) -> bool:
        """Take the command of a tick; return whether the robot has stopped following it."""
        if state.oldest_stamp_ns == self._newest_ns:
            # What was measured before says nothing about the command of now.
            return False
        self._newest_ns = state.oldest_stamp_ns
        np.not_equal(state.since_ns, self._since_ns, out=self._moves)
        if np.count_nonzero(self._moves):
            np.copyto(self._since_ns, state.since_ns)
            np.copyto(self._command, command, where=self._moves)
            np.logical_or(self._under_way, self._moves, out=self._under_way)
        np.subtract(command, self._command, out=self._run)
        np.abs(self._run, out=self._run)
        np.greater(self._run, self._allowed, out=self._pulled)
        if not self._needed or np.count_nonzero(self._pulled) < self._needed:
            return False
        # Rare: from here on it may allocate.
        still = state.still_for(_STOPS_AFTER_S)
        if not (still | self._ignored).all():
            return False
        seen_ns = state.oldest_stamp_ns - self._left_ns
        waited = self._under_way | (seen_ns >= round(_STARTS_AFTER_S * 1e9))
        return int(np.count_nonzero(self._pulled & waited)) >= self._needed

    def describe(self, command: np.ndarray, measured: np.ndarray) -> str:
        """Describe the joint whose command went furthest without it."""
        worst = int(np.argmax(np.where(self._pulled, self._run / self._allowed, 0.0)))
        return (
            f"the robot does not follow: '{self._names[worst]}' stands still at "
            f'{measured[worst]:.4g} while its command went on by {self._run[worst]:.3g} to '
            f'{command[worst]:.4g}, and no other joint moves. The robot holds where it is: look '
            'whether its motors are on and its controller is active, then call ~/start'
        )
