"""The loop's promises that do not depend on how busy the machine is."""

import itertools
import threading
import time

import pytest

from vla_runtime.nodes.executor import steady_loop
from vla_runtime.nodes.executor.steady_loop import SteadyLoop, system_time_ns


class Ticks:
    """Counts ticks, and lets a test wait for one."""

    def __init__(self):
        self.times_s = []
        self.changed = threading.Condition()

    def __call__(self, now_s):
        with self.changed:
            self.times_s.append(now_s)
            self.changed.notify_all()

    def wait_for(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.times_s) >= count, timeout=30.0)


def running(tick, errors=None, **hooks):
    errors = [] if errors is None else errors
    loop = SteadyLoop(tick, 200.0, 'test', errors.append, **hooks)
    loop.start()
    return loop


def test_ticks_come_in_order_and_never_before_their_deadline():
    ticks = Ticks()
    loop = running(ticks)
    ticks.wait_for(20)
    loop.stop()
    first = ticks.times_s[0]
    assert ticks.times_s == sorted(ticks.times_s)
    # However late single ones are: the n-th does not come before n periods.
    assert all(now - first >= n * 0.005 - 0.006 for n, now in enumerate(ticks.times_s))


def test_stop_returns_after_the_last_tick():
    ticks = Ticks()
    loop = running(ticks)
    ticks.wait_for(3)
    loop.stop()
    count = len(ticks.times_s)
    assert loop.lateness().ticks == count
    assert not any(thread.name == 'test' for thread in threading.enumerate())


def test_an_exception_is_reported_and_the_loop_goes_on():
    ticks, errors = Ticks(), []

    def tick(now_s):
        ticks(now_s)
        if len(ticks.times_s) == 2:
            raise ValueError('no')

    loop = running(tick, errors)
    ticks.wait_for(5)
    loop.stop()
    assert [str(error) for error in errors] == ['no']


def test_a_long_tick_skips_deadlines_and_counts_them():
    ticks, gate = Ticks(), threading.Event()

    def tick(now_s):
        ticks(now_s)
        if len(ticks.times_s) == 2:
            gate.wait(timeout=0.1)

    loop = running(tick)
    ticks.wait_for(6)
    loop.stop()
    lateness = loop.lateness()
    assert lateness.skipped >= 15
    # Skipped, not made up for: the ticks after the pause are on the grid again.
    assert lateness.maximum_ms >= 80.0


def test_hooks_run_in_the_loops_thread_around_the_ticks():
    ticks, names = Ticks(), []
    loop = running(
        ticks,
        on_start=lambda: names.append(('start', threading.current_thread().name)),
        on_stop=lambda: names.append(('stop', threading.current_thread().name)),
    )
    ticks.wait_for(1)
    loop.stop()
    assert names == [('start', 'test'), ('stop', 'test')]


def test_a_tick_that_hangs_is_said_and_does_not_hang_the_stop():
    begun, release = threading.Event(), threading.Event()

    def tick(now_s):
        begun.set()
        release.wait(timeout=60.0)

    loop = running(tick)
    assert begun.wait(30.0)
    try:
        with pytest.raises(TimeoutError, match="'test'"):
            loop.stop(timeout_s=0.05)
    finally:
        release.set()
        loop.stop()


def test_the_system_time_of_a_steady_time_goes_on_as_evenly_as_that():
    now_s = time.monotonic()
    times = [system_time_ns(now_s + 0.01 * i) for i in range(100)]
    # Read together, the clocks agree to what reading them takes.
    apart = sorted(after - before for before, after in itertools.pairwise(times))
    assert apart[50] == pytest.approx(10_000_000, abs=5_000)


def test_a_pause_between_the_two_clocks_is_seen_and_both_are_read_again(monkeypatch):
    class Clocks:
        """The system is 1000 s ahead; the thread is paused after its first look at a clock."""

        def __init__(self):
            self.now, self.reads = 5_000_000_000, 0

        def monotonic_ns(self):
            self.now += 100 if self.reads != 1 else 30_000_000
            self.reads += 1
            return self.now

        def time_ns(self):
            self.now += 100
            return self.now + 1_000_000_000_000

    monkeypatch.setattr(steady_loop, 'time', Clocks())
    assert system_time_ns(5.0) == pytest.approx(1_005_000_000_000, abs=200)
