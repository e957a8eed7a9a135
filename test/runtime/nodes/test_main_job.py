"""The main job: policy, executor and tabletop robot as three processes, from images to motion."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray
from graph import LATCHED, SENSOR, graph, statuses
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from paths import ROOT
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray, String
from std_srvs.srv import Trigger
from tabletop_policy import HORIZON, write_tabletop_policy
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import (
    chunk_type,
    message_to_chunk,
    message_to_plan,
    plan_type,
    stamp_to_ns,
    trajectory_of,
)
from vla_runtime.nodes.service_call import TRANSITIONS
from vla_runtime.robot.file import load_robot
from vla_tabletop.sim.world import JOINT_NAMES

pytestmark = pytest.mark.graph

POLICY, EXECUTOR = '/vla_policy', '/vla_executor'
ROBOT = ROOT / 'config' / 'robots' / 'tabletop.yaml'
# A busy machine must not look like a fault here.
PATIENT = ('-p', 'max_state_age_s:=2.0', '-p', 'tick_timeout_s:=1.0', '-p', 'clock_jump_s:=5.0')


class Job:
    """All three processes and all that they say."""

    def __init__(self, made, bundle) -> None:
        self.graph = made
        robot = bundle.parent / 'patient.yaml'
        text = ROBOT.read_text(encoding='utf-8')
        robot.write_text(f'{text}\nrestart_after_outage_s: 600.0\n', encoding='utf-8')
        self._files = ('-p', f'bundle:={bundle}', '-p', f'robot:={robot}')
        self.tabletop = made.start('vla_tabletop.nodes.node')
        self.policy = made.start(
            'vla_runtime.nodes.policy.node',
            '--ros-args',
            *('--params-file', str(ROOT / 'config' / 'policy.yaml')),
            *self._files,
            *('-p', 'max_observation_age_s:=2.0'),
        )
        self.executor = self.start_executor()
        self.chunks = made.collect(chunk_type(), 'action_chunk')
        self.plans = made.collect(plan_type(), 'committed_plan')
        self.commands = made.collect(JointTrajectory, 'arm_controller/joint_trajectory')
        self.gripper = made.collect(Float64MultiArray, 'gripper_controller/commands')
        self.states = made.collect(JointState, 'joint_states', SENSOR)
        self.reports = made.collect(DiagnosticArray, 'vla_policy/report')
        self.handovers = made.collect(DiagnosticArray, 'vla_executor/report')
        self.diagnostics = made.collect(DiagnosticArray, '/diagnostics')
        self._instruction = made.node.create_publisher(String, 'vla_policy/instruction', LATCHED)
        self._instruction.publish(String(data='touch the red block'))
        for node in (POLICY, EXECUTOR):
            assert made.transition(node, 'configure')
            assert made.transition(node, 'activate')
        self.start_motion()

    def start_executor(self):
        return self.graph.start(
            'vla_runtime.nodes.executor.node',
            '--ros-args',
            *('--params-file', str(ROOT / 'config' / 'executor.yaml')),
            *self._files,
            *PATIENT,
        )

    def start_motion(self) -> None:
        def starts():
            return self.insist(Trigger, f'{EXECUTOR}/start', Trigger.Request()).success

        self.graph.wait_for(starts, 'a start')

    def insist(self, service_type, name: str, request):
        """Call a service of a node that took a dead one's place.

        Discovery believes in the dead one for a while, and a call may go to it alone.
        """
        for _ in range(20):
            client = self.graph.node.create_client(service_type, name)
            self.graph.wait_for(client.service_is_ready, f'service {name}')
            future = client.call_async(request)
            end_s = time.monotonic() + 3.0
            self.graph.wait_for(lambda: future.done() or time.monotonic() > end_s, name)  # noqa: B023
            self.graph.node.destroy_client(client)
            if future.done():
                return future.result()
        raise AssertionError(f'{name} does not answer\n{self.executor.output()}')

    def wait_for_more(self, received: list, count: int, what: str) -> None:
        target = len(received) + count
        self.graph.wait_for(lambda: len(received) >= target, f'{count} more {what}')

    def wait_for_status(self, what: str, holds):
        """A status of the executor's control that comes from now on and fulfils `holds`."""
        self.diagnostics.clear()

        def look():
            found = statuses(self.diagnostics, f'{EXECUTOR}: control')
            seen = ({**values_of(status), 'text': status.message} for status in found)
            return next(filter(holds, seen), None)

        return self.graph.wait_for(look, what)


@pytest.fixture(scope='module')
def job(tmp_path_factory):
    bundle = write_tabletop_policy(tmp_path_factory.mktemp('bundle') / 'tabletop')
    with graph() as made:
        yield Job(made, bundle)


def test_images_become_chunks_and_chunks_become_motion(job):
    job.wait_for_more(job.chunks, 4, 'chunks')
    job.graph.wait_for(
        lambda: len(list(statuses(job.handovers, f'{EXECUTOR}: seam'))) >= 3, 'hand-overs'
    )
    report = values_of(job.reports[-1].status[0])
    assert {'age_ms.front', 'age_ms.wrist', 'age_ms.state'} <= report.keys()
    chunk, _ = message_to_chunk(job.chunks[-1])
    assert chunk.names == JOINT_NAMES
    assert chunk.horizon == HORIZON
    measured = np.array([state.position for state in job.states])
    assert np.ptp(measured, axis=0).max() > 0.01


