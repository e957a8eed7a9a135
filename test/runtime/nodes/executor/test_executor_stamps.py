"""Stamps that jump either way while the executor goes by the steady clock; a way that is blocked.

Without `use_sim_time` no clock of the executor's can be set by a test. What a computer whose clock
was set does to it is what comes in that computer's messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from executor_bench import HOME
from graph import graph
from paths import ROOT
from tabletop_policy import HORIZON
from test_executor_node import Bench

pytestmark = pytest.mark.graph

ROBOT = ROOT / 'config' / 'robots' / 'tabletop.yaml'
MINUTE_NS = 60 * 1_000_000_000


@pytest.fixture(scope='module')
def shared(bundle: Path) -> Iterator[Bench]:
    with graph() as made:
        bench = Bench(made, bundle, '/stamps')
        yield bench
        bench.arm.close()


@pytest.fixture
def bench(shared: Bench) -> Bench:
    shared.begin()
    return shared


def move(bench: Bench, number: int) -> None:
    """Answer the next request, and see it executed."""
    plans = len(bench.arm.plans)
    bench.graph.wait_for(lambda: len(bench.arm.plans) > plans, 'a request')
    bench.move(number)


@pytest.mark.parametrize(
    ('by_ns', 'reason', 'words'),
    [
        (MINUTE_NS, 'state_from_future', "'stamp: receive' in the robot file"),
        (MINUTE_NS, 'state_from_future', "are the computers' clocks synchronised"),
        (-MINUTE_NS, 'state_stale', 'max_state_age_s'),
    ],
)
def test_joint_states_whose_clock_is_set_hold_and_recover_when_it_is_set_back(
    bench: Bench, by_ns: int, reason: str, words: str
) -> None:
    bench.start()
    bench.move()
    true_ns = bench.arm.now_ns
    try:
        bench.arm.now_ns = lambda: true_ns() + by_ns  # type: ignore[method-assign]
        status = bench.wait_for_status('a hold', lambda s: s['reason'] == reason)
        assert (status['kind'], status['level']) == ('hold', 2)
        assert words in status['text']
        # Commands still come, and all of them are the hold.
        bench.wait_for_commands(5)
        assert np.ptp(bench.arm.commanded()[-5:], axis=0).max() == 0.0
    finally:
        del bench.arm.now_ns
    bench.wait_for_status('recovery', lambda s: s['reason'] == 'waiting_for_chunk')
    move(bench, 1)


@pytest.mark.parametrize('by_ns', [None, MINUTE_NS, -MINUTE_NS])
def test_joint_states_that_are_stamped_when_they_are_received(
    bundle: Path, tmp_path: Path, by_ns: int | None
) -> None:
    robot = yaml.safe_load(ROBOT.read_text(encoding='utf-8'))
    for source in robot.setdefault('joint_states', [{'topic': 'joint_states'}]):
        source['stamp'] = 'receive'
    path = tmp_path / 'received.yaml'
    path.write_text(yaml.safe_dump(robot), encoding='utf-8')
    with graph() as made:
        bench = Bench(made, bundle, '/received', '-p', f'robot:={path}')
        true_ns = bench.arm.now_ns
        bench.begin()

        def stamp_ns() -> int:
            return 0 if by_ns is None else true_ns() + by_ns

        bench.arm.state_ns = stamp_ns  # type: ignore[method-assign]
        bench.start()
        # So slowly that the last reading stays within the tracking error until it is too old.
        status = bench.move(rise_rad=0.002)
        assert status['stamped_when_received']
        bench.arm.silent = True
        # An outage is one all the same.
        bench.wait_for_status('a hold', lambda s: s['reason'] == 'state_stale')
        bench.arm.close()


def test_chunks_whose_clock_is_set_are_refused_and_the_next_good_one_moves_on(
    bench: Bench,
) -> None:
    bench.start()
    for number, (by_ns, refusal) in enumerate(
        ((MINUTE_NS, 'observation_from_future'), (-MINUTE_NS, 'observation_too_old'))
    ):
        bench.arm.answer(number, stamp_ns=bench.arm.now_ns() + by_ns)
        status = bench.wait_for_status(
            'the refusal',
            lambda s, refusal=refusal: s.get(f'refused.{refusal}') == '1',  # type: ignore[misc]
            'chunks',
        )
        assert (status['accepted'], status['level']) == ('0', 1)
    # The sentinel: the first command that is more than the hold is that of the good chunk.
    assert np.ptp(bench.arm.commanded(), axis=0).max() < 1e-6
    bench.move(2)


def test_a_blocked_joint_ends_in_a_hold_that_says_so_and_gives_way(
    bundle: Path, tmp_path: Path
) -> None:
    robot = yaml.safe_load(ROBOT.read_text(encoding='utf-8'))
    for joint in robot['joints']:
        joint['max_step'] = 0.05
    # Long enough for the way in steps of 0.05 rad, each of which waits for a joint state.
    robot['start'] = {'tolerance': 0.1, 'approach_speed': 1.0, 'approach_timeout_s': 30.0}
    path = tmp_path / 'blocked.yaml'
    path.write_text(yaml.safe_dump(robot), encoding='utf-8')
    with graph() as made:
        bench = Bench(made, bundle, '/blocked', '-p', f'robot:={path}')
        bench.begin()
        bench.start()
        bench.arm.follows = False
        # One joint alone: where several are pulled and none moves, the robot does not follow.
        far = HOME + np.array([0.0, 0.4, 0.0, 0.0, 0.0, 0.0])
        bench.arm.answer(0, actions=np.tile(far, (HORIZON, 1)))
        status = bench.wait_for_status('a hold', lambda s: s['reason'] == 'tracking_error')
        assert (status['kind'], status['mode'], status['level']) == ('hold', 'stopped', 2)
        assert 'is blocked' in status['text'] and 'blocked_after_s' in status['text']
        pressed = np.abs(bench.arm.commanded() - HOME[:5])
        assert 0.045 - 1e-6 <= pressed.max() <= 0.05 + 1e-6
        made.wait_for(
            lambda: np.allclose(bench.arm.commanded()[-1], HOME[:5], atol=0.003),
            'a hold near the robot',
        )
        bench.arm.follows = True
        bench.start()
        bench.arm.answer(1, actions=np.tile(far, (HORIZON, 1)))
        answered = len(bench.arm.plans)

        def answer_requests() -> None:
            """A request from before the approach may still come; one after it is answered too."""
            nonlocal answered
            if len(bench.arm.plans) > answered:
                answered = len(bench.arm.plans)
                bench.arm.answer(1 + answered)

        bench.diagnostics.clear()
        made.wait_for(
            lambda: (status := bench.status()) and status['kind'] == 'track',
            'motion',
            meanwhile=answer_requests,
        )
        bench.arm.close()
