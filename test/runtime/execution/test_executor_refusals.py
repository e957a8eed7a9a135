"""Chunks that are not taken: why, and that the next good one is."""

from __future__ import annotations

import numpy as np
import pytest
from execution_rig import Rig, chunk_of, holding

from vla_runtime.execution.command import ChunkRefusal, CommandKind
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.state import OTHER_CLOCK
from vla_runtime.types import ChunkHeader

SWITCH = HandoverParameters(mode='switch')
FLAT = [0.0] * 20


def rig_of(**changes: object) -> Rig:
    values: dict[str, object] = {'replan_interval': 5, 'handover': SWITCH}
    return Rig(holding(**{**values, **changes})).started()  # type: ignore[arg-type]


def test_when_chunk_is_duplicated_expect_it_dropped() -> None:
    rig = rig_of()
    rig.submit(FLAT, number=3)
    assert rig.submit(FLAT, number=3).refusal is ChunkRefusal.DUPLICATE
    assert rig.executor.counters.refused[ChunkRefusal.DUPLICATE] == 1


def test_when_chunk_is_older_than_the_one_in_force_expect_it_dropped() -> None:
    rig = rig_of()
    rig.submit(FLAT, number=3)
    rig.tick(3)
    older = rig.submit(FLAT, observation_ns=rig.ros_ns - 50_000_000, number=4)
    assert older.refusal is ChunkRefusal.OUT_OF_ORDER and '0.020 s before' in older.text


def test_when_policy_restarts_expect_its_low_numbers_taken_and_its_warm_up_not_counted() -> None:
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


def test_when_chunk_is_of_another_episode_expect_it_dropped() -> None:
    rig = rig_of()
    result = rig.submit(FLAT, episode=2)
    assert result.refusal is ChunkRefusal.OTHER_EPISODE and 'episode 2' in result.text


def test_when_observation_is_too_old_expect_it_dropped() -> None:
    rig = rig_of(max_observation_age_s=0.5)
    observed_ns = rig.ros_ns
    rig.tick(51)
    result = rig.submit(FLAT, observation_ns=observed_ns)
    assert result.refusal is ChunkRefusal.OBSERVATION_TOO_OLD and '0.510 s' in result.text


@pytest.mark.parametrize(
    ('away_s', 'other'), [(-3000, False), (3000, False), (-4000, True), (4000, True)]
)
def test_when_an_observation_is_of_another_clock_expect_that_said(away_s: int, other: bool) -> None:
    rig = rig_of()
    result = rig.submit(FLAT, observation_ns=rig.ros_ns + away_s * 1_000_000_000)
    assert result.text.endswith(f'; {OTHER_CLOCK}') is other


def test_when_observation_is_from_the_future_expect_it_dropped() -> None:
    rig = rig_of()
    result = rig.submit(FLAT, observation_ns=rig.ros_ns + 60_000_000)
    assert result.refusal is ChunkRefusal.OBSERVATION_FROM_FUTURE


def test_when_observation_is_a_little_ahead_expect_it_taken_as_now() -> None:
    rig = rig_of()
    assert rig.submit(FLAT, observation_ns=rig.ros_ns + 5_000_000).join_index == 0


def test_when_observation_is_from_before_the_start_expect_it_dropped() -> None:
    rig = rig_of()
    rig.tick(50)
    rig.executor.stop()
    observed_ns = rig.ros_ns
    rig.tick(30)
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
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
def test_when_chunk_is_wrong_expect_it_refused_whole_and_the_next_one_taken(
    chunk: object, refusal: ChunkRefusal, words: str
) -> None:
    rig = rig_of()
    result = rig.submit(chunk)  # type: ignore[arg-type]
    assert result.refusal is refusal and words in result.text
    assert rig.executor.counters.refused[refusal] == 1
    rig.tick(20)
    assert rig.executed() == []
    assert rig.submit(FLAT).accepted


def test_when_step_time_changes_within_an_episode_expect_refusal_until_reset() -> None:
    rig = rig_of()
    rig.submit(FLAT)
    rig.tick()
    slower = chunk_of(FLAT, step_time_s=0.05)
    assert rig.submit(slower).refusal is ChunkRefusal.WRONG_STEP_TIME
    rig.executor.reset(1)
    rig.tick()
    assert rig.submit(slower).accepted


@pytest.mark.parametrize('rate_hz', [1, 10, 29.97, 30, 50, 60, 120])
def test_when_the_bundle_says_the_step_time_expect_no_other_from_the_first_chunk_on(
    rate_hz: float,
) -> None:
    rig = Rig(holding(replan_interval=5), step_time_s=1.0 / rate_hz).started()
    for wrong in (0.5 / rate_hz, 2.0 / rate_hz, 1.01 / rate_hz):
        result = rig.submit(chunk_of(FLAT, step_time_s=wrong))
        assert result.refusal is ChunkRefusal.WRONG_STEP_TIME
        assert f'{wrong:.9g}' in result.text and f'{1.0 / rate_hz:.9g}' in result.text
    rounded = round(1e9 / rate_hz) * 1e-9
    assert rig.submit(chunk_of(FLAT, step_time_s=rounded)).accepted


def test_when_the_first_chunk_is_refused_expect_its_step_time_not_to_count() -> None:
    rig = rig_of(replan_interval=5)
    too_short = chunk_of([0.0] * 3, step_time_s=0.05)
    assert rig.submit(too_short).refusal is ChunkRefusal.INTERVAL_EXCEEDS_HORIZON
    assert rig.submit(FLAT).accepted
    rig.tick(9)
    assert rig.executor.status().step == 2


def test_when_a_chunk_is_garbage_expect_no_exception() -> None:
    rig = rig_of()
    result = rig.executor.submit_chunk(None, ChunkHeader(0, 0, 0), rig.now_s, rig.ros_ns)  # type: ignore[arg-type]
    assert not result.accepted
    rig.submit(FLAT)
    garbage = rig.executor.submit_chunk(
        'no chunk', ChunkHeader(rig.ros_ns, 0, 9), rig.now_s, rig.ros_ns
    )
    assert not garbage.accepted
    assert rig.tick().kind is CommandKind.TRACK
