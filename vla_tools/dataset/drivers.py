"""Who drove the robot at any time of a bag, by what its executor reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_runtime.execution.command import Driver
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import stamp_to_ns

# A report is published within a fraction of a second of the command that it is about.
_LATEST_NS = 5_000_000_000


@dataclass(frozen=True)
class DriverChange:
    """A change of who drives, at a time of the bag."""

    time_ns: int
    driver: Driver
    before: Driver


class Drivers:
    """Every change of a bag, in order of time; without one nothing is known, and nobody led."""

    def __init__(self, changes: Iterable[DriverChange] = ()) -> None:
        found = sorted(changes, key=lambda change: change.time_ns)
        self._times = np.array([change.time_ns for change in found], dtype=np.int64)
        first = [found[0].before] if found else [Driver.POLICY]
        self._who = [*first, *(change.driver for change in found)]

    def leads(self, times_ns: np.ndarray) -> np.ndarray:
        """Return at which of these times, (n,) int64, a leader led, (n,) bool."""
        return self._is(Driver.LEADER, times_ns)

    def nobody(self, times_ns: np.ndarray) -> np.ndarray:
        """Return at which of these times, (n,) int64, nobody drove, (n,) bool."""
        return self._is(Driver.NOBODY, times_ns)

    def _is(self, driver: Driver, times_ns: np.ndarray) -> np.ndarray:
        flags = np.array([who is driver for who in self._who])
        return flags[np.searchsorted(self._times, times_ns, side='right')]


def changes_of(message: Any, time_ns: int) -> Iterator[DriverChange]:
    """Read the changes out of a report; damaged ones are left out.

    Args:
        message: `DiagnosticArray` of the executor.
        time_ns: time of its recording, on the bag's clock.
    """
    for status in message.status:
        if not status.name.endswith(': driver'):
            continue
        values = values_of(status)
        try:
            late_ns = stamp_to_ns(message.header.stamp) - int(values['stamp_ns'])
            driver, before = Driver(values['driver']), Driver(values['before'])
        except (KeyError, ValueError):
            continue
        yield DriverChange(time_ns - late_ns * (0 <= late_ns <= _LATEST_NS), driver, before)