def test_the_first_request_is_empty_and_later_ones_carry_the_plan(job):
    assert message_to_plan(job.plans[0]).rows.shape[0] == 0
    job.graph.wait_for(
        lambda: any(len(message_to_plan(plan).rows) > 4 for plan in job.plans), 'a plan'
    )

    # A chunk is stamped with the time of its observation; two requests may be answered by one.
    def stamps() -> list[int]:
        return [stamp_to_ns(trajectory_of(chunk).header.stamp) for chunk in job.chunks]

    job.graph.wait_for(lambda: len(set(stamps())) > 2, 'chunks of three observations')
    assert stamps() == sorted(stamps())


def test_commands_stay_within_the_robot_files_limits(job):
    job.wait_for_more(job.commands, 100, 'commands')
    joints = {joint.name: joint for joint in load_robot(ROBOT).joints}
    for message in list(job.commands):
        for name, position in zip(message.joint_names, message.points[-1].positions, strict=True):
            assert joints[name].lower <= position <= joints[name].upper
    for message in list(job.gripper):
        assert joints['gripper'].lower <= message.data[0] <= joints['gripper'].upper


def test_the_replan_interval_changes_while_the_robot_moves(job):
    job.wait_for_status('S = 8', lambda s: s.get('replan_interval') == '8')
    assert job.graph.set_parameter(EXECUTOR, 'replan_interval', 4).successful
    job.wait_for_status('S = 4', lambda s: s.get('replan_interval') == '4')
    job.wait_for_more(job.chunks, 2, 'chunks')
    assert job.graph.set_parameter(EXECUTOR, 'replan_interval', 8).successful


def test_guidance_and_denoise_steps_change_and_are_in_the_next_report(job):
    for name, value in (('cfg_enabled', True), ('cfg_beta', 2.5), ('denoise_steps', 5)):
        assert job.graph.set_parameter(POLICY, name, value).successful

    def changed():
        report = values_of(job.reports[-1].status[0])
        return (report['beta'], report['denoise_steps']) == ('2.5', '5')

    job.graph.wait_for(changed, 'a report with the new values')
    assert job.graph.set_parameter(POLICY, 'cfg_enabled', False).successful


def test_a_killed_executor_leaves_the_policy_unharmed_and_a_new_one_goes_on(job):
    job.executor.stop(signal.SIGKILL)
    assert job.policy.running
    job.executor = job.start_executor()
    for name in ('configure', 'activate'):
        number, _, after = TRANSITIONS[name]
        request = ChangeState.Request(transition=Transition(id=number))
        # Answered too late, it was carried out all the same, and is refused when it is repeated.
        job.insist(ChangeState, f'{EXECUTOR}/change_state', request)
        found = job.insist(GetState, f'{EXECUTOR}/get_state', GetState.Request())
        assert found.current_state.label == after
    assert job.graph.state(POLICY) == 'active'
    job.chunks.clear()
    job.start_motion()
    job.graph.wait_for(lambda: len(job.chunks) >= 3, 'chunks')
    job.wait_for_status('motion', lambda s: s.get('kind') == 'track')


def test_a_frozen_policy_makes_the_executor_hold_until_it_thaws(job):
    job.wait_for_status('motion', lambda s: s.get('kind') == 'track')
    os.kill(job.policy.pid, signal.SIGSTOP)
    try:
        # Where the machine itself stood still meanwhile, the plan ended by a late tick.
        job.wait_for_status('a hold', lambda s: s.get('kind') == 'hold')
    finally:
        os.kill(job.policy.pid, signal.SIGCONT)
    job.wait_for_status('motion again', lambda s: s.get('kind') == 'track')


def faults(status) -> int:
    """Holds that a fault began, such as a late tick: each drops the plan."""
    usual = ('holds.starved', 'holds.waiting_for_chunk')
    return sum(int(n) for key, n in status.items() if key.startswith('holds.') and key not in usual)


def test_a_killed_policy_makes_the_executor_hold_and_say_so(job):
    before = job.wait_for_status('motion', lambda s: s.get('kind') == 'track')
    job.policy.stop(signal.SIGKILL)
    status = job.wait_for_status(
        'a hold that names the reason',
        lambda s: s.get('kind') == 'hold' and 'is the policy node running' in s['text'],
    )
    # Where the machine itself stood still meanwhile, a late tick has dropped the plan.
    dropped = faults(status) > faults(before) and status['reason'] == 'waiting_for_chunk'
    assert dropped or status['reason'] == 'starved'

    # Commands of before the hold may be read after its status.
    def holds() -> bool:
        last = np.array([list(message.points[-1].positions) for message in job.commands[-5:]])
        return len(last) == 5 and bool(np.ptp(last, axis=0).max() == 0.0)

    job.wait_for_more(job.commands, 5, 'commands')
    job.graph.wait_for(holds, 'five equal commands')
