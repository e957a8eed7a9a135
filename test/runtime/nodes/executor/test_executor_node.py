"""The executor node as a process on a real graph: its commands, their times, and its status."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rclpy
from executor_bench import Bench
from graph import graph
from tabletop_policy import HORIZON
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.messages.trajectories import message_to_plan, plan_type
from vla_runtime.nodes.executor.parameters import EXECUTOR_PARAMETERS
from vla_runtime.nodes.graph_faults import other_publishers, several_publishers

pytestmark = pytest.mark.graph


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


def test_an_empty_plan_asks_first_and_the_chunk_is_executed(bench):
    bench.start()
    assert not len(message_to_plan(bench.arm.plans[0]).rows)
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
    # To a subscriber that is no trajectory controller.
    assert all(len(command.points) == 2 for command in list(bench.arm.commands))


@pytest.mark.parametrize(
    ('name', 'value', 'said'),
    [
        ('replan_interval', 0, 'Min: 1'),
        ('replan_interval', HORIZON + 1, f'between 1 and {HORIZON}'),
        ('handover_mode', 'jump', 'switch, blend, ensemble, rtc'),
        ('ensemble_decay', -1.0, 'Min: 0'),
        ('use_sim_time', True, 'deactivate it first'),
        ('max_overrun_steps', HORIZON + 1, f'a chunk has only {HORIZON} steps'),
        # rclpy's words; Kilted's name the types by number.
        ('request_timeout_s', 2, 'Wrong parameter type, expected'),
    ],
)
def test_a_value_that_cannot_be_taken_is_refused_with_the_reason(bench, name, value, said):
    result = bench.graph.set_parameter(bench.node, name, value)
    assert not result.successful
    assert said in result.reason


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
    # One that is longer than the policy's horizon is not even read.
    bench.arm.answer(1, actions=np.tile(bench.arm.positions, (HORIZON + 1, 1)))
    status = bench.wait_for_status('the refusal', lambda s: s['unreadable'] == '1', 'chunks')
    assert status['accepted'] == '0'


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


def test_a_robot_that_does_not_follow_is_not_pushed_on(bench):
    bench.start()
    bench.arm.follows = False
    bench.arm.answer(0, rise_rad=0.1)
    status = bench.wait_for_status('a stop', lambda s: s['reason'] == 'tracking_error')
    assert status['mode'] == 'stopped'
    assert 'max_tracking_error' in status['text']


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
    episode = message_to_plan(bench.arm.plans[-1]).episode
    response = bench.call('reset')
    assert response.success
    bench.graph.wait_for(
        lambda: message_to_plan(bench.arm.plans[-1]).episode != episode,
        'a request of the new episode',
    )
    # A chunk of the old one is refused.
    bench.arm.answer(0, episode=episode)
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


def test_a_live_parameter_is_in_force_and_in_each_report_from_the_next_seam_on(bench):
    bench.start()
    seam = bench.next_seam(0)
    live = {f'parameter.{row.name}' for row in EXECUTOR_PARAMETERS if not row.read_only}
    # It is of the node, and says nothing about a plan.
    live.remove('parameter.episode_time_limit_s')
    assert live == {key for key in seam if key.startswith('parameter.')}
    assert (seam['parameter.blend_steps'], seam['parameter.interpolation']) == ('4', 'cubic')
    assert bench.graph.set_parameter(bench.node, 'blend_steps', 2).successful
    bench.wait_for_status('the end of the chunk', lambda s: s['reason'] == 'starved')
    assert bench.next_seam(1)['parameter.blend_steps'] == '2'
    status = bench.wait_for_status('the status', lambda s: s['parameter.blend_steps'] == '2')
    assert live == {key for key in status if key.startswith('parameter.')}
    assert bench.graph.set_parameter(bench.node, 'blend_steps', 4).successful


def test_a_second_executor_is_an_error_while_it_runs_and_keeps_it_from_starting(bench):
    node = bench.graph.node
    bench.start()
    rival = node.create_publisher(plan_type(), 'committed_plan', 1)
    named = f'/{node.get_name()};'
    try:
        # Its name may be discovered after its publisher.
        status = bench.wait_for_status(
            'the rival', lambda s: 'two executors' in s['text'] and named in s['text']
        )
        assert status['level'] == 2
        bench.call('stop')
        refused = bench.call('start')
        assert not refused.success
        assert f'/committed_plan is also published by {named}' in refused.message
    finally:
        node.destroy_publisher(rival)
    bench.start()


def test_a_node_of_the_same_name_is_told_from_oneself() -> None:
    with graph() as made:
        one, other = (rclpy.create_node('twin', context=made.node.context) for _ in range(2))
        publisher = one.create_publisher(JointTrajectory, '/chatter', 1)
        made.wait_for(lambda: one.count_publishers('/chatter') == 1, 'its own publisher')
        assert other_publishers(one, [publisher.topic_name]) == ''
        other.create_publisher(JointTrajectory, '/chatter', 1)
        said = made.wait_for(lambda: other_publishers(one, [publisher.topic_name]), 'the twin')
        assert said == '/chatter is also published by another node of the same name, /twin'
        assert several_publishers(one, '/chatter') == '2 publishers on /chatter: /twin, /twin'
        for node in (one, other):
            node.destroy_node()


def test_a_publisher_that_was_discovered_before_its_node_has_words_for_it() -> None:
    unknown = SimpleNamespace(
        node_name='_NODE_NAME_UNKNOWN_', node_namespace='_NODE_NAMESPACE_UNKNOWN_'
    )
    node: Any = SimpleNamespace(
        count_publishers=lambda topic: 2,
        get_fully_qualified_name=lambda: '/vla_executor',
        get_publishers_info_by_topic=lambda topic: [
            SimpleNamespace(node_name='vla_executor', node_namespace='/'),
            unknown,
        ],
    )
    said = other_publishers(node, ['/chatter'])
    assert said == '/chatter is also published by a node whose name is not known yet'
