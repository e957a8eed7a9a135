"""Faults around the executor node on a real graph: each ends in a hold or in recovery, and the node
says so on `/diagnostics`.

A killed and a frozen policy are in `test_main_job`, joint states that go silent or are renamed in
`test_executor_node`; what follows on wrong, late and repeated messages is tested on the core.
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from executor_bench import HOME, HORIZON, MAX_TRACKING_ERROR, TABLETOP, Bench
from graph import RELIABLE, graph
from network_cut import cable
from paths import ROOT
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import JointState
from std_srvs.srv import Trigger

from vla_runtime.messages.trajectories import ns_to_stamp, stamp_to_ns

pytestmark = pytest.mark.graph

BURST = 500
RISE_RAD = 0.5 * MAX_TRACKING_ERROR / HORIZON
# 3 rad/s in the robot file, for 10 ms; the command of a late tick may go half as far again.
LONGEST_WAY_RAD = 0.045 + 1e-6


@pytest.fixture(scope='module')
def shared(bundle):
    with graph() as made:
        bench = Bench(made, bundle, '/faults')
        yield bench
        bench.arm.close()


@pytest.fixture
def bench(shared):
    shared.arm.positions = HOME.copy()
    shared.begin()
    return shared


def received(status) -> int:
    return int(status['received'])


def accounted(status) -> int:
    """Chunks that were accepted, or refused for a reason that is counted."""
    refused = (int(count) for key, count in status.items() if key.startswith('refused.'))
    return int(status['accepted']) + sum(refused)


def send_burst(bench) -> None:
    """500 chunks, each with a newer observation, as fast as they go.

    The arm hears no command until all are sent: they lead less far than `MAX_TRACKING_ERROR`.
    """
    begin_ns = bench.arm.now_ns()
    for number in range(BURST):
        bench.arm.answer(number, RISE_RAD, stamp_ns=begin_ns + number * 1000)


# ---------------------------------------------------------------- chunks


def test_a_burst_of_chunks_is_counted_whole_and_the_robot_moves_smoothly_on(bench):
    bench.start()
    send_burst(bench)
    # Counted, because on a busy machine the motion may be over before the burst is sent.
    bench.wait_for_status('the end', lambda s: s['kind'] == 'hold' and int(s['steps']) > 0)
    status = bench.wait_for_status('a count', lambda s: received(s) > 1, 'chunks')
    assert received(status) == accounted(status) <= BURST
    # The sentinel, last on the same publisher: it is executed, and none of the burst is any more.
    plans = len(bench.arm.plans)
    bench.graph.wait_for(lambda: len(bench.arm.plans) > plans, 'a new request')
    bench.arm.answer(BURST)
    bench.wait_for_status('recovery', lambda s: s['chunk'] == str(BURST))
    assert bench.arm.longest_way() <= LONGEST_WAY_RAD


# ---------------------------------------------------------------- joint states


def test_joint_states_without_stamps_are_stamped_when_they_are_received(bundle, tmp_path):
    robot = yaml.safe_load(TABLETOP)
    robot['joint_states'] = [{'topic': 'joint_states', 'stamp': 'receive'}]
    path = tmp_path / 'received.yaml'
    path.write_text(yaml.safe_dump(robot), encoding='utf-8')
    with graph() as made:
        bench = Bench(made, bundle, '/received', '-p', f'robot:={path}')
        with closing(bench.arm):
            bench.begin()
            bench.arm.state_ns = lambda: 0
            bench.start()
            # So slowly that the last reading stays within the tracking error until it is too old.
            assert bench.move(rise_rad=0.002)['stamped_when_received']
            bench.arm.silent = True
            # An outage is one all the same.
            bench.wait_for_status('a hold', lambda s: s['reason'] == 'state_stale')


# ---------------------------------------------------------------- the operator


def memory_kib(pid: int) -> int:
    text = Path(f'/proc/{pid}/status').read_text(encoding='ascii')
    return int(text.split('VmRSS:')[1].split()[0])


@pytest.mark.thorough
def test_start_stop_cycles_leave_memory_and_state_as_they_were(bench):
    node, pid = bench.graph.node, bench.process.pid
    bench.start()
    clients = [node.create_client(Trigger, f'{bench.node}/{name}') for name in ('stop', 'start')]
    for client in clients:
        bench.graph.wait_for(client.service_is_ready, 'the services')

    def cycle(count: int) -> None:
        for _ in range(count):
            for client in clients:
                future = client.call_async(Trigger.Request())
                bench.graph.wait_for(future.done, 'an answer')
                assert future.result().success, future.result().message

    cycle(100)
    before_kib, threads = memory_kib(pid), len(list(Path(f'/proc/{pid}/task').iterdir()))
    # 10 KiB a cycle would show.
    cycle(200)
    assert memory_kib(pid) - before_kib < 2 * 1024
    assert len(list(Path(f'/proc/{pid}/task').iterdir())) == threads
    status = bench.wait_for_status('waiting', lambda s: s['reason'] == 'waiting_for_chunk')
    assert status['mode'] == 'running'
    # All that it ever commanded was to stay; the sentinel is the first chunk that moves it.
    assert np.ptp(bench.arm.commanded(), axis=0).max() < 1e-6
    bench.move()
    for client in clients:
        node.destroy_client(client)


# ---------------------------------------------------------------- the simulated clock


class Simulated:
    """A bench under `use_sim_time`, and the clock that the test turns.

    The gripper's commands carry stamps here: the time that the robot is moved by.
    """

    def __init__(self, made, bundle, folder) -> None:
        self.graph = made
        stamped = 'kind: joint_state\n    topic: gripper/commands'
        robot = folder / 'stamped.yaml'
        robot.write_text(
            TABLETOP.replace(
                'kind: float64_multi_array\n    topic: gripper_controller/commands', stamped
            ),
            encoding='utf-8',
        )
        arguments = ('-p', 'use_sim_time:=true', '-p', f'robot:={robot}')
        self.bench = Bench(made, bundle, '/jumping', *arguments)
        self._gripper: list[tuple[int, float]] = []
        made.node.create_subscription(
            JointState, '/jumping/gripper/commands', self._on_gripper, RELIABLE
        )
        self.now = 1_000_000_000_000
        self.bench.arm.now_ns = lambda: self.now
        self._publisher = made.node.create_publisher(Clock, '/clock', 10)
        self._last = time.monotonic()

    def _on_gripper(self, message: JointState) -> None:
        self.bench.arm.positions[5] = message.position[0]
        self._gripper.append((stamp_to_ns(message.header.stamp), message.position[0]))

    def fastest(self) -> float:
        """Fastest motion of the gripper by the stamps, rad/s; infinite for one in no time."""
        stamps, positions = np.array(self._gripper).T
        elapsed_s, ways = np.diff(stamps) * 1e-9, np.abs(np.diff(positions))
        # Where the clock jumped nobody can tell.
        known = (elapsed_s >= 0.0) & (elapsed_s < 10.0) & (ways > 0.0)
        with np.errstate(divide='ignore'):
            return float(np.max(ways[known] / elapsed_s[known]))

    def run(self) -> None:
        """As fast as the wall clock, without its pauses."""
        elapsed, self._last = time.monotonic() - self._last, time.monotonic()
        self.now += round(min(elapsed, 0.1) * 1e9)
        self._publisher.publish(Clock(clock=ns_to_stamp(self.now)))

    def wait_for(self, condition, what: str):
        return self.graph.wait_for(condition, what, meanwhile=self.run)

    def see(self, what: str, holds, condition: str = 'control', meanwhile=lambda: None):
        """A status from now on that fulfils `holds`, while the clock runs."""

        def run() -> None:
            meanwhile()
            self.run()

        return self.bench.wait_for_status(what, holds, condition, meanwhile=run)

    def move(self, number: int) -> None:
        """Answer requests until an answer is executed."""
        plans = self.bench.arm.plans

        def answer() -> None:
            # The next one too: an answer may come while the robot still holds, and is refused.
            if plans:
                self.bench.arm.answer(number)
                plans.clear()

        self.see(
            'motion', lambda s: s['kind'] == 'track' and s['chunk'] == str(number), meanwhile=answer
        )


def test_a_clock_that_jumps_either_way_drops_the_plan_and_motion_goes_on_after_it(bundle, tmp_path):
    with graph() as made:
        sim = Simulated(made, bundle, tmp_path)
        bench = sim.bench
        with closing(bench.arm):
            states = made.node.create_publisher(JointState, '/jumping/joint_states', 10)
            bench.begin()
            sim.wait_for(lambda: bench.call('start').success, 'a start')
            sim.move(0)
            held, counted = 0, 0
            for number, by_s in enumerate((60, -120), start=1):
                before_ns = sim.now
                sim.now += by_s * 1_000_000_000
                status = sim.see(
                    'the jump',
                    lambda s: s['kind'] == 'hold' and int(s.get('holds.clock_jump', 0)) > held,  # noqa: B023
                )
                held = int(status['holds.clock_jump'])
                assert status['chunk'] == '-1'
                # A message of before the jump that comes late must not outlast it.
                late = JointState(name=bench.arm.names, position=bench.arm.positions.tolist())
                late.header.stamp = ns_to_stamp(before_ns)
                states.publish(late)
                if by_s < 0:
                    # Again and again: no tick sees one that is followed by a good one at once.
                    sim.see(
                        'it',
                        lambda s: 'holds.state_from_future' in s,
                        meanwhile=partial(states.publish, late),
                    )
                sim.move(number)
                # Clock messages of before and after it may be seen in turns: several jumps.
                tick = sim.see(
                    'the count',
                    lambda s: int(s['clock_jumps']) > counted,  # noqa: B023
                    'tick',
                )
                counted = int(tick['clock_jumps'])
            assert sim.fastest() <= 3.0 + 1e-3


# ---------------------------------------------------------------- the network


def test_a_policy_that_is_cut_off_is_held_for_and_back_on_the_network_it_goes_on(
    bundle, monkeypatch
):
    script = ROOT / 'test' / 'runtime' / 'nodes' / 'answering_policy.py'
    with cable(monkeypatch) as line, line.process(script) as policy, graph() as made:
        bench = Bench(made, bundle)
        with closing(bench.arm):
            bench.begin()
            bench.start()
            bench.wait_for_status('motion', lambda s: s['kind'] == 'track')
            line.pull()
            status = bench.wait_for_status(
                'a hold that says why',
                lambda s: s['reason'] == 'starved' and 'is the policy node running' in s['text'],
            )
            assert (status['kind'], status['level']) == ('hold', 1)
            # Commands still come, and all of them are the hold.
            bench.wait_for_commands(5)
            assert np.ptp(bench.arm.commanded()[-5:], axis=0).max() == 0.0
            assert policy.poll() is None
            line.plug()
            bench.wait_for_status('motion again', lambda s: s['kind'] == 'track')
            # Nor does a lost chunk hold back those after it.
            for number in range(3):
                with line.lose_what_comes():
                    bench.wait_for_status('no chunk', lambda s: s['reason'] == 'starved')
                asked = len(bench.arm.plans)
                bench.wait_for_status('motion again', lambda s: s['kind'] == 'track')
                # One in 0.1 s. A reliable reader waits for a heartbeat, of which there is one in
                # 3 s; the status comes in 0.2 s.
                assert len(bench.arm.plans) - asked <= 7, f'loss {number}'
