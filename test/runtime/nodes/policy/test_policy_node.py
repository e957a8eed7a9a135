"""The policy node as a process on a real graph: from messages to chunks, and why there are none."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from graph import Graph, graph
from rclpy.qos import ReliabilityPolicy
from rosgraph_msgs.msg import Clock
from std_srvs.srv import Trigger
from tiny_policy import JOINTS, tiny_spec, write_tiny_policy
from tiny_robot import ROBOT, STEP_TIME_S, Drivers, write_robot

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import (
    chunk_type,
    message_to_chunk,
    ns_to_stamp,
    plan_type,
    stamp_to_ns,
    trajectory_of,
)
from vla_runtime.nodes.parameter_table import COULD_NOT_START
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan

pytestmark = pytest.mark.graph

NODE = '/vla_policy'
MODULE = 'vla_runtime.nodes.policy.node'
TASK = 'pick up the red cup'
MAX_AGE_S = 1.0
# Namespace of nodes that run beside the one that most tests share.
ALONE = '/alone'
IN_ALONE = ('-r', f'__ns:={ALONE}')
# Of the parameters that tests change.
DEFAULTS = {'real_time_chunking': False, 'max_guidance_weight': 10.0, 'sync_tolerance_s': 0.05}


@pytest.fixture(scope='module')
def bundle(tmp_path_factory):
    return write_tiny_policy(
        tmp_path_factory.mktemp('bundle') / 'tiny', tiny_spec(advantage='task_newline')
    )


@pytest.fixture(scope='module')
def robot(tmp_path_factory):
    return write_robot(tmp_path_factory.mktemp('robot') / 'tiny.yaml')


def start(made: Graph, bundle, robot, *arguments, name=None):
    return made.start(
        MODULE,
        '--ros-args',
        *('-p', f'bundle:={bundle}'),
        *('-p', f'robot:={robot}'),
        *('-p', f'max_observation_age_s:={MAX_AGE_S}'),
        *('-p', 'torch_threads:=1'),
        *arguments,
        name=name,
    )


class Executor:
    """The far side of the policy node: asks, and keeps what is answered."""

    def __init__(self, made: Graph, namespace: str = '') -> None:
        self.graph = made
        self.node = f'{namespace}{NODE}'
        self.drivers = Drivers(made, namespace)
        self.chunks = made.collect(chunk_type(), f'{namespace}/action_chunk')
        self.reports = made.collect(DiagnosticArray, f'{self.node}/report')
        self.diagnostics = made.collect(DiagnosticArray, '/diagnostics')

    def chunk(self, what='a chunk', **request):
        """Ask until a chunk comes; returns it and its report's values."""
        count = len(self.chunks)
        self.drivers.request(**request)
        self.graph.wait_for(
            lambda: len(self.chunks) > count and len(self.reports) >= len(self.chunks),
            what,
            meanwhile=self.drivers,
        )
        return message_to_chunk(self.chunks[-1]), values_of(self.reports[-1].status[0])

    def statuses(self, condition):
        """Messages about a condition, oldest first."""
        return [
            status
            for message in self.diagnostics
            for status in message.status
            if status.name == f'{self.node}: {condition}'
        ]

    def wait_for_status(self, condition, words, what):
        """Wait until a status that holds these words is published from now on."""
        self.diagnostics.clear()
        return self.graph.wait_for(
            lambda: next((s for s in self.statuses(condition) if words in s.message), None),
            what,
            meanwhile=self.drivers,
        )

    def activate(self) -> None:
        """Active, whatever it is now."""
        if self.graph.state(self.node) == 'unconfigured':
            assert self.graph.transition(self.node, 'configure')
        if self.graph.state(self.node) == 'inactive':
            assert self.graph.transition(self.node, 'activate')

    def prepare(self) -> None:
        """Whatever the test before left: active, instructed, default parameters, new episode."""
        self.activate()
        self.drivers.instruct(TASK)
        for name, value in DEFAULTS.items():
            assert self.graph.set_parameter(self.node, name, value).successful
        self.chunk()
        assert self.graph.call(Trigger, f'{self.node}/reset', Trigger.Request()).success
        for collected in (self.chunks, self.reports, self.diagnostics):
            collected.clear()


@pytest.fixture(scope='module')
def running(bundle, robot):
    """One node, and its far side, for all tests that only need it active."""
    with graph() as made:
        process = start(made, bundle, robot)
        running = Executor(made)
        running.process = process
        yield running


@pytest.fixture
def executor(running):
    """The far side, with all sources healthy and the node ready for a first request."""
    running.drivers.heal()
    running.prepare()
    return running


