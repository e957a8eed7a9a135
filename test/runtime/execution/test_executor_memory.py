"""The steady tick allocates nothing that lasts, and next to nothing while it runs."""

import gc
import itertools
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from execution_rig import SWITCH, Rig, alike, holding
from thorough import thorough_but

from vla_runtime.execution.column_model import StartParameters
from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import CommandKind
from vla_runtime.execution.limits import ColumnLimits

JOINTS = 14
ROWS = 1000  # the longest chunk that parameters allow
WINDOWS, WINDOW_TICKS = 4, 500
# Python's numbers, and views of arrays that exist.
PASSING_BYTES = 2048
# Half a byte a tick, where one leaked number is 24 bytes or more.
LEAK_BYTES = 250


@pytest.fixture
def moving():
    """In the middle of one long chunk, every limit switched on, garbage collection off."""
    columns = tuple(Column(f'joint_{number}') for number in range(JOINTS))
    names = [column.name for column in columns]
    limit = ColumnLimits(-2.0, 2.0, 3.0, 60.0, 0.5)
    rig = Rig(
        holding(replan_interval=ROWS, handover=SWITCH),
        columns,
        limits=alike(names, limit),
        start=StartParameters(on_too_far='refuse'),
    )
    # Exactly zero is what a driver says that has not heard from its robot.
    rig.measured += 0.001
    rig.started()
    rows = 0.5 * np.sin(0.05 * np.arange(ROWS)[:, None] + np.zeros(JOINTS))
    assert rig.submit(rows).accepted
    rig.tick(50)
    gc.collect()
    gc.disable()
    yield rig
    gc.enable()


def tick(rig: Rig) -> None:
    """One period of a robot that follows, without the rig's own record of it."""
    rig.now_s += rig.period_ns * 1e-9
    rig.ros_ns += rig.period_ns
    rig.executor.observe_state(rig.names, rig.measured, rig.ros_ns)
    command = rig.executor.tick(rig.now_s, rig.ros_ns)
    assert command.kind is CommandKind.TRACK, command
    np.copyto(rig.measured, command.setpoints)
    assert rig.poll() is None


def growth_of_windows(rig: Rig, tick: Callable[[Rig], object]) -> list[int]:
    """Bytes that each of the windows left allocated."""
    for _ in range(100):
        tick(rig)
    tracemalloc.start()
    try:
        tick(rig)
        allocated = [tracemalloc.get_traced_memory()[0]]
        for _ in range(WINDOWS):
            for _ in range(WINDOW_TICKS):
                tick(rig)
            allocated.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return [after - before for before, after in itertools.pairwise(allocated)]


# A leak grows in every window. What Python itself allocates once does not: a larger free list, or
# the cache that 3.10 gives a function at its 1024th call, a few kilobytes for all of a tick's.
def test_when_tracking_for_thousands_of_ticks_expect_no_growth(moving):
    assert min(growth_of_windows(moving, tick)) < LEAK_BYTES
    # It was the tick of a moving robot that was measured.
    assert moving.executor.counters.steps > WINDOWS * WINDOW_TICKS / 4


@pytest.mark.parametrize('every_ticks', thorough_but([2], [1, 2]))
def test_one_number_kept_a_tick_or_a_step_is_seen(moving, every_ticks):
    kept, ticks = [], itertools.count()

    def leaking(rig: Rig) -> None:
        tick(rig)
        if next(ticks) % every_ticks == 0:
            kept.append(rig.now_s)

    assert min(growth_of_windows(moving, leaking)) > 20 * LEAK_BYTES / every_ticks


def test_when_ticking_expect_next_to_nothing_allocated_in_passing(moving):
    executor, largest = moving.executor, 0
    tracemalloc.start()
    try:
        for _ in range(200):
            tick(moving)
            moving.now_s += 0.01
            moving.ros_ns += moving.period_ns
            executor.observe_state(moving.names, moving.measured, moving.ros_ns)
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            command = executor.tick(moving.now_s, moving.ros_ns)
            _, peak = tracemalloc.get_traced_memory()
            np.copyto(moving.measured, command.setpoints)
            largest = max(largest, peak - before)
    finally:
        tracemalloc.stop()
    assert 0 < largest < PASSING_BYTES
