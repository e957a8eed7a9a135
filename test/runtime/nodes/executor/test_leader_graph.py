"""A leader arm leads the robot of a real graph: within the limits by the stamps, without a jump."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executor_bench import HOME
from graph import graph, statuses
from leader_arm import LEADER_YAML, LeaderArm
from stamped_arm import StampedBench
from std_srvs.srv import SetBool

from vla_runtime.messages.diagnostics import values_of

pytestmark = pytest.mark.graph
# A busy machine delays messages; what a time-out does is tested on the core.
PATIENT = LEADER_YAML.replace('mode: offset', 'mode: offset\n  timeout_s: 1.0')
BUTTON = PATIENT.replace(
    'mode: offset', 'mode: offset\n  engage: button\n  button: {topic: joy, number: 1}'
)


@pytest.fixture(scope='module')
def shared(bundle: Path) -> Iterator[StampedBench]:
    with graph() as made:
        bench = StampedBench(made, bundle, '/led', BUTTON)
        yield bench
        bench.arm.close()


@pytest.fixture
def bench(shared: StampedBench) -> StampedBench:
    shared.begin()
    return shared


@contextmanager
def leader_of(bench: StampedBench, rate_hz: float, **given: Any) -> Iterator[LeaderArm]:
    leader = LeaderArm(bench.graph, '/led', rate_hz, **given)
    try:
        yield leader
    finally:
        leader.close()


def take_over(bench: StampedBench, *, leads: bool = True) -> SetBool.Response:
    request = SetBool.Request(data=leads)
    return bench.graph.call(SetBool, f'{bench.node}/take_over', request)


def in_motion(bench: StampedBench) -> None:
    bench.start()
    bench.move(rise_rad=0.004)


def leading(status: dict[str, Any]) -> bool:
    return status['driver'] == 'leader' and status['reason'] == 'leading'


def drivers(bench: StampedBench) -> list[tuple[str, str]]:
    """Changes of who drives, oldest first: from whom to whom."""
    found = [values_of(one) for one in statuses(bench.reports, f'{bench.node}: driver')]
    # The same one twice is told again.
    return [(one['before'], one['driver']) for one in found if one['before'] != one['driver']][::-1]


@pytest.mark.parametrize('rate_hz', [10.0, 500.0])
def test_a_leader_half_a_radian_away_takes_over_and_gives_back_without_a_jump(
    bench: StampedBench, rate_hz: float
) -> None:
    with leader_of(bench, rate_hz):
        in_motion(bench)
        bench.graph.wait_for(lambda: take_over(bench).success, 'the leader')
        bench.wait_for_status('the leader', leading)
        before = len(bench.stamped)
        asked = len(bench.arm.plans)
        bench.wait_for_stamped(250)
        led = np.array([place for _, place in bench.stamped[before:]])
        # It follows the motion, and not the distance.
        assert np.ptp(led, axis=0).min() > 0.15
        assert np.abs(led - HOME[:5]).max() < 0.5
        # What the policy would have done is asked for and refused.
        assert len(bench.arm.plans) > asked
        # Chunks are best effort: one may be lost.
        bench.wait_for_status(
            'the refusal',
            lambda s: int(s.get('refused.leading', 0)) > 0,
            'chunks',
            meanwhile=lambda: bench.answer_new(50),
        )
        assert take_over(bench, leads=False).success
        bench.graph.wait_for(lambda: ('leader', 'policy') in drivers(bench), 'the hand-over')
        bench.move(99, rise_rad=0.004)
        bench.assert_within_limits()
        assert ('policy', 'leader') in drivers(bench)


def test_a_leader_that_glitches_moves_nothing(bench: StampedBench) -> None:
    with leader_of(bench, 100.0, away=0.0) as leader:
        leader.wave_rad = 0.0
        bench.start()
        bench.graph.wait_for(lambda: take_over(bench).success, 'the leader')
        bench.wait_for_status('the leader', leading)
        place = bench.place().copy()
        for glitch in (170.0, -1e6, float('nan'), float('inf')):
            leader.glitch = glitch
            bench.wait_for_stamped(60)
        assert np.abs(bench.place() - place).max() <= 1e-6
        bench.wait_for_status('the leader', leading)
        bench.assert_within_limits()


def test_a_leader_that_dies_leaves_the_robot_paused(bench: StampedBench) -> None:
    with leader_of(bench, 100.0) as leader:
        in_motion(bench)
        bench.graph.wait_for(lambda: take_over(bench).success, 'the leader')
        bench.wait_for_status('the leader', leading)
        leader.silent = True
        status = bench.wait_for_status('the pause', lambda s: s['reason'] == 'paused')
        assert status['driver'] == 'nobody' and 'timeout_s' in status['text']
        rested = bench.place().copy()
        bench.wait_for_stamped(100)
        assert np.abs(bench.place() - rested).max() <= 0.05
        bench.assert_within_limits()
        assert not take_over(bench).success
        assert bench.call('resume').success


def test_a_button_that_is_held_leads(bench: StampedBench) -> None:
    with leader_of(bench, 100.0) as leader:
        bench.start()
        # Until somebody hears it.
        bench.wait_for_status('the leader', leading, meanwhile=lambda: leader.press(True))
        bench.wait_for_status(
            'the policy', lambda s: s['driver'] == 'policy', meanwhile=lambda: leader.press(False)
        )
        bench.assert_within_limits()


def test_a_joystick_that_dies_with_its_button_held_leaves_the_robot_paused(
    bench: StampedBench,
) -> None:
    with leader_of(bench, 100.0) as leader:
        bench.start()
        bench.wait_for_status('the leader', leading, meanwhile=lambda: leader.press(True))
        status = bench.wait_for_status('the pause', lambda s: s['reason'] == 'paused')
        assert status['driver'] == 'nobody' and 'joy' in status['text']
        # Held on, it does not lead: the person lets go of it first.
        leader.press(True)
        assert not take_over(bench, leads=False).message.startswith('the policy')
        assert bench.call('resume').success
        bench.wait_for_status('the policy', lambda s: s['driver'] == 'policy')
        bench.assert_within_limits()


def test_who_drives_is_told_again_for_recordings_that_begin_late(bench: StampedBench) -> None:
    with leader_of(bench, 100.0):
        bench.start()
        bench.graph.wait_for(lambda: take_over(bench).success, 'the leader')
        bench.wait_for_status('the leader', leading)
        bench.graph.wait_for(
            lambda: any(
                values_of(one)['driver'] == values_of(one)['before'] == 'leader'
                for one in statuses(bench.reports, f'{bench.node}: driver')
            ),
            'the driver again',
        )


def test_without_a_leader_or_a_start_it_says_why(bench: StampedBench) -> None:
    bench.start()
    refused = take_over(bench)
    assert not refused.success and 'leader' in refused.message
    assert bench.graph.transition(bench.node, 'deactivate')
    assert 'not active' in take_over(bench).message
