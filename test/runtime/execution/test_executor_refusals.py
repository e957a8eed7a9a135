"""Chunks that are not taken: why, and that the next good one is; the latch on clamping."""

import numpy as np
import pytest
from execution_rig import SWITCH, Rig, chunk_of, holding
from watched_executor import WatchedExecutor

from vla_runtime.execution.command import ChunkRefusal, CommandKind
from vla_runtime.execution.guard import ClampLatch
from vla_runtime.execution.limits import ColumnLimits, LimitActions, make_limits
from vla_runtime.execution.state import OTHER_CLOCK
from vla_runtime.types import ChunkHeader

FLAT = [0.0] * 20


def rig_of(**changes: object) -> Rig:
    values: dict[str, object] = {'replan_interval': 5, 'handover': SWITCH}
    return Rig(holding(**{**values, **changes})).started()


@pytest.mark.parametrize(
    ('first', 'ticks', 'back_ms', 'given', 'refusal', 'words'),
    [
        (True, 0, 0, {'number': 3}, ChunkRefusal.DUPLICATE, ''),
        (True, 3, 50, {}, ChunkRefusal.OUT_OF_ORDER, '0.020 s before'),
        (False, 0, 0, {'episode': 2}, ChunkRefusal.OTHER_EPISODE, 'episode 2'),
        (False, 51, 510, {}, ChunkRefusal.OBSERVATION_TOO_OLD, '0.510 s'),
        (False, 0, -60, {}, ChunkRefusal.OBSERVATION_FROM_FUTURE, ''),
    ],
)
def test_a_chunk_that_is_not_due_is_dropped(first, ticks, back_ms, given, refusal, words):
    rig = rig_of(max_observation_age_s=0.5)
    if first:
        rig.submit(FLAT, number=3)
    rig.tick(ticks)
    result = rig.submit(FLAT, rig.ros_ns - back_ms * 1_000_000, **given)
    assert result.refusal is refusal and words in result.text
    assert rig.executor.counters.refused[refusal] == 1


def test_when_policy_restarts_expect_its_low_numbers_taken_and_its_warm_up_not_counted():
    rig = rig_of()
    for number in (40, 41):
        rig.tick(4)
        assert rig.submit(FLAT, number=number).accepted
    rig.tick(8)
    observed_ns = rig.ros_ns - 10_000_000
    rig.tick(7)
    assert rig.submit(FLAT, number=1, observation_ns=observed_ns).accepted
    assert rig.executor.counters.policy_restarts == 1
    assert rig.executor.status().delay_estimate == 1


@pytest.mark.parametrize(
    ('away_s', 'other'), [(-3000, False), (3000, False), (-4000, True), (4000, True)]
)
def test_when_an_observation_is_of_another_clock_expect_that_said(away_s, other):
    rig = rig_of()
    result = rig.submit(FLAT, observation_ns=rig.ros_ns + away_s * 1_000_000_000)
    assert result.text.endswith(f'; {OTHER_CLOCK}') is other


def test_when_observation_is_a_little_ahead_expect_it_taken_as_now():
    rig = rig_of()
    assert rig.submit(FLAT, observation_ns=rig.ros_ns + 5_000_000).join_index == 0


def test_when_observation_is_from_before_the_start_expect_it_dropped():
    rig = rig_of()
    rig.tick(50)
    rig.executor.stop()
    observed_ns = rig.ros_ns
    rig.tick(30)
    assert rig.start().started
    assert rig.submit(FLAT, observed_ns).refusal is ChunkRefusal.OBSERVATION_UNKNOWN


@pytest.mark.parametrize(
    ('chunk', 'refusal', 'words'),
    [
        (chunk_of([[0.0, np.nan]] * 9), ChunkRefusal.NOT_FINITE, "'b' in row 0 is nan"),
        (chunk_of([[0.0, np.inf]] * 9), ChunkRefusal.NOT_FINITE, 'inf'),
        (chunk_of([[0.0, 0.0]] * 9, ('a', 'c')), ChunkRefusal.WRONG_JOINTS, "missing ['b']"),
        (chunk_of([[0.0] * 3] * 9, ('a', 'b', 'c')), ChunkRefusal.WRONG_JOINTS, "unknown ['c']"),
        (chunk_of([[0.0] * 3] * 9, ('a', 'b', 'b')), ChunkRefusal.WRONG_JOINTS, "repeated ['b']"),
        (
            chunk_of([[0.0, 0.0]] * 9, kinds=('position', 'velocity')),
            ChunkRefusal.WRONG_JOINTS,
            "'b' as velocity",
        ),
        (chunk_of([[0.0, 0.0]] * 9, kinds=('position',)), ChunkRefusal.MALFORMED, '1 kinds'),
        (chunk_of([[0.0] * 3] * 9), ChunkRefusal.MALFORMED, 'shape'),
        (chunk_of(np.zeros((0, 2))), ChunkRefusal.MALFORMED, 'shape'),
        (chunk_of([[0.0, 0.0]] * 9, step_time_s=0.0), ChunkRefusal.WRONG_STEP_TIME, '0.001'),
        (chunk_of([[0.0, 0.0]] * 9, step_time_s=np.nan), ChunkRefusal.WRONG_STEP_TIME, 'nan'),
    ],
)
def test_when_chunk_is_wrong_expect_it_refused_whole_and_the_next_one_taken(chunk, refusal, words):
    rig = rig_of()
    result = rig.submit(chunk)
    assert result.refusal is refusal and words in result.text
    assert rig.executor.counters.refused[refusal] == 1
    rig.tick(20)
    assert rig.executed() == []
    assert rig.submit(FLAT).accepted


