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

    def leave(self) -> None:
        """Note that the command moves."""
        self._begun = False

    def moved(self, command: np.ndarray, state: MeasuredState, *, pressed: bool) -> np.ndarray:
        """Return the joints whose command is to be set to where they are, (columns,) bool.

        Args:
            command: (columns,) command that stands still.
            state: plausible measured positions.
            pressed: the robot was stopped because it did not get where it was commanded to: what
                it still presses on, or would jump to, is given up.
        """
        measured = state.positions
        if not self._begun:
            self._begun = True
            self._known[:] = False
            self._sag[:] = 0.0
            np.copyto(self._place, measured)
            state.largest_step[:] = 0.0
        rests = state.still_for(RESTS_AFTER_S)
        if not np.count_nonzero(rests):
            return rests
        lead = command - measured
        way = np.abs(measured - self._place)
        seen = state.largest_step <= _SEEN_SHARE * way
        found = (way > self._small) & (np.abs(lead - self._sag) > self._small) & seen
        if pressed:
            found |= np.abs(lead) > self._follows
        found &= rests & self._movable & ~state.plausibility.taken_over
        # A joint that has come to its command but for its sag is where it was sent.
        arrived = rests & ~self._known & ~found & (np.abs(lead) <= self._follows)
        if np.count_nonzero(arrived):
            np.copyto(self._place, measured, where=arrived)
            np.copyto(self._sag, lead, where=arrived)
            self._known |= arrived
            state.largest_step[arrived] = 0.0
        return found

    def away(self, command: np.ndarray, measured: np.ndarray) -> np.ndarray:
        """Return the joints that are not where their command holds them, (columns,) bool."""
        return self._movable & (np.abs(command - measured - self._sag) > self._away)
