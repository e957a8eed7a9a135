"""A robot that stands still while its command goes on.

A protective stop, motors without power or a controller that was switched off leave the command
alone on its way; a robot that comes back would make up for all of it in one step.

A healthy robot follows late, too. So a joint counts as left behind only where a measurement that
is later than its command by the robot's lag still has it where it was. The lag is that of the
slowest joint seen to set out from rest; before, the longest that is tolerated.
"""

from __future__ import annotations

import numpy as np

from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.state import MeasuredState

# A serial servo bus, or a controller that smooths, lags by up to 0.25 s; that much is tolerated
# before any lag was seen, and never more. Gears and bus hiccups vary the lag of a quick robot.
_LONGEST_LAG_S, _SHORTEST_LAG_S = 0.28, 0.2
# The lag differs from one rest to the next: friction takes more way where a joint turns round.
_MARGIN_S = 0.1
# A command that stays as near to its place as noise for so long rests.
_RESTS_AFTER_S = 0.2
# A joint that has rested for so long is moved by no command of before.
_RESTED_NS = 300_000_000
# Gears and friction keep a healthy joint back by less than this many times the allowed distance.
# Where `max_step` lets no command go so far, this share of it counts.
_FAR, _FULL_REACH = 2.0, 0.9


class Following:
    """Watches for a robot of which no joint moves while its command does.

    All guarded position columns but grippers are watched. A single pulled joint of several may be
    held by an object; at least two are pulled, where there are as many. The robot stops where one
    command has gone twice `follows`.
    """

    def __init__(self, model: ColumnModel) -> None:
        count = model.columns.count
        self._names = model.columns.names
        self._ignored = ~model.guarded
        self._allowed = np.where(model.guarded & ~model.grips, model.follows, np.inf)
        reach = _FULL_REACH * model.limits.step_from_measured
        self._far = np.clip(reach, self._allowed, _FAR * self._allowed)
        self._noise = model.noise
        self._needed = min(2, int(np.isfinite(self._allowed).sum()))
        # Lag of the slowest set-out seen, seconds; below 0 before one was.
        self._lag_s = -1.0
        self._measured_ns = 0
        self._since_ns = np.zeros(count, dtype=np.int64)
        # Commands when each joint was seen to move last, and how far they have gone since.
        self._base = np.zeros(count)
        self._run = np.zeros(count)
        # Where each command was when it moved last, and when.
        self._place = np.zeros(count)
        self._moved_ns = np.zeros(count, dtype=np.int64)
        # ROS times at which each command had not left its joint yet by more than noise, and by more
        # than is allowed.
        self._left_ns = np.zeros(count, dtype=np.int64)
        self._near_ns = np.zeros(count, dtype=np.int64)
        self._waited_ns = np.zeros(count, dtype=np.int64)
        self._way = np.zeros(count)
        self._rests = np.zeros(count, dtype=bool)
        self._flags = np.zeros(count, dtype=bool)
        self._overdue = np.zeros(count, dtype=bool)

    @property
    def patience_s(self) -> float:
        """Time for which a command may be gone from a joint that stands still, seconds."""
        if self._lag_s < 0.0:
            return _LONGEST_LAG_S
        return min(max(self._lag_s + _MARGIN_S, _SHORTEST_LAG_S), _LONGEST_LAG_S)

    def restart(self, command: np.ndarray, state: MeasuredState, now_ros_ns: int) -> None:
        """Begin anew: the command is at rest."""
        np.copyto(self._base, command)
        np.copyto(self._place, command)
        np.copyto(self._since_ns, state.since_ns)
        for times in (self._moved_ns, self._left_ns, self._near_ns):
            times[:] = now_ros_ns

    def advance(self, command: np.ndarray, state: MeasuredState, now_ros_ns: int) -> bool:
        """Count the command of a tick, (columns,); return whether the robot stopped following."""
        # What was measured before says nothing about the command of now.
        measured = state.oldest_stamp_ns != self._measured_ns
        if measured:
            self._measured_ns = state.oldest_stamp_ns
            self._note_motion(command, state)
        self._note_command(command, now_ros_ns)
        return measured and self._is_left(state)

    def _note_motion(self, command: np.ndarray, state: MeasuredState) -> None:
        """Note which joints have moved, and how late those did that set out from rest."""
        moves = np.not_equal(state.since_ns, self._since_ns, out=self._flags)
        if not np.count_nonzero(moves):
            return
        np.subtract(self._left_ns, self._since_ns, out=self._waited_ns)
        sets_out = np.greater(self._waited_ns, _RESTED_NS, out=self._overdue)
        sets_out &= moves
        np.greater(self._run, self._noise, out=self._rests)
        sets_out &= self._rests
        sets_out &= np.isfinite(self._allowed)
        if np.count_nonzero(sets_out):
            lags_ns = (state.since_ns - self._left_ns)[sets_out]
            self._lag_s = max(self._lag_s, float(lags_ns.max()) * 1e-9)
        np.copyto(self._since_ns, state.since_ns)
        np.copyto(self._base, command, where=moves)

    def _note_command(self, command: np.ndarray, now_ros_ns: int) -> None:
        """Note how far each command is gone, and until when it was near to its joint, or rested."""
        way, run, flags, rests = self._way, self._run, self._flags, self._rests
        np.subtract(command, self._place, out=way)
        np.abs(way, out=way)
        np.greater(way, self._noise, out=flags)
        np.copyto(self._place, command, where=flags)
        np.copyto(self._moved_ns, now_ros_ns, where=flags)
        np.less_equal(self._moved_ns, now_ros_ns - round(_RESTS_AFTER_S * 1e9), out=rests)
        np.subtract(command, self._base, out=run)
        np.abs(run, out=run)
        # One that has gone far is kept back by `max_step`, or creeps: that is no rest.
        np.less_equal(run, self._far, out=flags)
        rests &= flags
        for times, distance in ((self._left_ns, self._noise), (self._near_ns, self._allowed)):
            np.less_equal(run, distance, out=flags)
            flags |= rests
            np.copyto(times, now_ros_ns, where=flags)

    def _is_left(self, state: MeasuredState) -> bool:
        """Return whether the newest measurement shows that no joint follows."""
        np.subtract(self._measured_ns, self._near_ns, out=self._waited_ns)
        np.greater(self._waited_ns, round(self.patience_s * 1e9), out=self._overdue)
        if not self._needed or np.count_nonzero(self._overdue) < self._needed:
            return False
        # Rare: from here on it may allocate.
        if not (self._overdue & (self._run > self._far)).any():
            return False
        return bool((state.still_for(self.patience_s) | self._ignored).all())

    def describe(self, command: np.ndarray, measured: np.ndarray) -> str:
        worst = int(np.argmax(np.where(self._overdue, self._run / self._allowed, 0.0)))
        return (
            f"the robot does not follow: '{self._names[worst]}' stands still at "
            f'{measured[worst]:.4g} while its command went on by {self._run[worst]:.3g} to '
            f'{command[worst]:.4g}, and no other joint moves. The robot holds where it is: look '
            'whether its motors are on and its controller is active, then call ~/start'
        )
