"""Joints of a stopped robot that a person has moved, and where they rest now.

An arm that is moved by hand while its motors are off must not swing back when they come on again.
So the command is set to where the arm is. What merely hangs below its command would sink further
with every new one: what creeps, or sinks again as soon as its command was set, is left alone.
"""

from __future__ import annotations

import numpy as np

from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.state import MeasuredState

# A joint that stays where it is for so long rests.
RESTS_AFTER_S = 0.5
# A joint is looked at for so long at a time, and by so many messages at least.
_WINDOW_NS = 400_000_000
_SAMPLES = 3
# Shares of `hold_follows` within that time: way up to which a joint rests (a person who keeps an
# arm up trembles); way from which on a person moves it; most drift of the mean between windows.
_RESTS_SHARE, _SWIFT_SHARE, _DRIFT_SHARE = 0.8, 0.4, 0.3
# Way of a joint at rest, as a share of `hold_follows`, that is worth a new command.
_MOVED_SHARE = 0.5
# A joint that has stayed at its new command for so many windows is held there.
_PROVEN = 2
# An arm that arrives covers no more from one message to the next, as a share of `hold_follows`.
_ARRIVES_SHARE = 2.0
# Looks within which a joint has come to rest beside another one that a person moved.
_BESIDE, _LONG_AGO = 4, 1000
# A joint that sinks again does so by about as much as before.
_SINKS_AGAIN = 1.5
# A way covered from one message to the next by this share is a wrong reading, or too fast to tell.
_SEEN_SHARE = 0.5


