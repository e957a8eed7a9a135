"""The executor node as a process on a real graph: its commands, their times, and its status."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray
from executor_bench import Arm
from graph import Graph, graph
from paths import ROOT
from rosgraph_msgs.msg import Clock
from std_srvs.srv import Trigger
from tabletop_policy import HORIZON, STEP_TIME_S

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import ns_to_stamp

pytestmark = pytest.mark.graph

NODE = '/vla_executor'
MODULE = 'vla_runtime.nodes.executor.node'
TABLETOP = ROOT / 'config' / 'robots' / 'tabletop.yaml'
# A busy machine must not look like a fault here; what the limits do is tested on the core.
PATIENT = {'max_state_age_s': 1.0, 'tick_timeout_s': 1.0, 'clock_jump_s': 5.0}
# Nor an outage that needs a person's start; those are in `test_stopped_robot_stays`.
PATIENT_ROBOT = f'{TABLETOP.read_text(encoding="utf-8")}\nrestart_after_outage_s: 600.0\n'
# Below the robot file's max_step of 0.5 rad, which would keep the command near by itself.
MAX_TRACKING_ERROR = 0.3


def start(made: Graph, bundle, *arguments, name=None):
    robot = bundle.parent / 'patient.yaml'
    robot.write_text(PATIENT_ROBOT, encoding='utf-8')
    parameters = {
        'bundle': bundle,
        'robot': robot,
        'replan_interval': 8,
        'max_tracking_error': MAX_TRACKING_ERROR,
        **PATIENT,
    }
    pairs = [f'{key}:={value}' for key, value in parameters.items()]
    return made.start(
        MODULE,
        '--ros-args',
        *(word for pair in pairs for word in ('-p', pair)),
        *arguments,
        name=name,
    )


class Bench:
    """One executor, the arm that it moves, and its status.

    The one that most tests share has no namespace; all others need one of their own.
    """

    def __init__(self, made: Graph, bundle, namespace: str = '', *arguments) -> None:
        self.graph = made
        self.node = f'{namespace}{NODE}'
        remap = ('-r', f'__ns:={namespace}') if namespace else ()
        self.process = start(made, bundle, *remap, *arguments, name=self.node)
        self.diagnostics = made.collect(DiagnosticArray, '/diagnostics')
        self.arm = Arm(made, namespace)
        self._answered = None

    def begin(self) -> None:
        """Configured, active and started, with nothing left of the test before."""
        if self.graph.state(self.node) == 'active':
            assert self.graph.transition(self.node, 'deactivate')
        if self.graph.state(self.node) == 'unconfigured':
            assert self.graph.transition(self.node, 'configure')
        self.arm.heal()
        self.arm.go_home()
        self.arm.commands.clear()
        self.arm.plans.clear()
        assert self.graph.transition(self.node, 'activate')

    def start(self) -> None:
        self.graph.wait_for(lambda: self.call('start').success, 'a start')
        self.graph.wait_for(lambda: self.arm.plans, 'a request')

    def answer_new(self, number: int = 0, **changes) -> None:
        """Answer the newest request, once; for motion that does not end during a wait."""
        newest = self.arm.plans[-1]
        if newest is not self._answered:
            self._answered = newest
            self.arm.answer(number, **changes)

    def move(self, number: int = 0, **changes):
        """Answer until a status tells of it: one chunk lasts for three statuses at most."""
        return self.wait_for_status(
            'motion',
            lambda s: s['kind'] == 'track' and s['chunk'] == str(number),
            meanwhile=lambda: self.answer_new(number, **changes),
        )

    def call(self, service: str):
        return self.graph.call(Trigger, f'{self.node}/{service}', Trigger.Request())

    def statuses(self, condition: str = 'control'):
        """Statuses of a condition, newest first: their values, with `text` and `level`."""
        wanted = f'{self.node}: {condition}'
        for message in reversed(list(self.diagnostics)):
            for status in message.status:
                if status.name == wanted:
                    yield {
                        **values_of(status),
                        'text': status.message,
                        'level': status.level[0],
                    }

    def status(self, condition: str = 'control'):
        """The newest of them; None before the first."""
        return next(self.statuses(condition), None)

    def wait_for_status(self, what: str, holds, condition: str = 'control', meanwhile=None):
        """Wait until a status that comes from now on fulfils `holds`; returns it."""
        self.diagnostics.clear()
        return self.graph.wait_for(
            lambda: next(filter(holds, self.statuses(condition)), None), what, meanwhile=meanwhile
        )

    def wait_for_commands(self, count: int) -> None:
        """Wait until so many more commands have come."""
        target = len(self.arm.commands) + count
        self.graph.wait_for(lambda: len(self.arm.commands) >= target, f'{count} more commands')


@pytest.fixture(scope='module')
def shared(bundle):
    with graph() as made:
        bench = Bench(made, bundle)
        yield bench
        bench.arm.close()


@pytest.fixture
def bench(shared):
    shared.begin()
    return shared


def test_nothing_is_commanded_before_start_and_then_the_measured_position(bench):
    status = bench.wait_for_status('a status', lambda s: s['mode'] == 'idle')
    assert (status['reason'], status['sent']) == ('not_started', '0')
    bench.start()
    # The first message that this publisher ever sent since its activation.
    bench.graph.wait_for(lambda: bench.arm.commands, 'a command')
    assert np.allclose(bench.arm.commanded()[0], bench.arm.positions[:5], atol=1e-6)


def test_start_without_joint_states_says_what_is_missing(bench):
    bench.arm.silent = True
    assert bench.graph.transition(bench.node, 'deactivate')
    assert bench.graph.transition(bench.node, 'activate')
    response = bench.call('start')
    assert not response.success
    assert 'shoulder_pan' in response.message
    assert not bench.arm.commands


def test_an_empty_plan_asks_first_and_the_chunk_is_executed(bench):
    bench.start()
    assert not bench.arm.plans[0].points
    before = bench.arm.positions.copy()
    bench.arm.answer(0)
    bench.wait_for_status('the end of its steps', lambda s: s['reason'] == 'starved')
    # S steps, and the configured overrun of 4, of 0.02 rad each; then it holds.
    commanded = bench.arm.commanded()
    assert np.allclose(commanded[-1], before[:5] + 0.02 * 12, atol=0.02)
    rises = np.diff(commanded, axis=0)
    assert (rises > -1e-6).all()
    # Four steps in one command: a tick that was 0.2 s late.
    assert rises.max() < 0.08


def test_requests_carry_the_plan_while_the_robot_moves(bench):
    bench.start()
    bench.arm.answer(0)
    # The first one is sent again, as empty as it was, until its answer is there.
    plan = bench.graph.wait_for(
        lambda: next((plan for plan in list(bench.arm.plans) if plan.points), None),
        'a second request',
    )
    assert plan.header.frame_id.startswith('plan episode=')
    assert list(plan.joint_names) == list(bench.arm.names)


def test_replan_interval_changes_while_it_runs_and_is_reported(bench):
    bench.start()
    bench.arm.answer(0)
    bench.wait_for_status('S = 8', lambda s: s['replan_interval'] == '8')
    assert bench.graph.set_parameter(bench.node, 'replan_interval', 3).successful
    bench.wait_for_status('a hold', lambda s: s['reason'] == 'starved')
    bench.arm.answer(1)
    bench.wait_for_status('S = 3', lambda s: s['replan_interval'] == '3')
    assert bench.graph.set_parameter(bench.node, 'replan_interval', 8).successful


@pytest.mark.parametrize(
    ('name', 'value', 'said'),
    [
        ('replan_interval', 0, 'Min: 1'),
        ('replan_interval', HORIZON + 1, f'between 1 and {HORIZON}'),
        ('handover_mode', 'jump', 'switch, blend, ensemble, rtc'),
        ('ensemble_decay', -1.0, 'Min: 0'),
        ('use_sim_time', True, 'deactivate it first'),
    ],
)
def test_a_value_that_cannot_be_taken_is_refused_with_the_reason(bench, name, value, said):
    result = bench.graph.set_parameter(bench.node, name, value)
    assert not result.successful
    assert said in result.reason


def test_a_silent_policy_is_held_for_and_named(bench):
    bench.start()
    bench.move()
    status = bench.wait_for_status(
        'a hold that says why',
        lambda s: s['reason'] == 'starved' and 'without an answer' in s['text'],
    )
    assert status['level'] == 1
    bench.wait_for_commands(5)
    assert np.ptp(bench.arm.commanded()[-5:], axis=0).max() == 0.0


def test_an_approach_says_which_joint_has_how_far_to_go_and_blames_nobody(bench):
    bench.start()
    far = bench.arm.positions.copy()
    far[2] -= 0.9
    bench.arm.answer(0, actions=np.tile(far, (HORIZON, 1)))
    words = "approaching at the set speed: 'elbow_flex' has 0."
    status = bench.wait_for_status('the approach', lambda s: words in s['text'])
    assert (status['level'], status['kind']) == (0, 'approach')
    assert "; 'elbow_flex' would start at" in status['text']
    count = len(bench.arm.plans)
    assert 'asked' not in status['text']
    bench.graph.wait_for(lambda: len(bench.arm.plans) > count, 'a request after the approach')
    # The chunk that it approached was an answer; what is open now was asked just now.
    status = bench.wait_for_status('the wait', lambda s: s['reason'] == 'waiting_for_chunk')
    assert status['text'] == 'holding: waiting for the first chunk'
    assert status['level'] == 0


def test_a_bad_chunk_is_refused_whole_and_said(bench):
    bench.start()
    actions = np.tile(bench.arm.positions, (HORIZON, 1))
    actions[3, 2] = np.nan
    bench.arm.answer(0, actions=actions)
    status = bench.wait_for_status(
        'the refusal', lambda s: s['text'].count('elbow_flex') == 1, 'chunks'
    )
    assert status['accepted'] == '0'
    assert status['refused.not_finite'] == '1'
    bench.graph.wait_for(lambda: len(bench.arm.plans) >= 2, 'another request')


def test_a_chunk_longer_than_the_horizon_is_not_even_read(bench):
    bench.start()
    bench.arm.answer(0, actions=np.tile(bench.arm.positions, (HORIZON + 1, 1)))
    status = bench.wait_for_status('the refusal', lambda s: s['unreadable'] == '1', 'chunks')
    assert status['accepted'] == '0'
    bench.graph.wait_for(lambda: len(bench.arm.plans) >= 2, 'another request')


def test_joint_states_that_stop_or_lose_a_name_hold_and_recover(bench):
    bench.start()
    # So slowly that the last reading stays within the tracking error until it is too old.
    bench.arm.answer(0, rise_rad=0.002)
    bench.arm.silent = True
    status = bench.wait_for_status('a hold', lambda s: s['reason'] == 'state_stale')
    assert status['level'] == 2
    assert 'max_state_age_s' in status['text']
    bench.arm.silent = False
    bench.arm.names = ['shoulder_pin', *bench.arm.names[1:]]
    status = bench.wait_for_status('a hold', lambda s: "'shoulder_pan'" in s['text'])
    bench.arm.heal()
    bench.wait_for_status('recovery', lambda s: s['reason'] == 'waiting_for_chunk')
    plans = len(bench.arm.plans)
    bench.graph.wait_for(lambda: len(bench.arm.plans) > plans, 'a new request')
    bench.move(5)


def test_a_measured_position_that_is_no_number_holds_and_recovers(bench):
    bench.start()
    bench.move()
    bench.arm.follows = False
    positions, bench.arm.positions = bench.arm.positions, np.full(6, np.nan)
    status = bench.wait_for_status('a hold', lambda s: s['reason'] == 'state_not_finite')
    assert status['level'] == 2
    bench.arm.positions = positions
    bench.wait_for_status('recovery', lambda s: s['reason'] == 'waiting_for_chunk')


def test_a_robot_that_jumps_and_stays_there_is_not_dragged_back_and_needs_a_start(bench):
    bench.start()
    bench.move()
    bench.arm.follows = False
    bench.arm.positions = bench.arm.positions + np.array([0.6, 0.0, 0.0, 0.0, 0.0, 0.0])
    # No motion of the joint explains it, so it moves nothing.
    status = bench.wait_for_status('a stop', lambda s: s['mode'] == 'stopped')
    assert status['reason'] == 'state_implausible'
    # A person is asked once; then the command comes there slowly.
    assert not bench.call('start').success
    assert bench.call('start').success
    bench.graph.wait_for(
        lambda: np.allclose(bench.arm.commanded()[-1], bench.arm.positions[:5], atol=0.05),
        'commands near the robot',
    )
    assert np.abs(np.diff(bench.arm.commanded()[:, 0])).max() < 0.1, 'the command must not jump'


def test_a_burst_of_the_same_chunk_is_executed_once(bench):
    bench.start()
    before = bench.arm.positions.copy()
    message = bench.arm.answer(0)
    for _ in range(20):
        bench.arm.send(message)
    # A queue of ten may drop some of them, never the first.
    status = bench.wait_for_status(
        'the duplicates', lambda s: int(s.get('refused.duplicate', 0)) >= 5, 'chunks'
    )
    assert status['accepted'] == '1'
    bench.wait_for_status('the end', lambda s: s['reason'] == 'starved')
    assert np.allclose(bench.arm.commanded()[-1], before[:5] + 0.02 * 12, atol=0.02)


def test_chunks_out_of_order_are_dropped_and_counted(bench):
    bench.start()
    newest = bench.arm.now_ns()
    bench.arm.answer(1, stamp_ns=newest)
    bench.arm.answer(0, stamp_ns=newest - 30_000_000)
    status = bench.wait_for_status('both', lambda s: s['received'] == '2', 'chunks')
    assert (status['accepted'], status['refused.out_of_order']) == ('1', '1')


def test_a_robot_that_does_not_follow_is_not_pushed_on(bench):
    bench.start()
    bench.arm.follows = False
    bench.arm.answer(0, rise_rad=0.1)
    status = bench.wait_for_status('a stop', lambda s: s['reason'] == 'tracking_error')
    assert status['mode'] == 'stopped'
    assert 'max_tracking_error' in status['text']


def test_a_robot_that_does_not_follow_a_slow_plan_is_left_sooner(bench):
    bench.start()
    bench.arm.follows = False
    begin_s = time.monotonic()

    def go_on() -> None:
        """0.05 rad/s, on and on: one chunk would end 0.1 s after the robot may be left."""
        ahead_s = time.monotonic() - begin_s + STEP_TIME_S * np.arange(1, HORIZON + 1)
        bench.answer_new(actions=bench.arm.positions + 0.05 * ahead_s[:, None])

    status = bench.wait_for_status(
        'a stop', lambda s: s['reason'] == 'tracking_error', meanwhile=go_on
    )
    assert status['mode'] == 'stopped'
    assert 'does not follow' in status['text']
    lead = np.abs(bench.arm.commanded() - bench.arm.positions[:5])
    assert lead.max() < MAX_TRACKING_ERROR


def test_stop_holds_and_start_goes_on_from_there(bench):
    bench.start()
    bench.move()
    assert bench.call('stop').success
    bench.wait_for_status('the stop', lambda s: s['reason'] == 'stopped')
    # It is sent for half a second and no longer: look at what came, wait for nothing more.
    bench.graph.wait_for(
        lambda: not np.ptp(bench.arm.commanded()[-4:], axis=0).any(), 'a hold, sent repeatedly'
    )
    held = bench.arm.commanded()[-1]
    bench.start()
    bench.wait_for_commands(2)
    assert np.allclose(bench.arm.commanded()[-1], held, atol=0.05)


def test_deactivation_sends_the_hold_last_and_then_nothing(bench):
    bench.start()
    bench.move()
    assert bench.graph.transition(bench.node, 'deactivate')
    # The sentinel: a status of the same node, sent after the deactivation.
    bench.wait_for_status('the sentinel', lambda s: s['mode'] == 'inactive')
    commanded = bench.arm.commanded()
    assert np.array_equal(commanded[-1], commanded[-2])
    count = len(commanded)
    bench.wait_for_status('another one', lambda s: s['mode'] == 'inactive')
    assert len(bench.arm.commands) == count


def test_reset_begins_an_episode_that_the_next_request_names(bench):
    bench.start()
    episode = bench.arm.plans[-1].header.frame_id
    response = bench.call('reset')
    assert response.success
    bench.graph.wait_for(
        lambda: bench.arm.plans[-1].header.frame_id != episode, 'a request of the new episode'
    )
    # A chunk of the old one is refused.
    old = int(episode.split('episode=')[1].split()[0])
    bench.arm.answer(0, episode=old)
    bench.wait_for_status('the refusal', lambda s: s.get('refused.other_episode') == '1', 'chunks')


def test_a_dry_run_commands_nothing_and_reports_all(bench):
    # Nothing is waited for in between: the start finds the dry run in force.
    assert bench.graph.set_parameter(bench.node, 'dry_run', True).successful
    bench.start()
    bench.arm.answer(0)
    status = bench.wait_for_status('motion', lambda s: s.get('kind') == 'track')
    assert 'nothing is published' in status['text']
    assert status['sent'] == '0'
    assert bench.graph.set_parameter(bench.node, 'dry_run', False).successful
    bench.wait_for_status('the end of it', lambda s: s['dry_run'] == 'false')
    # The sentinel on the same publisher: the first command is the hold of a new start.
    assert not bench.arm.commands
    bench.start()
    bench.graph.wait_for(lambda: bench.arm.commands, 'a command')


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly_with_the_hold_last(bundle, number):
    with graph() as made:
        bench = Bench(made, bundle, '/ended')
        bench.begin()
        bench.start()
        bench.move()
        assert bench.process.stop(number) == 0, bench.process.output()
        commanded = bench.arm.commanded()
        assert np.array_equal(commanded[-1], commanded[-2])
        bench.arm.close()


def test_a_conflict_fails_to_configure_and_says_which_file(bundle, tmp_path):
    robot = tmp_path / 'other.yaml'
    robot.write_text(
        'format: 1\nname: other\n'
        'joints: [{name: waist, unit: rad, lower: -1.0, upper: 1.0, velocity: 1.0}]\n'
        'outputs: [{kind: joint_state, topic: commands, joints: [waist]}]\n'
    )
    with graph() as made:
        node = f'/misfit{NODE}'
        process = start(made, bundle, '-p', f'robot:={robot}', '-r', '__ns:=/misfit')
        assert not made.transition(node, 'configure')
        made.wait_for(lambda: 'configure failed' in process.text(), 'the reason')
        assert str(robot) in process.text()
        assert made.state(node) == 'unconfigured'


def test_two_namespaces_do_not_hear_each_other(bundle):
    with graph() as made:
        one, other = Bench(made, bundle, '/one'), Bench(made, bundle, '/other')
        for bench in (one, other):
            bench.begin()
            bench.start()
        one.move()
        # The sentinel: what the other one gets next is its own chunk, and it is the first.
        other.arm.answer(7)
        status = other.wait_for_status('the chunk', lambda s: s['received'] != '0', 'chunks')
        assert (status['received'], status['accepted']) == ('1', '1')
        other.move(7)
        for bench in (one, other):
            bench.arm.close()


def test_nothing_moves_while_the_simulated_clock_is_paused(bundle):
    with graph() as made:
        bench = Bench(made, bundle, '/paused', '-p', 'use_sim_time:=true')
        clock = made.node.create_publisher(Clock, '/clock', 10)
        now = [1_000_000_000_000]
        bench.arm.now_ns = lambda: now[0]
        last = [time.monotonic()]

        def run_clock() -> None:
            elapsed, last[0] = time.monotonic() - last[0], time.monotonic()
            now[0] += round(min(elapsed, 0.1) * 1e9)
            clock.publish(Clock(clock=ns_to_stamp(now[0])))

        def run_and_answer() -> None:
            run_clock()
            bench.answer_new()

        bench.begin()
        made.wait_for(lambda: bench.call('start').success, 'a start', meanwhile=run_clock)
        made.wait_for(lambda: bench.arm.plans, 'a request', meanwhile=run_clock)
        bench.wait_for_status(
            'motion', lambda s: s.get('kind') == 'track', meanwhile=run_and_answer
        )
        # Paused from here on, in the middle of the chunk.
        status = bench.wait_for_status('a hold', lambda s: s['reason'] == 'clock_stopped')
        assert status['kind'] == 'hold'
        bench.wait_for_commands(5)
        assert np.ptp(bench.arm.commanded()[-5:], axis=0).max() == 0.0
        last[0] = time.monotonic()
        bench.wait_for_status(
            'motion again', lambda s: s.get('kind') == 'track', meanwhile=run_and_answer
        )
        bench.arm.close()


def test_nothing_starts_while_an_output_has_no_controller(bench):
    bench.begin()
    bench.start()
    bench.arm.unplug_gripper()
    where = 'no node takes commands from /gripper_controller/commands'
    status = bench.wait_for_status('a warning', lambda status: where in status['text'])
    assert status['level'] == 1
    assert bench.call('stop').success
    refused = bench.call('start')
    assert not refused.success and where in refused.message and 'dry_run' in refused.message
    bench.arm.plug_gripper_in()
    bench.start()
