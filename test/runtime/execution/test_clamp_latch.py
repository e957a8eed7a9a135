"""The latch closes on repeated clamping, and only the operator opens it."""

from __future__ import annotations

import numpy as np
import pytest
from execution_rig import Rig, holding
from watched_executor import WatchedExecutor

from vla_runtime.execution.command import ChunkRefusal, CommandKind
from vla_runtime.execution.guard import ClampLatch
from vla_runtime.execution.limits import ColumnLimits, LimitActions, make_limits

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
    for clamped in ('a', '', 'a'):
        latch.count(clamped)
        assert not latch.closed
    latch.count('b')
    assert latch.closed and '2 chunks in a row' in latch.text
    latch.count('c')
    latch.count('')
    assert latch.closed and latch.cause == 'b'
    latch.open()
    latch.count('a')
    assert not latch.closed


def test_when_zero_are_allowed_expect_it_never_to_close() -> None:
    latch = ClampLatch(0)
    for _ in range(1000):
        latch.count('a')
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
    rig.executor = WatchedExecutor(rig.config, rig.parameters, latch=latch)
    rig.tick(2)
    result = rig.executor.start(rig.now_s, rig.ros_ns)
    assert not result.started and '3 chunks in a row' in result.text
    assert rig.executor.status().clamp_latched
    assert not rig.executor.wants_chunk
    assert rig.tick().kind is CommandKind.IDLE
    rig.executor.reset(1)
    rig.started()
    assert rig.reason == 'waiting_for_chunk'


def test_a_closed_latch_names_the_joint_its_limit_the_field_and_the_call_that_opens_it() -> None:
    latch = ClampLatch(1, reset_call='ros2 service call /left/arm/reset std_srvs/srv/Trigger')
    rig = Rig(holding(replan_interval=20), limits=LIMITS)
    rig.executor = WatchedExecutor(rig.config, rig.parameters, latch=latch)
    rig.started()
    result = rig.submit([[0.0, 0.0], [0.1, 0.0]] * 15)
    assert result.refusal is ChunkRefusal.CLAMP_LATCH
    rig.tick()
    status = rig.executor.status()
    for text in (result.text, latch.text, status.detail, status.clamp_latched):
        for words in (
            "'a'",
            '0.1, allowed -1 to 0.05',
            'upper of the robot file',
            '/left/arm/reset',
        ):
            assert words in text, text


@pytest.mark.parametrize('grips', [True, False])
def test_a_gripper_that_closes_beyond_its_limits_does_not_close_the_latch(grips: bool) -> None:
    limit = ColumnLimits(0.0, 0.05, velocity=0.2, tracking_error=np.inf if grips else None)
    limits = make_limits(('a', 'b'), {'a': limit})
    rig = Rig(holding(replan_interval=4), limits=limits, clamp_latch=3).started()
    for index in range(5):
        # Beyond its position, and faster than it may.
        closing = np.linspace(0.05, -0.05, 30) if index % 2 else np.full(30, -0.02)
        rig.submit(np.stack([closing, np.zeros(30)], axis=1))
        rig.tick(16)
    assert rig.executor.latch.closed is not grips
    assert rig.command.setpoints[0] >= 0.0


def test_a_gripper_beside_an_arm_that_is_clamped_does_not_hide_it() -> None:
    grip = ColumnLimits(0.0, 0.05, tracking_error=np.inf)
    limits = make_limits(('a', 'b'), {'a': grip, 'b': ColumnLimits(-1.0, 1.0)})
    rig = Rig(holding(replan_interval=20), limits=limits).started()
    result = rig.submit(np.stack([np.full(30, -9.0), np.linspace(0.0, 1.2, 30)], axis=1))
    assert result.clamped and "'b'" in result.text and "'a'" not in result.text


def test_a_gripper_is_refused_beyond_its_limits_where_the_robot_file_rejects() -> None:
    grip = ColumnLimits(0.0, 0.05, tracking_error=np.inf)
    limits = make_limits(('a', 'b'), {'a': grip}, actions=LimitActions(position='reject'))
    rig = Rig(holding(replan_interval=20), limits=limits).started()
    assert rig.submit(np.full((30, 2), -0.02)).refusal is ChunkRefusal.LIMIT
