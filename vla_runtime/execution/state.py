"""The measured positions: taken by name from any number of sources, each with its own stamps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_runtime.execution.columns import Columns

_NEVER = np.iinfo(np.int64).min
_FULL_TURN = 2.0 * np.pi
_SOURCES_KEPT = 32


class MeasuredState:
    """Latest measured position of every column with feedback, and the stamp it came with."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._index = {
            name: column
            for column, name in enumerate(columns.names)
            if columns.has_feedback[column]
        }
        self._maps: dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]] = {}
        self.positions = np.zeros(columns.count)
        self._stamps = np.full(columns.count, _NEVER, dtype=np.int64)
        self._oldest = _NEVER if self._index else None
        self._distrusted = False
        self.malformed = 0
        self.out_of_order = 0

    @property
    def guarded(self) -> bool:
        """Whether any column has feedback at all."""
        return self._oldest is not None

    @property
    def oldest_stamp_ns(self) -> int:
        """Stamp of the column that was heard of least recently; only when `complete`."""
        return self._oldest if self._oldest is not None else 0

    @property
    def complete(self) -> bool:
        """Whether every column with feedback has been heard of."""
        return self._oldest is None or self._oldest != _NEVER

    @property
    def missing(self) -> list[str]:
        """Columns with feedback that were never heard of."""
        return [name for name, column in self._index.items() if self._stamps[column] == _NEVER]

    def oldest_columns(self) -> list[str]:
        """The columns that carry the oldest stamp."""
        return [
            name for name, column in self._index.items() if self._stamps[column] == self._oldest
        ]

    def clear(self) -> None:
        """Forget all: stamps of the past say nothing any more."""
        self._stamps[:] = _NEVER
        self._oldest = _NEVER if self._index else None
        self._distrusted = False

    def distrust(self) -> None:
        """Take the next message even if its stamp is older than the last one's.

        For a stamp of the future, such as one of before the clock was set back that came late: to
        drop all messages until time has caught up with it could take for ever.
        """
        self._distrusted = True

    def observe(self, names: Sequence[str], positions: Sequence[float], stamp_ns: int) -> None:
        """Take one message. Names that are not commanded are ignored; bad messages are counted.

        A message older than the last one is dropped, unless the last one is distrusted.

        Args:
            names: joint names, in the message's order.
            positions: as many positions, rad or m. Not-a-number is kept: it is for the watchdog.
            stamp_ns: the message's stamp, ROS clock.
        """
        key = tuple(names)
        found = self._maps.get(key)
        if found is None:
            found = self._map(key)
        source, target = found
        if len(positions) != len(key):
            self.malformed += 1
            return
        if not len(target):
            return
        if stamp_ns < self._stamps[target].max() and not self._distrusted:
            self.out_of_order += 1
            return
        self.positions[target] = np.asarray(positions, dtype=np.float64)[source]
        self._stamps[target] = stamp_ns
        self._distrusted = False
        self._oldest = int(self._stamps[self._columns.has_feedback].min())

    def _map(self, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        pairs = [(at, self._index[name]) for at, name in enumerate(names) if name in self._index]
        source = np.array([at for at, _ in pairs], dtype=np.int64)
        target = np.array([column for _, column in pairs], dtype=np.int64)
        if len(self._maps) >= _SOURCES_KEPT:
            self._maps.clear()
        self._maps[names] = (source, target)
        return source, target

    def bring_near(self, reference: np.ndarray) -> None:
        """Count whole turns of continuous columns so that they lie nearest to the reference."""
        where = self._columns.is_continuous
        turns = np.round((reference[where] - self.positions[where]) / _FULL_TURN)
        self.positions[where] += np.nan_to_num(turns) * _FULL_TURN
