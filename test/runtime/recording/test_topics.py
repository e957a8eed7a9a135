"""Topics of a robot file, found in whatever namespace a bag has them."""

from __future__ import annotations

import pytest

from vla_runtime.recording.topics import (
    IMAGE_TYPES,
    JOINT_STATE,
    NamespaceError,
    Source,
    camera_topics,
    robot_namespace,
)

IMAGE = IMAGE_TYPES[0]
CAMERA = Source(camera_topics('/top/image'), IMAGE_TYPES)
ARM = Source(('joint_states',), (JOINT_STATE,))
HAND = Source(('gripper/joint_states',), (JOINT_STATE,))
COMMANDS = 'trajectory_msgs/msg/JointTrajectory'


def robot(namespace: str) -> dict[str, str]:
    return {
        f'{namespace}/top/image': IMAGE,
        f'{namespace}/joint_states': JOINT_STATE,
        f'{namespace}/gripper/joint_states': JOINT_STATE,
    }


@pytest.mark.parametrize('namespace', ['', '/left', '/lab/left'])
def test_a_single_robot_is_found_in_any_namespace(namespace):
    kinds = robot(namespace)
    found = robot_namespace(kinds, [CAMERA, ARM, HAND], None)
    assert found.name == namespace
    # `/gripper` has joint states of its own, and is no robot.
    assert found.others == ()
    assert found.find_topic(kinds, ARM.names, ARM.types) == f'{namespace}/joint_states'
    assert found.find_topic(kinds, CAMERA.names, CAMERA.types) == f'{namespace}/top/image'


def test_names_of_the_robot_file_itself_come_first():
    kinds = robot('') | robot('/left')
    found = robot_namespace(kinds, [CAMERA, ARM, HAND], None)
    assert (found.name, found.others) == ('', ('/left',))


def test_of_two_robots_neither_is_guessed():
    kinds = robot('/left') | robot('/right')
    with pytest.raises(NamespaceError, match='--namespace'):
        robot_namespace(kinds, [CAMERA, ARM, HAND], None)
    found = robot_namespace(kinds, [CAMERA, ARM, HAND], 'right')
    assert found.find_topic(kinds, HAND.names, HAND.types) == '/right/gripper/joint_states'


def test_a_robot_gets_no_topic_of_another_one():
    kinds = robot('/left') | robot('/right') | {'/right/arm/commands': COMMANDS}
    left, right = (robot_namespace(kinds, [CAMERA, ARM], one) for one in ('/left', '/right'))
    assert left.find_topic(kinds, ['arm/commands'], [COMMANDS]) is None
    assert right.find_topic(kinds, ['arm/commands'], [COMMANDS]) == '/right/arm/commands'


@pytest.mark.parametrize(('wanted', 'name'), [('left', '/left'), ('/', '')])
def test_one_of_two_robots_may_have_no_namespace(wanted, name):
    kinds = robot('') | robot('/left') | {'/arm/commands': COMMANDS}
    found = robot_namespace(kinds, [CAMERA, ARM, HAND], wanted)
    assert found.name == name
    assert found.find_topic(kinds, CAMERA.names, CAMERA.types) == f'{name}/top/image'
    commands = None if name else '/arm/commands'
    assert found.find_topic(kinds, ['arm/commands'], [COMMANDS]) == commands


def test_of_what_others_have_too_the_robots_own_is_taken():
    kinds = {'/left/joint_states': JOINT_STATE, '/left/top/image': IMAGE}
    found = robot_namespace(kinds, [CAMERA, ARM], None)
    said = {'/vla_policy/instruction': 'text', '/left/vla_policy/instruction': 'text'}
    assert found.find_topic(said, ['instruction'], ['text']) == '/left/vla_policy/instruction'


def test_robots_may_share_a_camera():
    kinds = {
        '/top/image': IMAGE,
        '/left/joint_states': JOINT_STATE,
        '/right/joint_states': JOINT_STATE,
    }
    with pytest.raises(NamespaceError, match='/left, /right'):
        robot_namespace(kinds, [CAMERA, ARM], None)
    found = robot_namespace(kinds, [CAMERA, ARM], '/left')
    assert found.find_topic(kinds, CAMERA.names, CAMERA.types) == '/top/image'
    assert found.find_topic(kinds, ARM.names, ARM.types) == '/left/joint_states'


def test_a_namespace_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(NamespaceError, match='--namespace'):
        robot_namespace(robot('/left'), [CAMERA, ARM], 'lab')
    with pytest.raises(NamespaceError):
        robot_namespace({}, [CAMERA, ARM], 'lab')