def aligned(executor, report, rows, certain):
    """The last plan as it is at the observation of a report, which gives the same counts of it.

    Under load an observation may be many steps older than the plan: the counts alone do not
    tell how many.
    """
    if report['plan_rows'] == '0':
        return None
    step_ns, horizon = round(STEP_TIME_S * 1e9), tiny_spec().real_horizon
    over = (int(report['stamp_ns']) - executor.drivers.asked_ns) // step_ns
    seen = [rows[max(0, over + i)] for i in range(horizon) if over + i < len(rows)]
    delay = min(max(0, certain - over), len(seen))
    assert (int(report['plan_rows']), int(report['plan_delay_steps'])) == (len(seen), delay)
    return CommittedPlan(np.array(seen), delay, execution_horizon=len(seen))


def test_requests_are_heard_without_waiting_for_one_that_was_lost(executor):
    # A reliable reader would hold all later ones back until the writer's next heartbeat.
    (hears,) = executor.graph.node.get_subscriptions_info_by_topic('/committed_plan')
    assert hears.qos_profile.reliability is ReliabilityPolicy.BEST_EFFORT


# np.interp and the synchroniser differ in the last bits of the state.
same = partial(np.testing.assert_allclose, rtol=0, atol=1e-5)


def test_chunk_is_what_the_policy_infers_from_the_messages_that_the_report_names(executor, bundle):
    policy = Policy.load(bundle)
    # A joint state may be lost on its way: what lies between two others must not depend on it.
    executor.drivers.moving = False
    executor.chunk(episode=4)
    for number in range(2):
        (received, header), report = executor.chunk(episode=5)
        assert header.observation_ns == max(int(report[f'stamp_ns.{c}']) for c in ('top', 'wrist'))
        assert received.names == JOINTS
        assert (header.episode, header.number) == (5, number)
        assert received.step_time_s == STEP_TIME_S
        chunk, _ = policy.infer(executor.drivers.observed(report, TASK))
        same(received.actions, chunk.actions)


def test_report_names_everything_that_went_in(executor):
    _, report = executor.chunk()
    assert report['number'] == '0'
    assert report['instruction'] == TASK
    assert report['denoise_steps'] == '3'
    for key in ('ms.total', 'ms.denoise', 'overhead_ms'):
        assert 0.0 <= float(report[key]) < 10_000.0, key
    # Below zero when a message comes in after the clock was read and before it is selected.
    for key in ('age_ms.top', 'age_ms.wrist', 'age_ms.state'):
        assert abs(float(report[key])) < 10_000.0, key
    assert report['parameter.max_observation_age_s'] == str(MAX_AGE_S)


def test_value_out_of_range_is_refused_with_the_range_and_changes_nothing(executor):
    before = executor.chunk()[1]['parameter.cfg_beta']
    result = executor.graph.set_parameter(executor.node, 'cfg_beta', float('nan'))
    assert not result.successful
    assert all(bound in result.reason for bound in ('1.0', '5.0')), result.reason
    assert executor.chunk()[1]['parameter.cfg_beta'] == before


def test_structural_parameter_cannot_be_changed(executor):
    result = executor.graph.set_parameter(executor.node, 'bundle', 'elsewhere')
    assert not result.successful
    assert 'read-only' in result.reason and 'launch again' in result.reason


def silence(source):
    return lambda drivers: drivers.silent.add(source)


