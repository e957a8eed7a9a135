"""A driver as a process of its own: publishes what its command line says, until it is ended.

Command line: JSON with `images` (topic, rate_hz, width, height; reliability), `joints` (topic,
names, positions; offset_s of the stamps), the node's `name`, its `string`s (topic, text), and
`controllers` (manager, and each one's name, state and positions by joint) with their messages.
"""

from __future__ import annotations

import array
import json
import sys
from typing import Any

from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import String

from vla_runtime.messages.trajectories import ns_to_stamp
from vla_runtime.nodes.node_runner import run_node
from vla_runtime.nodes.qos import LATCHED

_GIVEN: dict[str, Any] = json.loads(sys.argv[1])
_STATES_HZ = 50.0


class Driver(Node):
    def __init__(self) -> None:
        super().__init__(_GIVEN['name'])
        for given in _GIVEN.get('images', ()):
            self._add_camera(**given)
        for given in _GIVEN.get('joints', ()):
            self._add_joints(**given)
        for given in _GIVEN.get('strings', ()):
            publisher = self.create_publisher(String, given['topic'], LATCHED)
            publisher.publish(String(data=given['text']))
        if 'controllers' in _GIVEN:
            self._add_controllers(**_GIVEN['controllers'])

    def _stamp(self, offset_s: float) -> Any:
        return ns_to_stamp(int(self.get_clock().now().nanoseconds) + round(offset_s * 1e9))

    def _add_camera(
        self, topic: str, rate_hz: float, width: int, height: int, reliability: str = 'BEST_EFFORT'
    ) -> None:
        qos = QoSProfile(depth=5, reliability=ReliabilityPolicy[reliability])
        publisher = self.create_publisher(Image, topic, qos)
        message = Image(height=height, width=width, encoding='rgb8', step=3 * width)
        message.data = array.array('B', bytes(3 * width * height))

        def publish() -> None:
            message.header.stamp = self._stamp(0.0)
            publisher.publish(message)

        self.create_timer(1.0 / rate_hz, publish)

    def _add_joints(
        self, topic: str, names: list[str], positions: list[float], offset_s: float = 0.0
    ) -> None:
        publisher = self.create_publisher(JointState, topic, 10)
        message = JointState(name=names, position=positions)

        def publish() -> None:
            message.header.stamp = self._stamp(offset_s)
            publisher.publish(message)

        self.create_timer(1.0 / _STATES_HZ, publish)

    def _add_controllers(self, manager: str, controllers: list[dict[str, Any]]) -> None:
        # Built for the tests that ask for them.
        from control_msgs.msg import JointTrajectoryControllerState
        from controller_manager_msgs.msg import ControllerState
        from controller_manager_msgs.srv import ListControllers
        from trajectory_msgs.msg import JointTrajectory

        def answer(_: Any, response: Any) -> Any:
            response.controller = [
                ControllerState(name=one['name'], state=one['state']) for one in controllers
            ]
            return response

        self.create_service(
            ListControllers, f'{manager}/controller_manager/list_controllers', answer
        )
        for one in controllers:
            name = f'{manager}/{one["name"]}'
            self.create_subscription(
                JointTrajectory, f'{name}/joint_trajectory', lambda _: None, 10
            )
            publisher = self.create_publisher(
                JointTrajectoryControllerState, f'{name}/controller_state', 10
            )
            state = JointTrajectoryControllerState(joint_names=list(one['positions']))
            state.feedback.positions = list(one['positions'].values())

            def publish(publisher: Any = publisher, state: Any = state) -> None:
                state.header.stamp = self._stamp(0.0)
                publisher.publish(state)

            if one['state'] == 'active':
                self.create_timer(1.0 / _STATES_HZ, publish)


if __name__ == '__main__':
    # No command line for ROS.
    sys.exit(run_node(Driver, 'driver', []))