def test_when_step_time_changes_within_an_episode_expect_refusal_until_reset():
    rig = rig_of()
    rig.submit(FLAT)
    rig.tick()
    slower = chunk_of(FLAT, step_time_s=0.05)
    assert rig.submit(slower).refusal is ChunkRefusal.WRONG_STEP_TIME
    rig.executor.reset(1)
    rig.tick()
    assert rig.submit(slower).accepted


@pytest.mark.parametrize('rate_hz', [1, 10, 29.97, 30, 50, 60, 120])
def test_when_the_bundle_says_the_step_time_expect_no_other_from_the_first_chunk_on(rate_hz):
    rig = Rig(holding(replan_interval=5), step_time_s=1.0 / rate_hz).started()
    for wrong in (0.5 / rate_hz, 2.0 / rate_hz, 1.01 / rate_hz):
        result = rig.submit(chunk_of(FLAT, step_time_s=wrong))
        assert result.refusal is ChunkRefusal.WRONG_STEP_TIME
        assert f'{wrong:.9g}' in result.text and f'{1.0 / rate_hz:.9g}' in result.text
    rounded = round(1e9 / rate_hz) * 1e-9
    assert rig.submit(chunk_of(FLAT, step_time_s=rounded)).accepted


def test_when_the_first_chunk_is_refused_expect_its_step_time_not_to_count():
    rig = rig_of(replan_interval=5)
    too_short = chunk_of([0.0] * 3, step_time_s=0.05)
    assert rig.submit(too_short).refusal is ChunkRefusal.INTERVAL_EXCEEDS_HORIZON
    assert rig.submit(FLAT).accepted
    rig.tick(9)
    assert rig.executor.status().step == 2


def test_when_a_chunk_is_garbage_expect_no_exception():
    rig = rig_of()
    result = rig.offer(None, ChunkHeader(0, 0, 0))
    assert not result.accepted
    rig.submit(FLAT)
    garbage = rig.offer('no chunk', ChunkHeader(rig.ros_ns, 0, 9))
    assert not garbage.accepted
    assert rig.tick().kind is CommandKind.TRACK


# --- The latch closes on repeated clamping, and only the operator opens it

LIMITS = make_limits(('a', 'b'), {'a': ColumnLimits(-1, 0.05)})


def closed_rig() -> Rig:
    rig, results = Rig(holding(replan_interval=20), limits=LIMITS, clamp_latch=3).started(), []
    for _ in range(3):
        results.append(rig.submit([0.1] * 30))
        rig.tick(4)
    assert [result.accepted for result in results] == [True, True, False]
    assert results[0].clamped and 'position' in results[0].text
    assert results[2].refusal is ChunkRefusal.CLAMP_LATCH
    assert rig.command.kind is CommandKind.HOLD and rig.reason == 'clamp_latch'
    return rig


def test_when_as_many_in_a_row_as_allowed_expect_closed_until_opened():
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


def test_when_zero_are_allowed_expect_it_never_to_close():
    latch = ClampLatch(0)
    for _ in range(1000):
        latch.count('a')
    assert not latch.closed


def test_when_an_episode_begins_without_a_reset_expect_it_still_closed():
    rig = closed_rig()
    rig.executor.begin_episode(1)
    rig.tick()
    assert rig.reason == 'clamp_latch'
    assert rig.submit([0.0] * 30).refusal is ChunkRefusal.CLAMP_LATCH
    rig.executor.reset(2)
    rig.tick()
    assert rig.submit([0.0] * 30).accepted
    assert rig.tick().kind is CommandKind.TRACK


def test_when_a_new_executor_is_given_a_closed_latch_expect_no_start_before_the_reset():
    latch = closed_rig().executor.latch
    rig = Rig(holding(replan_interval=20), limits=LIMITS, clamp_latch=3)
    rig.executor = WatchedExecutor(rig.config, rig.parameters, latch=latch)
    rig.tick(2)
    result = rig.start()
    assert not result.started and '3 chunks in a row' in result.text
    assert rig.executor.status().clamp_latched
    assert not rig.executor.wants_chunk
    assert rig.tick().kind is CommandKind.IDLE
    rig.executor.reset(1)
    rig.started()
    assert rig.reason == 'waiting_for_chunk'


def test_a_closed_latch_names_the_joint_its_limit_the_field_and_the_call_that_opens_it():
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
def test_a_gripper_that_closes_beyond_its_limits_does_not_close_the_latch(grips):
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


def test_a_gripper_beside_an_arm_that_is_clamped_does_not_hide_it():
    grip = ColumnLimits(0.0, 0.05, tracking_error=np.inf)
    limits = make_limits(('a', 'b'), {'a': grip, 'b': ColumnLimits(-1.0, 1.0)})
    rig = Rig(holding(replan_interval=20), limits=limits).started()
    result = rig.submit(np.stack([np.full(30, -9.0), np.linspace(0.0, 1.2, 30)], axis=1))
    assert result.clamped and "'b'" in result.text and "'a'" not in result.text


def test_a_gripper_is_refused_beyond_its_limits_where_the_robot_file_rejects():
    grip = ColumnLimits(0.0, 0.05, tracking_error=np.inf)
    limits = make_limits(('a', 'b'), {'a': grip}, actions=LimitActions(position='reject'))
    rig = Rig(holding(replan_interval=20), limits=limits).started()
    assert rig.submit(np.full((30, 2), -0.02)).refusal is ChunkRefusal.LIMIT
