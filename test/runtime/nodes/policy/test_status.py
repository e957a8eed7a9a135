"""Status of the policy node in words: each problem once, whatever number of inputs share it."""

from __future__ import annotations

from vla_runtime.messages.diagnostics import Level
from vla_runtime.nodes.policy.status import camera, joints, observation
from vla_runtime.sensors.camera_buffer import CameraCounters
from vla_runtime.sensors.synchronizer import CameraStatus, MissingInput

TWICE = "/joint_states: the message names 'elbow' twice; mend the node that publishes it"


def test_what_all_joints_of_a_topic_share_is_said_once():
    missing = [MissingInput(f'joint {name}', TWICE) for name in ('elbow', 'wrist', 'base')]
    status = observation(missing)
    assert status.text == f'no inference: {TWICE}'
    assert len(status.values) == 3
    assert joints([TWICE] * 3, [], 0).text == TWICE


def test_different_problems_are_all_said():
    assert joints(['elbow is old', 'wrist is old'], [], 0).text == 'elbow is old; wrist is old'


def test_no_problem_is_ok():
    assert joints([], [], 0).level == observation([]).level == Level.OK


def test_a_warning_is_said_where_there_is_no_problem():
    status = joints([], ['/joint_states: stamp is 0.200 s in the future'], 3)
    assert (status.level, status.values['clock_jumps']) == (Level.WARN, 3)
    assert 'in the future' in status.text
    assert joints([TWICE], ['ahead'], 0).text == TWICE


def test_it_is_said_that_stamps_are_those_of_the_receipt():
    status = CameraStatus('top', '/top/image', CameraCounters(), 30.0, True, None)
    assert 'received' not in camera(status, 'header').text
    received = camera(status, 'receive')
    assert (received.level, received.values['stamp']) == (Level.OK, 'receive')
    assert 'stamped when received' in received.text
    states = joints([], [], 0, ['gripper/joint_states'])
    assert states.values['stamped_when_received'] == 'gripper/joint_states'
    assert 'stamped when received: gripper/joint_states' in states.text
