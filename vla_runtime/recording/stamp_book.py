"""Stamps of messages that came, compared with those that inferences used."""

from __future__ import annotations

from collections import OrderedDict


class StampBook:
    """Stamps received and used, in any order, `most` of each.

    `missing` were used and did not come.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._came: OrderedDict[int, None] = OrderedDict()
        self._wanted: OrderedDict[int, None] = OrderedDict()

    @property
    def missing(self) -> int:
        return len(self._wanted)

    def came(self, stamp_ns: int) -> None:
        self._wanted.pop(stamp_ns, None)
        self._note(self._came, stamp_ns)

    def wanted(self, stamp_ns: int) -> None:
        if stamp_ns not in self._came:
            self._note(self._wanted, stamp_ns)

    def _note(self, stamps: OrderedDict[int, None], stamp_ns: int) -> None:
        stamps[stamp_ns] = None
        if len(stamps) > self._most:
            stamps.popitem(last=False)
