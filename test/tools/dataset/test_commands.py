"""Commands of grippers in a data set: in the unit of the measured position."""

from __future__ import annotations

import numpy as np
import pytest
from rosbags.rosbag2 import StoragePlugin, Writer

from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.recording.storage_file import message_types
from vla_runtime.robot.file import load_robot
from vla_tools.dataset.bag_contents import read_contents

ROBOT = """
format: 1
name: hands
joints:
  - {name: arm, unit: rad, lower: -3.0, upper: 3.0, velocity: 1.0}
  - {name: left, unit: m, lower: 0.0, upper: 0.1, velocity: 1.0, zero: 0.02, one: 0.06,
     command: {name: gripper, unit: rad, zero: -0.5, one: 1.5}}
  - {name: right, unit: rad, lower: 0.0, upper: 1.0, velocity: 1.0, command: {name: jaw, unit: deg}}
outputs:
  - {kind: joint_group_command, topic: commands/joint_group, group: arm, joints: [arm]}
  - {kind: joint_single_command, topic: commands/joint_single, joints: [left]}
  - {kind: parallel_gripper_command, topic: jaw/gripper_cmd, joints: [right]}
"""
NS = 1_700_000_000_000_000_000
SINGLE = 'interbotix_xs_msgs/msg/JointSingleCommand'
GROUP = 'interbotix_xs_msgs/msg/JointGroupCommand'
JOINTS = 'sensor_msgs/msg/JointState'


def joint_state(names: list[str], positions: list[float], stamp_ns: int):
    types = message_types().types
    stamp = types['builtin_interfaces/msg/Time'](sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9)
    header = types['std_msgs/msg/Header'](stamp=stamp, frame_id='')
    nothing = np.zeros(0)
    return types[JOINTS](header, names, np.array(positions), nothing, nothing)


def write_bag(folder):
    types = message_types()
    messages = {
        ('/joint_states', JOINTS): joint_state(['arm', 'left', 'right'], [0.1, 0.03, 0.5], NS),
        ('/commands/joint_group', GROUP): types.types[GROUP](
            name='arm', cmd=np.array([0.25], dtype=np.float32)
        ),
        ('/commands/joint_single', SINGLE): types.types[SINGLE](name='gripper', cmd=0.5),
        ('/jaw/gripper_cmd/goal', JOINTS): joint_state(['jaw'], [45.0], NS),
    }
    with Writer(folder, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        for (topic, kind), message in messages.items():
            connection = writer.add_connection(topic, kind, typestore=types)
            writer.write(connection, NS, bytes(types.serialize_cdr(message, kind)))
    return folder


def test_commands_are_in_the_joints_own_units(tmp_path):
    (tmp_path / 'robot.yaml').write_text(ROBOT)
    contents = read_contents(
        BagReader(write_bag(tmp_path / 'bag')), load_robot(tmp_path / 'robot.yaml')
    )
    assert contents.missing_outputs == []
    found = {series.names[0]: series.rows[0][0] for series in contents.actions}
    assert found == {
        'arm': 0.25,
        'left': pytest.approx(0.04),
        'right': pytest.approx(np.pi / 4),
    }
