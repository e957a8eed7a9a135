"""Joints that two publishers bring at the same time.

A driver that was started again is a new publisher of the same joints, and the old one is silent
from then on; two that take turns are two nodes that say different things about one joint.
"""

from __future__ import annotations

import numpy as np

# Turns of two publishers, in so short a time, that no restart explains.
_TURNS = 2
_WITHIN_NS = 10_000_000_000
# Two publishers that took turns are believed to be there for so long after the last turn.
_STAYS_NS = 3_000_000_000


class DoubledJoints:
    """Finds joints whose publishers take turns, as far as is known before `until_ns`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        # Publisher of the newest message of each column, and the one that it took over from.
        self._newest = [''] * len(names)
        self._before = [''] * len(names)
        self._turns = [0] * len(names)
        self._first_ns = [0] * len(names)
        self._found = 0
        self.until_ns = 0

    def clear(self) -> None:
        """Forget all turns: the clock jumped."""
        self._turns = [0] * len(self._names)
        self.until_ns = 0

    def observe(self, target: np.ndarray, source: str, stamp_ns: int) -> None:
        """Take note of who published these columns."""
        first = int(target[0])
        # All columns of a message share its publisher: mostly there is nothing to note.
        if not source or (self._newest[first] == source and len(target) == 1):
            return
        for at in target.tolist():
            newest = self._newest[at]
            if newest == source:
                continue
            if self._before[at] == source:
                self._count_turn(at, stamp_ns)
            self._newest[at], self._before[at] = source, newest

    def _count_turn(self, at: int, stamp_ns: int) -> None:
        if not 0 <= stamp_ns - self._first_ns[at] <= _WITHIN_NS:
            self._first_ns[at], self._turns[at] = stamp_ns, 0
        self._turns[at] += 1
        if self._turns[at] >= _TURNS:
            self._first_ns[at] = stamp_ns
            self._found = at
            self.until_ns = stamp_ns + _STAYS_NS

    def describe(self) -> str:
        """Name the joint that was found last, and the topics of its publishers."""
        at = self._found
        topics = sorted({source.split('#')[0] for source in (self._newest[at], self._before[at])})
        return (
            f"two nodes publish the position of '{self._names[at]}' on {' and '.join(topics)}: "
            'which of them is right is unknown; end one of them, and call ~/start'
        )
