"""`~/pause`, `~/resume` and `~/home` of the node: commands within the limits by their stamps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from executor_bench import TABLETOP
from graph import graph
from stamped_arm import StampedBench
from std_srvs.srv import SetBool

pytestmark = pytest.mark.graph

HOME = np.array([0.0, -0.35, 1.75, 1.74, 0.0])


@pytest.fixture(scope='module')
def shared(bundle: Path) -> Iterator[StampedBench]:
    with graph() as made:
        bench = StampedBench(made, bundle, '/person')
        yield bench
        bench.arm.close()


@pytest.fixture
def bench(shared: StampedBench) -> StampedBench:
    shared.begin()
    return shared


def in_motion(bench: StampedBench) -> None:
    bench.start()
    bench.move(rise_rad=0.004)


def go_home(bench: StampedBench, *, far: bool = False) -> SetBool.Response:
    return bench.graph.call(SetBool, f'{bench.node}/home', SetBool.Request(data=far))


def test_a_pause_answers_at_rest_and_a_resume_lets_the_policy_go_on(bench: StampedBench) -> None:
    in_motion(bench)
    assert bench.call('pause').success
    rested = bench.place()
    status = bench.wait_for_status('the pause', lambda s: s['reason'] == 'paused')
    assert (status['mode'], status['level']) == ('running', 0)
    bench.arm.plans.clear()
    bench.wait_for_stamped(50)
    assert np.abs(bench.place() - rested).max() <= 0.05
    assert bench.arm.plans == [], 'a paused executor asks for nothing'
    assert bench.call('resume').success
    bench.graph.wait_for(lambda: bench.arm.plans, 'a request')
    bench.move(7, rise_rad=0.004)
    bench.assert_within_limits()


def test_home_is_reached_from_a_stop_and_the_robot_is_paused_there(bench: StampedBench) -> None:
    in_motion(bench)
    assert bench.call('stop').success
    bench.stamped.clear()
    bench.graph.wait_for(lambda: go_home(bench).success, 'the way home')
    bench.wait_for_status('being at home', lambda s: s['reason'] == 'paused')
    bench.graph.wait_for(lambda: np.allclose(bench.place(), HOME, atol=0.01), 'the arm at home')
    bench.assert_within_limits()


def test_home_is_refused_where_it_is_far(bench: StampedBench) -> None:
    bench.arm.positions[0] = 1.4
    bench.start()
    answer = go_home(bench)
    assert not answer.success and "'shoulder_pan'" in answer.message
    assert go_home(bench, far=True).success
    bench.wait_for_status('being at home', lambda s: s['reason'] == 'paused')
    bench.graph.wait_for(lambda: abs(bench.place()[0]) <= 0.01, 'the arm at home')
    bench.assert_within_limits()


def test_an_inactive_node_and_one_that_was_not_started_answer(bench: StampedBench) -> None:
    assert not bench.call('pause').success and not bench.call('resume').success
    assert bench.graph.transition(bench.node, 'deactivate')
    assert 'not active' in bench.call('pause').message
    assert 'not active' in go_home(bench).message


def test_the_home_of_the_robot_file_is_what_the_tests_take_it_for() -> None:
    assert 'home: {shoulder_pan: 0.0, shoulder_lift: -0.35, elbow_flex: 1.75' in TABLETOP
