"""Whether the numbers of an output are what its controller takes them for."""

from __future__ import annotations

import pytest

from vla_runtime.nodes.executor.controller_conflicts import interface_conflict, joint_conflict
from vla_runtime.robot.schema import RobotOutput, repeats_hold

NAME = '/arm_controller'


def output(interface='position', kind='float64_multi_array', **more):
    return RobotOutput(kind, 'arm_controller/commands', ('a', 'b'), interface=interface, **more)


@pytest.mark.parametrize('interface', ['position', 'velocity'])
@pytest.mark.parametrize('taken', ['position', 'velocity', 'effort', 'acceleration'])
@pytest.mark.parametrize(
    'how', [lambda one: {'interface_name': one}, lambda one: {'interface_names': [one]}]
)
def test_a_controller_of_another_interface_is_named_with_both(interface, taken, how):
    found = interface_conflict(NAME, output(interface), how(taken))
    assert bool(found) is (interface != taken)
    if found:
        assert NAME in found and 'arm_controller/commands' in found
        assert f': {taken})' in found and f'interface: {interface}' in found


@pytest.mark.parametrize(
    ('kind', 'interface', 'conflicts'),
    [
        ('position_controllers/JointGroupPositionController', 'velocity', True),
        ('position_controllers/JointGroupPositionController', 'position', False),
        ('velocity_controllers/JointGroupVelocityController', 'position', True),
        ('effort_controllers/JointGroupEffortController', 'position', True),
        ('forward_command_controller/ForwardCommandController', 'velocity', False),
        ('my_controllers/Anything', 'velocity', False),
        ('', 'velocity', False),
    ],
)
def test_a_controller_without_the_parameter_is_known_by_its_type(kind, interface, conflicts):
    assert bool(interface_conflict(NAME, output(interface), {}, kind)) is conflicts


def test_the_parameter_counts_before_the_type():
    kind = 'position_controllers/JointGroupPositionController'
    assert not interface_conflict(NAME, output('velocity'), {'interface_name': 'velocity'}, kind)


def test_several_interfaces_of_one_joint_are_no_joints():
    values = {'interface_names': ['position', 'velocity']}
    assert 'interface_names: position, velocity' in interface_conflict(NAME, output(), values)


def test_an_interface_with_a_name_of_its_own_is_nobodys_business():
    assert not interface_conflict(NAME, output(), {'interface_name': 'suction'})


def test_a_trajectory_controller_takes_positions_whatever_it_commands():
    one = RobotOutput('joint_trajectory', 'arm_controller/joint_trajectory', ('a',))
    for interfaces in (['velocity'], ['effort'], ['position', 'velocity']):
        assert not interface_conflict(NAME, one, {'command_interfaces': interfaces})


def test_joints_behind_the_name_of_another_controller_are_those_joints():
    values = {'joints': ['pid_controller/a', 'pid_controller/b']}
    assert not joint_conflict(NAME, output(), ('a', 'b'), values)
    assert 'order' in joint_conflict(NAME, output(), ('b', 'a'), values)


@pytest.mark.parametrize(
    ('one', 'repeats'),
    [
        (output('position'), False),
        (output('velocity'), True),
        (output('velocity', hold='silent'), False),
        (output('position', hold='send'), True),
        (RobotOutput('joint_state', 't', ('a',), interface='velocity'), True),
        (RobotOutput('twist_stamped', 't', pose='hand'), True),
        (RobotOutput('pose_stamped', 't', pose='hand'), False),
    ],
)
def test_zero_velocities_are_sent_on_and_on_unless_the_robot_file_says_otherwise(one, repeats):
    assert repeats_hold(one) is repeats
