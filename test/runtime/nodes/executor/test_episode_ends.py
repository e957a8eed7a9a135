"""An episode ends by a person's verdict or by its time limit; the next one begins with a resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from executor_bench import Bench
from graph import graph, statuses
from std_srvs.srv import SetBool

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import message_to_plan

pytestmark = pytest.mark.graph


@pytest.fixture(scope='module')
def shared(bundle: Path) -> Iterator[Bench]:
    with graph() as made:
        bench = Bench(made, bundle, '/episodes')
        yield bench
        bench.arm.close()


@pytest.fixture
def bench(shared: Bench) -> Bench:
    shared.begin()
    return shared


def verdicts(bench: Bench) -> list[dict[str, Any]]:
    """Verdicts on `~/report`, oldest first."""
    found = statuses(bench.reports, f'{bench.node}: instruction')
    return [{**values_of(one), 'level': one.level[0]} for one in found][::-1]


def verdict(bench: Bench, count: int = 1) -> dict[str, Any]:
    bench.graph.wait_for(lambda: len(verdicts(bench)) >= count, f'verdict {count}')
    return verdicts(bench)[count - 1]


def episode_of_requests(bench: Bench) -> int:
    bench.arm.plans.clear()
    bench.graph.wait_for(lambda: bench.arm.plans, 'a request')
    return message_to_plan(bench.arm.plans[-1]).episode


@pytest.mark.parametrize(('outcome', 'level'), [('success', 0), ('failure', 1)])
def test_a_verdict_is_reported_once_and_leaves_the_robot_paused(
    bench: Bench, outcome: str, level: int
) -> None:
    bench.start()
    bench.move(rise_rad=0.004)
    number = message_to_plan(bench.arm.plans[-1]).episode
    assert bench.call(outcome).success
    said = verdict(bench)
    assert (said['outcome'], said['level'], said['episode']) == (outcome, level, str(number))
    status = bench.wait_for_status('the pause', lambda s: s['reason'] == 'paused')
    assert outcome in status['text']
    again = bench.call('failure')
    assert not again.success and str(number) in again.message
    assert bench.call('resume').success
    assert episode_of_requests(bench) == number + 1
    assert bench.call('failure').success
    assert verdict(bench, 2)['episode'] == str(number + 1)


def test_the_time_limit_counts_what_was_driven_and_ends_the_episode_as_a_failure(
    bench: Bench,
) -> None:
    bench.start()
    assert bench.call('pause').success
    # In a pause no time passes: five statuses are longer than the limit.
    assert bench.graph.set_parameter(bench.node, 'episode_time_limit_s', 0.4).successful
    try:
        bench.diagnostics.clear()
        bench.graph.wait_for(lambda: len(list(bench.statuses())) >= 5, 'five statuses')
        assert verdicts(bench) == []
        assert bench.call('resume').success
        said = verdict(bench)
        assert (said['outcome'], said['level']) == ('time_limit', 1)
        assert 0.4 <= float(said['time_s']) < 1.0
        bench.wait_for_status('the pause', lambda s: s['reason'] == 'paused')
    finally:
        assert bench.graph.set_parameter(bench.node, 'episode_time_limit_s', 0.0).successful


def test_a_stop_goes_on_in_the_same_episode_and_a_start_after_a_verdict_in_the_next(
    bench: Bench,
) -> None:
    bench.start()
    number = message_to_plan(bench.arm.plans[-1]).episode
    assert bench.call('stop').success
    assert bench.call('success').success, 'a stopped robot can be judged'
    bench.start()
    assert episode_of_requests(bench) == number + 1


def test_an_episode_in_which_the_robot_was_sent_home_can_be_judged_until_the_next_begins(
    bench: Bench,
) -> None:
    bench.start()
    number = message_to_plan(bench.arm.plans[-1]).episode
    for judged in (True, False):
        answer = bench.graph.call(SetBool, f'{bench.node}/home', SetBool.Request())
        assert answer.success, answer.message
        bench.wait_for_status('being at home', lambda s: s['reason'] == 'paused')
        if judged:
            assert bench.call('success').success
            assert verdict(bench)['episode'] == str(number)
        assert bench.call('resume').success
        number += 1
        assert episode_of_requests(bench) == number


def test_without_a_start_there_is_nothing_to_judge(bench: Bench) -> None:
    assert not bench.call('success').success
    assert bench.graph.transition(bench.node, 'deactivate')
    assert not bench.call('failure').success
    assert verdicts(bench) == []
