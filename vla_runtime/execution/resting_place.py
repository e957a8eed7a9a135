"""The place where a stopped robot rests, and where a person has moved it to.

An arm that is moved by hand while its motors are off must not swing back when they come on again:
the controller would still have the old command. So the command is set to where the arm is, at once,
because the arm is there. What merely hangs below its command is another matter: it would sink a
little further with every new command.
"""

from __future__ import annotations

import numpy as np

from vla_runtime.execution.columns import CommandColumns
from vla_runtime.execution.state import MeasuredState

# A joint that stays where it is for so long rests.
RESTS_AFTER_S = 0.5
# Way of a joint at rest, as a share of `hold_follows`, that only a person explains.
_MOVED_SHARE = 0.5
# Distance from its command at which a joint is not where it was left, after a gap: the command is
# sent at once, but a motor that came on may have begun to move.
_AWAY_SHARE = 0.3
# A joint that comes to rest again this soon after its command was set to where it was, about as far
# from it as before, hangs below every command. To set it again would sink it step by step.
_SINKS_WITHIN_NS = 1_000_000_000
_SAME_SAG = 0.3
# A way that was covered from one message to the next by this share was not seen: it is a wrong
# reading, or too fast to tell from one.
_SEEN_SHARE = 0.5


class RestingPlace:
    """Finds joints that were moved while their command stood still.

    Args:
        columns: the executor's.
        movable: (columns,) bool, columns whose command may be set to where they are.
        follows: (columns,) see `Limits.hold_distance`.
    """

    def __init__(self, columns: CommandColumns, movable: np.ndarray, follows: np.ndarray) -> None:
        self._movable = movable
        self._follows = follows
        self._small = _MOVED_SHARE * follows
        self._away = _AWAY_SHARE * follows
        self._begun = False
        # Where the joints came to rest, how far short of their command, and whether they have.
        self._place = np.zeros(columns.count)
        self._sag = np.zeros(columns.count)
        self._known = np.zeros(columns.count, dtype=bool)
        # How far they were from their command when it was set to where they were, and when.
        self._left = np.zeros(columns.count)
        self._left_ns = np.zeros(columns.count, dtype=np.int64)
        self._fresh = np.zeros(columns.count, dtype=bool)

    def leave(self) -> None:
        """Note that the command moves."""
        self._begun = False

    def seat(self, columns: np.ndarray, measured: np.ndarray) -> None:
        """Note that the command of some columns was set to where they are."""
        np.copyto(self._place, measured, where=columns)
        self._sag[columns] = 0.0
        self._known[columns] = False

    def moved(
        self, command: np.ndarray, state: MeasuredState, *, pressed: np.ndarray
    ) -> np.ndarray:
        """Return the joints whose command is to be set to where they are, (columns,) bool.

        Args:
            command: (columns,) command that stands still.
            state: plausible measured positions.
            pressed: (columns,) bool, columns that did not get where they were commanded to: what
                they still press on, or would jump to, is given up.
        """
        measured = state.positions
        if not self._begun:
            self._begun = True
            self._known[:] = False
            self._sag[:] = 0.0
            self._fresh[:] = False
            np.copyto(self._place, measured)
            state.largest_step[:] = 0.0
        rests = state.still_for(RESTS_AFTER_S)
        if not np.count_nonzero(rests):
            return rests
        lead = command - measured
        way = np.abs(measured - self._place)
        seen = state.largest_step <= _SEEN_SHARE * way
        found = (way > self._small) & (np.abs(lead - self._sag) > self._small) & seen
        found |= pressed & (np.abs(lead) > self._follows)
        found &= rests & self._movable & ~state.plausibility.taken_over
        # A joint that has come to its command but for its sag is where it was sent.
        arrived = rests & ~self._known & ~found & (np.abs(lead) <= self._follows)
        if np.count_nonzero(arrived):
            self._settle(arrived, lead, state)
        if np.count_nonzero(found):
            np.copyto(self._left, lead, where=found)
            self._left_ns[found] = state.newest_stamp_ns
            self._fresh[found] = True
        return found

    def _settle(self, columns: np.ndarray, lead: np.ndarray, state: MeasuredState) -> None:
        """Take joints to be where they were sent, but for their sag."""
        np.copyto(self._place, state.positions, where=columns)
        np.copyto(self._sag, lead, where=columns)
        self._known |= columns
        state.largest_step[columns] = 0.0

    def notice_sinking(self, command: np.ndarray, state: MeasuredState) -> None:
        """Find joints that hang as far below their new command as they did below their last one."""
        if not np.count_nonzero(self._fresh):
            return
        lead = command - state.positions
        since_ns = state.since_ns - self._left_ns
        soon = (since_ns > 0) & (since_ns <= _SINKS_WITHIN_NS)
        same = np.abs(lead - self._left) <= _SAME_SAG * np.abs(self._left)
        sinks = self._fresh & state.still_for(RESTS_AFTER_S) & soon & same
        self._settle(sinks, lead, state)
        self._fresh &= ~sinks & (since_ns <= _SINKS_WITHIN_NS)

    def away(self, command: np.ndarray, measured: np.ndarray) -> np.ndarray:
        """Return the joints that are not where their command holds them, (columns,) bool."""
        return self._movable & (np.abs(command - measured - self._sag) > self._away)