class MovedJoints:
    """Finds joints that were moved while their command stood still."""

    def __init__(self, model: ColumnModel) -> None:
        count = model.columns.count
        self._movable = model.movable
        self._follows = model.follows
        self._small = _MOVED_SHARE * model.follows
        self._begun = False
        # No window has ended yet: the arm arrives.
        self._arrives = np.ones(count, dtype=bool)
        # Where the joints came to rest, how far short of their command, and whether they have.
        self._place = np.zeros(count)
        self._sag = np.zeros(count)
        self._known = np.zeros(count, dtype=bool)
        # How far they were from their command when it was set, and for how many windows they
        # stayed.
        self._left = np.zeros(count)
        self._stayed = np.zeros(count, dtype=np.int64)
        # The window that is under way, and what the last ones said.
        self._lowest, self._highest = np.zeros(count), np.zeros(count)
        self._since_ns = np.zeros(count, dtype=np.int64)
        self._seen_ns = np.zeros(count, dtype=np.int64)
        self._samples = np.zeros(count, dtype=np.int64)
        self._sum, self._mean = np.zeros(count), np.full(count, np.nan)
        self._rests = np.zeros(count, dtype=bool)
        self._moves = np.zeros(count, dtype=bool)
        self._swift = np.zeros(count, dtype=bool)
        # Looks since it last moved swiftly.
        self._since_swift = np.full(count, _LONG_AGO)

    def leave(self) -> None:
        self._begun = False

    def set_to_measured(
        self, columns: np.ndarray, command: np.ndarray, measured: np.ndarray
    ) -> None:
        """Note that the command of some columns (bool) was set to where they are."""
        np.copyto(self._left, command - measured, where=columns)
        self._stayed[columns] = 0
        np.copyto(self._place, measured, where=columns)
        self._sag[columns] = 0.0
        self._known[columns] = False
        self._swift[columns] = False

    def find(self, command: np.ndarray, state: MeasuredState, *, pressed: np.ndarray) -> np.ndarray:
        """Return the joints whose command is to be set to where they are, (columns,) bool.

        For every tick at rest. What `pressed` columns (bool) still press on is given up.
        """
        measured = state.positions
        if not self._begun:
            self._begin(measured, state)
        looked = self._look(measured, state)
        lead = command - measured
        found = pressed & (np.abs(lead) > self._follows)
        if np.count_nonzero(found):
            found &= state.still_for(RESTS_AFTER_S) & (state.largest_step <= self._small)
        if np.count_nonzero(looked):
            found |= self._was_moved(looked, lead, measured, state, found)
        return found & self._movable & ~state.plausibility.unseen

    def _was_moved(
        self,
        looked: np.ndarray,
        lead: np.ndarray,
        measured: np.ndarray,
        state: MeasuredState,
        pressed: np.ndarray,
    ) -> np.ndarray:
        stays = looked & (np.abs(lead) <= self._small)
        self._stayed[stays] += 1
        self._stayed[looked & ~stays] = 0
        self._left[self._stayed >= _PROVEN] = 0.0
        rests = looked & self._rests
        way = np.abs(measured - self._place)
        # Whoever moves one joint swiftly may move another one slowly at the same time.
        self._since_swift[looked] += 1
        beside = bool(np.count_nonzero(self._since_swift <= _BESIDE))
        found = (
            (self._swift | beside) & (way > self._small) & (np.abs(lead - self._sag) > self._small)
        )
        found &= state.largest_step <= _SEEN_SHARE * way
        again = lead * self._left > 0.0
        again &= np.abs(lead) <= _SINKS_AGAIN * np.abs(self._left) + self._small
        sinks = rests & found & again
        found &= rests & ~again
        # A joint that has come to its command but for its sag is where it was sent.
        arrived = rests & ~self._known & ~found & ~pressed & (np.abs(lead) <= self._follows)
        self._settle(arrived | sinks, lead, state)
        # A joint that has just set out counts from the next window on.
        swift = self._moves & ~self._arrives
        self._swift |= swift
        self._since_swift[swift] = 0
        self._arrive(looked & self._arrives, state)
        return found

    def _arrive(self, columns: np.ndarray, state: MeasuredState) -> None:
        """Count the ways of joints from where the arm has arrived."""
        if np.count_nonzero(columns):
            self._arrives[columns] = False
            columns = columns & (state.largest_step <= _ARRIVES_SHARE * self._follows)
            np.copyto(self._place, state.positions, where=columns & ~self._known)
            state.largest_step[columns] = 0.0

    def _begin(self, measured: np.ndarray, state: MeasuredState) -> None:
        self._begun = True
        self._arrives[:] = True
        self._known[:] = False
        self._sag[:] = 0.0
        self._left[:] = 0.0
        self._rests[:] = self._swift[:] = False
        self._since_swift[:] = _LONG_AGO
        self._mean[:] = np.nan
        self._begin_look(np.ones(len(measured), dtype=bool), measured, state)
        np.copyto(self._place, measured)
        state.largest_step[:] = 0.0

    def _begin_look(self, columns: np.ndarray, measured: np.ndarray, state: MeasuredState) -> None:
        np.copyto(self._lowest, measured, where=columns)
        np.copyto(self._highest, measured, where=columns)
        np.copyto(self._since_ns, state.stamps, where=columns)
        self._samples[columns] = 0
        self._sum[columns] = 0.0

    def _look(self, measured: np.ndarray, state: MeasuredState) -> np.ndarray:
        """Take note of what was measured; return the columns whose window has ended."""
        # The clock was set back.
        self._begin_look(state.stamps < self._since_ns, measured, state)
        new = state.stamps != self._seen_ns
        self._samples += new
        np.add(self._sum, measured, out=self._sum, where=new)
        np.copyto(self._seen_ns, state.stamps)
        np.minimum(self._lowest, measured, out=self._lowest)
        np.maximum(self._highest, measured, out=self._highest)
        ended = (state.stamps - self._since_ns >= _WINDOW_NS) & (self._samples >= _SAMPLES)
        if np.count_nonzero(ended):
            span = self._highest - self._lowest
            mean = self._sum / np.maximum(self._samples, 1)
            drifts = np.abs(mean - self._mean)
            np.copyto(self._mean, mean, where=ended)
            rests = (span <= _RESTS_SHARE * self._follows) & (
                drifts <= _DRIFT_SHARE * self._follows
            )
            np.copyto(self._rests, rests, where=ended)
            np.copyto(self._moves, ended & (span > _SWIFT_SHARE * self._follows))
            self._begin_look(ended, measured, state)
        return ended

    def _settle(self, columns: np.ndarray, lead: np.ndarray, state: MeasuredState) -> None:
        """Set joints to where they were sent, but for their sag."""
        if not np.count_nonzero(columns):
            return
        np.copyto(self._place, state.positions, where=columns)
        np.copyto(self._sag, lead, where=columns)
        self._known |= columns
        self._swift[columns] = False
        state.largest_step[columns] = 0.0
