"""Chunks that begin where the robot was some time before their stamp.

A policy that stamps its chunks when it sends them, or is given an old state, sends rows that begin
in the past: at every hand-over the robot goes back. Only the position of the first row shows it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from vla_runtime.execution.column_model import ColumnModel

# Positions of the last 2.5 s are kept, so far apart.
_KEPT, _APART_NS = 128, 20_000_000
# A first row contradicts its stamp where it is further from the robot's position at the stamp than
# this many times `hold_follows`, and nearer by this share to the one so long before.
_AWAY, _SHARE, _BEFORE_NS = 1.2, 0.33, 200_000_000
# Stamps this far apart are judged; of the last ones, so many that contradict are no turn round.
_JUDGED_NS = 100_000_000
_OF_LAST, _CONTRADICT = 8, 6


class AnchorCheck:
    """Compares chunks' first rows with where the robot was; `warning` says what is wrong."""

    def __init__(self, model: ColumnModel) -> None:
        columns = model.columns
        self._looked_at = np.flatnonzero(
            model.movable & ~columns.is_continuous & np.isfinite(model.follows)
        )
        self._allowed = model.follows[self._looked_at]
        self._stamps = np.zeros(_KEPT, dtype=np.int64)
        self._places = np.zeros((_KEPT, columns.count))
        self._verdicts: deque[bool] = deque(maxlen=_OF_LAST)
        self.clear()

    def clear(self) -> None:
        """Forget all positions, after a clock jump."""
        self._count = self._judged_ns = 0
        self._verdicts.clear()
        self.warning = ''

    def note(self, now_ros_ns: int, positions: np.ndarray) -> None:
        """Add the measured positions of a tick, (columns,)."""
        if self._count and now_ros_ns - self._stamps[(self._count - 1) % _KEPT] < _APART_NS:
            return
        slot = self._count % _KEPT
        self._stamps[slot] = now_ros_ns
        self._places[slot] = positions
        self._count += 1

    def judge(self, stamp_ns: int, row: np.ndarray) -> str:
        """Judge the first row of a chunk, (columns,), by its stamp; return what is wrong, or ''."""
        known = min(self._count, _KEPT)
        stamps = self._stamps[:known]
        early = not known or stamp_ns - _JUDGED_NS < max(self._judged_ns, stamps.min())
        if early or not len(self._looked_at):
            return ''
        self._judged_ns = stamp_ns
        # In units of `hold_follows`, from the robot's places to the row.
        ways = (row - self._places[:known])[:, self._looked_at] / self._allowed
        away = np.abs(ways).max(axis=1)
        at, last = (
            int(np.argmax(np.where(stamps <= time_ns, stamps, 0)))
            for time_ns in (stamp_ns, stamp_ns - _JUDGED_NS)
        )
        behind = float(np.dot(ways[last] - ways[at], ways[at])) < 0.0
        before = np.where(stamps <= stamp_ns - _BEFORE_NS, away, np.inf)
        nearest = int(np.argmin(before))
        self._verdicts.append(behind and away[at] > _AWAY and before[nearest] < _SHARE * away[at])
        if sum(self._verdicts) < _CONTRADICT:
            self.warning = ''
            return ''
        if not self._verdicts[-1]:
            return ''
        self.warning = (
            f'{sum(self._verdicts)} of the last {_OF_LAST} chunks begin where the robot was before '
            f'their header.stamp, this one {(stamp_ns - stamps[nearest]) * 1e-9:.2f} s before, so '
            'that the robot goes back at every seam: the policy stamps chunks when it sends them, '
            'or is given an old state; header.stamp has to be the time of the observation'
        )
        return self.warning