# One of each kind of source; all that buffers and decoders object to is in their own tests.
FAULTS = {
    'camera stops': (silence('wrist'), "camera 'wrist' (/wrist/image): last frame is"),
    'encoding changes': (
        lambda d: setattr(d, 'encoding', '16UC1'),
        # Camera and topic, what came, and what mends it: another topic in the robot file.
        "camera 'top' (/top/image): encoding '16UC1'",
        'colour',
        'topic in the robot file',
    ),
    'joint is renamed': (
        lambda d: setattr(d, 'arm_joints', ['elbow', 'sholder']),
        'messages still come, without it (with: elbow, sholder)',
    ),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_fault_stops_inference_and_is_named_until_it_is_mended(executor, fault):
    break_it, words, *remedy = FAULTS[fault]
    executor.chunk()
    break_it(executor.drivers)
    status = executor.wait_for_status('observation', words, f'a status of: {fault}')
    assert status.level == status.ERROR
    assert status.message.startswith('no inference: ')
    assert all(part in status.message for part in remedy)
    count = len(executor.chunks)
    executor.drivers.request()
    executor.wait_for_status('observation', words, 'the status to stay with a request waiting')
    mended_ns = executor.drivers.clock_ns()
    executor.drivers.heal()
    executor.graph.wait_for(
        lambda: len(executor.chunks) > count, 'recovery', meanwhile=executor.drivers
    )
    # Nothing was inferred from what came before the fault was mended.
    assert stamp_to_ns(trajectory_of(executor.chunks[count]).header.stamp) >= mended_ns


def test_limits_of_the_synchroniser_are_live(executor):
    assert executor.graph.set_parameter(executor.node, 'sync_tolerance_s', 0.0).successful
    executor.drivers.request()
    executor.wait_for_status('observation', 'no frames within sync_tolerance_s', 'a status of it')
    assert not executor.chunks


def test_plan_of_another_robot_is_refused_by_name(executor):
    executor.drivers.request(np.zeros((2, 2)), names=('shoulder', 'elbo'))
    status = executor.wait_for_status('inference', 'committed_plan', 'a status about it')
    assert 'missing: elbow, gripper; unknown: elbo' in status.message
    executor.chunk()


def test_a_second_node_that_asks_is_warned_of_by_name(executor):
    node = executor.graph.node
    second = node.create_publisher(plan_type(), 'committed_plan', 1)
    status = executor.wait_for_status('requests', '2 publishers', 'the warning')
    assert status.level == status.WARN
    name = f'/{node.get_name()}'
    assert f'2 publishers on /committed_plan: {name}, {name};' in status.message
    node.destroy_publisher(second)
    assert executor.wait_for_status('requests', 'at most one', 'its end').level == status.OK


def test_a_chunk_says_whether_it_was_tied_to_the_plan(executor):
    # Five seconds of them, of which a chunk has eight: a busy machine's frames are late.
    rows = np.zeros((100, len(JOINTS)))

    def tied(rows=rows):
        (_, header), report = executor.chunk() if rows is None else executor.chunk(rows=rows)
        assert report['tied'] == str(header.tied).lower()
        return header.tied

    def give(name, value):
        assert executor.graph.set_parameter(executor.node, name, value).successful

    assert not tied()
    give('real_time_chunking', True)
    assert tied()
    # Nothing is executed, so there is nothing to tie it to.
    assert not tied(rows=None)
    # A tie of no weight is none: the executor is to blend such a chunk.
    give('max_guidance_weight', 0.0)
    assert not tied()
    give('max_guidance_weight', 10.0)
    assert tied()


def test_reset_begins_a_new_episode(executor):
    assert [executor.chunk()[0][1].number for _ in range(3)] == [0, 1, 2]
    assert executor.graph.call(Trigger, f'{executor.node}/reset', Trigger.Request()).success
    assert executor.chunk()[0][1].number == 0


def test_status_counts_every_cameras_frames(executor):
    executor.chunk()
    status = executor.wait_for_status('camera top', 'Hz', 'the status of the camera')
    counts = values_of(status)
    assert int(counts['received']) > 0
    assert {'lost', 'late', 'out_of_order', 'refused', 'outages'} <= set(counts)


def test_lifecycle_opens_and_closes_and_survives_wrong_transitions(executor):
    made, node = executor.graph, executor.node
    assert not made.transition(node, 'configure')
    assert made.transition(node, 'deactivate')
    executor.drivers.request(without_subscribers=True)
    reset = made.call(Trigger, f'{node}/reset', Trigger.Request())
    assert not reset.success
    assert 'not active' in reset.message
    assert made.transition(node, 'cleanup')
    assert not made.transition(node, 'activate')
    assert made.state(node) == 'unconfigured'
    assert made.transition(node, 'configure')
    assert made.transition(node, 'activate')
    # The request made while it was inactive was not kept: the answer is to the next one.
    (_, header), _ = executor.chunk(episode=9)
    assert (header.episode, header.number, len(executor.chunks)) == (9, 0, 1)


def test_drivers_have_a_second_after_activation_before_they_are_missed(executor):
    assert executor.graph.transition(executor.node, 'deactivate')
    executor.diagnostics.clear()
    begin_s = monotonic()
    assert executor.graph.transition(executor.node, 'activate')
    # The executor asks at once, and the request waits for frames.
    executor.drivers.request()
    missed = executor.graph.wait_for(
        lambda: [s for s in executor.statuses('observation') if 'no frame yet' in s.message],
        'a camera that is missed',
    )
    assert monotonic() - begin_s >= 1.0
    assert missed[0].level == DiagnosticStatus.ERROR


def test_one_in_a_namespace_is_configured_in_the_end_hears_nobody_else_and_ends_cleanly(
    executor, bundle, tmp_path
):
    made = executor.graph
    text = ROBOT.replace('name: wrist, topic: wrist/image', 'name: side, topic: side/image')
    file = write_robot(tmp_path / 'one_camera.yaml', text)
    process, other = start(made, bundle, file, *IN_ALONE), Executor(made, ALONE)
    assert not made.transition(other.node, 'configure')
    assert made.state(other.node) == 'unconfigured'
    made.wait_for(lambda: "no camera 'wrist' in cameras" in process.text(), 'the reason')
    write_robot(file)
    other.prepare()
    for _ in range(2):
        executor.chunk(episode=1)
    (_, header), _ = other.chunk(episode=2)
    # Had it answered the first one's requests, this would not be its first chunk.
    assert (header.episode, header.number, len(other.chunks)) == (2, 0, 1)
    assert [message_to_chunk(chunk)[1].episode for chunk in executor.chunks] == [1, 1]
    assert process.stop(signal.SIGTERM) == 0
    assert 'Traceback' not in process.text()


def test_a_second_one_refuses_and_names_the_first(executor, bundle, robot):
    autostart = ('-p', 'autostart:=true')
    second = start(executor.graph, bundle, robot, '-r', '__node:=another', *autostart)
    assert second.wait() == COULD_NOT_START
    assert f'{NODE} (process {executor.process.pid} on ' in second.text()
    assert executor.graph.state(NODE) == 'active'


def test_a_driver_that_has_ended_is_not_looked_for_in_the_robot_file(executor):
    """The last test that needs it."""
    executor.wait_for_status('camera top', ' Hz', 'frames')
    executor.drivers.end_top()
    status = executor.wait_for_status('camera top', 'driver has ended', 'its end')
    assert '/top/image' in status.message and 'robot file' not in status.message


def test_configure_is_refused_before_pytorch_is_imported(bundle, robot, monkeypatch):
    """All that is refused is in `test_preflight`."""
    # No GPU, should this machine have one.
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    with graph() as made:
        process = start(made, bundle, robot, *IN_ALONE, '-p', 'device:=cuda')
        assert not made.transition(f'{ALONE}{NODE}', 'configure')
        told = "device 'cuda': no CUDA device answers here"
        made.wait_for(lambda: told in process.text(), 'what is wrong')
        assert made.state(f'{ALONE}{NODE}') == 'unconfigured' and process.running
        assert 'libtorch' not in Path(f'/proc/{process.pid}/maps').read_text()


def test_parameter_that_does_not_fit_at_start_is_named(bundle, robot):
    with graph() as made:
        process = start(made, bundle, robot, '-p', 'cfg_beta:=2')
        made.wait_for(lambda: not process.running, 'the node to give up')
        assert process.stop() == COULD_NOT_START
        assert 'parameter cfg_beta: expected double (write 2.0, not 2)' in process.text()
        assert 'Traceback' not in process.text()


def test_paused_clock_stops_inference(bundle, robot):
    with graph() as made:
        start(made, bundle, robot, *IN_ALONE, '-p', 'use_sim_time:=true')
        executor = Executor(made, ALONE)
        clock = made.node.create_publisher(Clock, '/clock', 10)
        now_ns = [100 * 10**9]

        def world(advance_ns=20_000_000):
            now_ns[0] += advance_ns
            clock.publish(Clock(clock=ns_to_stamp(now_ns[0])))
            executor.drivers()

        executor.drivers.clock_ns = lambda: now_ns[0]
        assert made.transition(f'{ALONE}{NODE}', 'configure')
        assert made.transition(f'{ALONE}{NODE}', 'activate')
        executor.drivers.instruct(TASK)

        def ask_and_wait(count):
            made.wait_for(lambda: len(executor.chunks) >= count, 'a chunk', meanwhile=world)

        executor.drivers.request()
        ask_and_wait(1)

        def pause():
            """The same stamps again and again, and requests."""
            world(advance_ns=0)
            executor.drivers.request()

        def wait_for_words():
            executor.diagnostics.clear()
            made.wait_for(
                lambda: any('stands still' in s.message for s in executor.statuses('observation')),
                'a status about the clock',
                meanwhile=pause,
            )

        # The last tick may be under way still; once the node says that the clock stands, it stands.
        paused_ns = now_ns[0]
        wait_for_words()
        count = len(executor.chunks)
        wait_for_words()
        assert len(executor.chunks) == count

        def go_on():
            world()
            executor.drivers.request()

        def newest_ns():
            return stamp_to_ns(trajectory_of(executor.chunks[-1]).header.stamp)

        # The first chunk may be of the last frames: a tick of the clock may overtake new ones.
        made.wait_for(lambda: newest_ns() > paused_ns, 'a chunk of new frames', meanwhile=go_on)
