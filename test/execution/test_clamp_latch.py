"""The latch closes on repeated clamping, and only the operator opens it."""

from __future__ import annotations

from execution_rig import Rig, holding

from vla_runtime.execution.clamp_latch import ClampLatch
from vla_runtime.execution.command import ChunkRefusal, CommandKind
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.limits import ColumnLimits, make_limits

LIMITS = make_limits(('a', 'b'), {'a': ColumnLimits(-1, 0.05)})


def closed_rig() -> Rig:
    rig = Rig(holding(replan_interval=20), limits=LIMITS, clamp_latch=3).started()
    for _ in range(3):
        rig.submit([0.1] * 30)
        rig.tick(4)
    assert rig.reason == 'clamp_latch'
    return rig


def test_when_as_many_in_a_row_as_allowed_expect_closed_until_opened() -> None:
    latch = ClampLatch(2)
    for clamped in (True, False, True):
        latch.count(clamped=clamped)
        assert not latch.closed
    latch.count(clamped=True)
    assert latch.closed and '2 chunks in a row' in latch.text
    latch.count(clamped=False)
    assert latch.closed
    latch.open()
    latch.count(clamped=True)
    assert not latch.closed


def test_when_zero_are_allowed_expect_it_never_to_close() -> None:
    latch = ClampLatch(0)
    for _ in range(1000):
        latch.count(clamped=True)
    assert not latch.closed


def test_when_an_episode_begins_without_a_reset_expect_it_still_closed() -> None:
    rig = closed_rig()
    rig.executor.begin_episode(1)
    rig.tick()
    assert rig.reason == 'clamp_latch'
    assert rig.submit([0.0] * 30).refusal is ChunkRefusal.CLAMP_LATCH
    rig.executor.reset(2)
    rig.tick()
    assert rig.submit([0.0] * 30).accepted
    assert rig.tick().kind is CommandKind.TRACK


def test_when_a_new_executor_is_given_a_closed_latch_expect_no_start_before_the_reset() -> None:
    latch = closed_rig().executor.latch
    rig = Rig(holding(replan_interval=20), limits=LIMITS, clamp_latch=3)
    rig.executor = ChunkExecutor(rig.config, rig.parameters, latch=latch)
    rig.tick(2)
    result = rig.executor.start(rig.now_s, rig.ros_ns)
    assert not result.started and '3 chunks in a row' in result.text
    assert rig.executor.status().clamp_latched
    assert not rig.executor.wants_chunk
    assert rig.tick().kind is CommandKind.IDLE
    rig.executor.reset(1)
    rig.started()
    assert rig.reason == 'waiting_for_chunk'
