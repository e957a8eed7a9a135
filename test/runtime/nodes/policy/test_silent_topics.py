"""A policy node on topics that cannot meet its drivers: it names what stands against it."""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnostic_msgs.msg import DiagnosticArray
from graph import graph
from test_policy_node import NODE, start
from tiny_policy import tiny_spec, write_tiny_policy
from tiny_robot import ROBOT, Drivers

pytestmark = pytest.mark.graph


def test_each_silent_topic_says_which_side_asks_what(tmp_path: Path) -> None:
    bundle = write_tiny_policy(tmp_path / 'bundle', tiny_spec(advantage='task_newline'))
    text = ROBOT
    for right, wrong in (
        ('topic: top/image', 'topic: tip/image'),
        ('wrist/image, type: compressed', 'wrist/image, type: raw'),
        ('{topic: gripper/joint_states,', '{topic: gripper/joint_states, reliability: reliable,'),
    ):
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    robot = tmp_path / 'robot.yaml'
    robot.write_text(text, encoding='utf-8')
    with graph() as made:
        diagnostics = made.collect(DiagnosticArray, '/diagnostics')
        drivers = Drivers(made)
        start(made, bundle, robot, '-p', 'autostart:=true')

        def texts(name: str) -> list[str]:
            statuses = (status for message in list(diagnostics) for status in message.status)
            return [one.message for one in statuses if one.name == f'{NODE}: {name}']

        for name, words in (
            ('camera top', ('/tip/image', '/top/image (sensor_msgs/msg/Image)', "camera 'top'")),
            ('camera wrist', ('publishes sensor_msgs/msg/CompressedImage', '/test ')),
            ('joint states', ('offers reliability best_effort', 'joint_states of the robot file')),
            ('observation', ('/top/image (sensor_msgs/msg/Image)',)),
        ):
            made.wait_for(
                lambda name=name, words=words: any(
                    all(word in text for word in words) for text in texts(name)
                ),
                f'{name}: {words}',
                meanwhile=drivers,
            )
