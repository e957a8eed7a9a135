"""Thread that calls a function at a fixed rate on the steady clock, and measures its lateness.

Not an rclpy timer, whose wait set with all subscriptions costs more in Python than a tick does.
Invariants:
- deadlines lie on one grid from the start: being late once does not move the later ones;
- deadlines that passed in a pause longer than a period are skipped and counted;
- an exception in the tick is reported and ends that tick only;
- `stop` returns after the last tick is over, or says that it hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread

import numpy as np

from vla_runtime.nodes.worker import join_thread

_SECOND_NS = 1_000_000_000
_KEPT = 1024
# Two clocks read within this are read together; after so many tries as they are.
_TOGETHER_NS = 5_000
_READS = 5


def system_time_ns(steady_s: float) -> int:
    """Return the system clock at a recent steady time; ROS time where `use_sim_time` is off.

    The clocks are read again where this thread was paused between the two.
    """
    for _ in range(_READS):
        before = time.monotonic_ns()
        system = time.time_ns()
        after = time.monotonic_ns()
        if after - before < _TOGETHER_NS:
            break
    return system - (before + after) // 2 + round(steady_s * _SECOND_NS)


@dataclass(frozen=True)
class Lateness:
    """Lateness of the newest ticks in milliseconds, and the number of skipped ticks.

    Attributes:
        p50_ms, p99_ms, maximum_ms: of the newest 1024; 0.0 before the first tick.
        skipped: deadlines that passed while a tick was late by more than a period, since the start.
    """

    ticks: int
    p50_ms: float
    p99_ms: float
    maximum_ms: float
    skipped: int


class SteadyLoop:
    """Calls `tick(now_s)` at `rate_hz` in a thread of its own.

    Args:
        tick: gets the steady time (`time.monotonic`) at which it begins.
        on_error: called with an exception that `tick` raised, in the loop's thread.
        on_start, on_stop: called in the loop's thread before the first tick and after the last.
    """

    def __init__(
        self,
        tick: Callable[[float], None],
        rate_hz: float,
        name: str,
        on_error: Callable[[Exception], None],
        on_start: Callable[[], None] | None = None,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        self._tick = tick
        self._period_ns = round(_SECOND_NS / rate_hz)
        self._on_error = on_error
        self._on_start = on_start
        self._on_stop = on_stop
        self._stopping = False
        self._late_ns = np.zeros(_KEPT, dtype=np.int64)
        self._ticks = 0
        self._skipped = 0
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; the first tick comes one period later."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> None:
        """Let the tick in progress be the last; return when it is over, or never began.

        Args:
            timeout_s: longest wait; None: for ever.

        Raises:
            TimeoutError: it is not over; if it ever ends, it is still the last.
        """
        self._stopping = True
        if self._thread.is_alive():
            join_thread(self._thread, timeout_s)

    def lateness(self) -> Lateness:
        """Any thread may call."""
        ticks, skipped = self._ticks, self._skipped
        newest = self._late_ns[: min(ticks, _KEPT)]
        if not len(newest):
            return Lateness(ticks, 0.0, 0.0, 0.0, skipped)
        p50, p99, maximum = np.percentile(newest, (50, 99, 100)) * 1e-6
        return Lateness(ticks, float(p50), float(p99), float(maximum), skipped)

    def _run(self) -> None:
        if self._on_start is not None:
            self._guarded(self._on_start)
        deadline = time.monotonic_ns() + self._period_ns
        while not self._stopping:
            ahead = deadline - time.monotonic_ns()
            if ahead > 0:
                time.sleep(ahead * 1e-9)
            now = time.monotonic_ns()
            late = now - deadline
            self._late_ns[self._ticks % _KEPT] = late
            self._ticks += 1
            try:
                self._tick(now * 1e-9)
            except Exception as error:
                self._on_error(error)
            missed = late // self._period_ns
            self._skipped += missed
            deadline += (1 + missed) * self._period_ns
        if self._on_stop is not None:
            self._guarded(self._on_stop)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._on_error(error)
