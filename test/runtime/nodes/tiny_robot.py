"""A robot for the tiny policies: its file, and its drivers as publishers of a test's own."""

from __future__ import annotations

import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from graph import LATCHED, RELIABLE, SENSOR, Graph
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String
from tiny_policy import CAMERAS, JOINTS

from vla_runtime.messages.trajectories import ns_to_stamp, plan_to_message, plan_type
from vla_runtime.types import Observation, PlanRequest

ROBOT = """
format: 1
name: tiny
joints:
  - {name: shoulder, unit: rad, lower: -3.0, upper: 3.0, velocity: 10.0}
  - {name: elbow, unit: rad, lower: -3.0, upper: 3.0, velocity: 10.0}
  - {name: gripper, unit: rad, lower: -3.0, upper: 3.0, velocity: 10.0}
cameras:
  - {name: top, topic: top/image}
  - {name: wrist, topic: wrist/image, type: compressed}
joint_states:
  - {topic: joint_states, joints: [elbow, shoulder]}
  - {topic: gripper/joint_states, joints: [gripper]}
outputs:
  - {kind: joint_trajectory, topic: arm/joint_trajectory, joints: [shoulder, elbow, gripper]}
"""
STEP_TIME_S = 0.05


def write_robot(path: Path, text: str = ROBOT) -> Path:
    path.write_text(text, encoding='utf-8')
    return path


class Drivers:
    """Publishes what the robot's drivers would, one round a call, and remembers all of it.

    Attributes:
        silent: sources that do not publish: `top`, `wrist`, `arm`, `gripper`.
        offset_ns: per source, added to its stamps; None makes them zero.
        encoding: encoding of the top camera's messages.
        arm_joints: names in the arm's messages.
        gripper_position: value in the gripper's messages.
        clock_ns: makes the stamps; the node's clock unless replaced.
        frames: per camera, stamp to RGB image.
        states: per joint, stamp and position.
    """

    def __init__(self, graph: Graph, namespace: str = '') -> None:
        self._graph, self.node = graph, graph.node
        self.heal()
        self.clock_ns = lambda: int(self.node.get_clock().now().nanoseconds)
        self.frames: dict[str, dict[int, np.ndarray]] = {'top': {}, 'wrist': {}}
        self.states: dict[str, list[tuple[int, float]]] = {name: [] for name in JOINTS}
        self._random = np.random.default_rng(0)
        self._round = 0
        self._top = self._publisher(Image, f'{namespace}/top/image', SENSOR)
        self._wrist = self._publisher(CompressedImage, f'{namespace}/wrist/image', SENSOR)
        self._arm = self._publisher(JointState, f'{namespace}/joint_states', SENSOR)
        self._gripper = self._publisher(JointState, f'{namespace}/gripper/joint_states', SENSOR)
        self._plan = self._publisher(plan_type(), f'{namespace}/committed_plan', RELIABLE)
        self._instruction = self._publisher(String, f'{namespace}/vla_policy/instruction', LATCHED)

    def _publisher(self, message_type: type, topic: str, qos: Any) -> Any:
        return self.node.create_publisher(message_type, topic, qos)

    def heal(self) -> None:
        """All drivers do what they should."""
        self.silent: set[str] = set()
        self.moving = True
        self.offset_ns: dict[str, int | None] = {}
        self.encoding = 'bgr8'
        self.arm_joints = ['elbow', 'base', 'shoulder']
        self.gripper_position = 0.25

    def end_top(self) -> None:
        """End the driver of the top camera."""
        self.silent.add('top')
        self.node.destroy_publisher(self._top)

    def instruct(self, text: str) -> None:
        self._instruction.publish(String(data=text))

    def observed(
        self, report: Mapping[str, str], instruction: str, cameras: Iterable[str] = CAMERAS
    ) -> Observation:
        """The observation that a report names, from what was published."""
        stamp_ns = int(report['stamp_ns'])
        state = [np.interp(stamp_ns, *zip(*self.states[name], strict=True)) for name in JOINTS]
        images = {name: self.frames[name][int(report[f'stamp_ns.{name}'])] for name in cameras}
        return Observation(images, np.array(state), instruction)

    def wait_for_listeners(self, count: int) -> None:
        """Wait until so many nodes get what each source sends, and the requests."""
        made = (self._top, self._wrist, self._arm, self._gripper, self._plan)
        self._graph.wait_for(
            lambda: all(one.get_subscription_count() >= count for one in made),
            f'{count} nodes to listen to the drivers',
        )

    def request(
        self,
        rows: np.ndarray | None = None,
        *,
        names: tuple[str, ...] = JOINTS,
        episode: int = 0,
        certain: int = 0,
        ahead_s: float = 0.0,
        without_subscribers: bool = False,
    ) -> None:
        """Ask for a chunk as the executor does, once a policy node listens.

        `asked_ns` is then the time of the plan's first row: now, or `ahead_s` from now.
        """
        if not without_subscribers:
            listens = lambda: self._plan.get_subscription_count() > 0  # noqa: E731
            self._graph.wait_for(listens, 'a policy node to listen')
        self.asked_ns = self.clock_ns() + round(ahead_s * 1e9)
        message = plan_to_message(
            PlanRequest(
                np.zeros((0, len(names))) if rows is None else rows,
                names,
                ['position'] * len(names),
                STEP_TIME_S,
                stamp_ns=self.asked_ns,
                episode=episode,
                certain=certain,
            )
        )
        self._plan.publish(message)

    def __call__(self) -> None:
        """One round of all sources."""
        self._round += self.moving
        if 'top' not in self.silent:
            self._publish_top(self._stamp('top'))
        if 'wrist' not in self.silent:
            self._publish_wrist(self._stamp('wrist'))
        if 'arm' not in self.silent:
            angles = {name: float(np.sin(0.1 * self._round + len(name))) for name in JOINTS}
            self._publish_joints(self._arm, 'arm', self.arm_joints, angles)
        if 'gripper' not in self.silent:
            self._publish_joints(
                self._gripper, 'gripper', ['gripper'], {'gripper': self.gripper_position}
            )

    def _stamp(self, source: str) -> int:
        offset_ns = self.offset_ns.get(source, 0)
        return 0 if offset_ns is None else self.clock_ns() + offset_ns

    def _publish_top(self, stamp_ns: int) -> None:
        rgb = self._random.integers(0, 256, (48, 64, 3), dtype=np.uint8)
        self.frames['top'][stamp_ns] = rgb
        message = Image(height=48, width=64, encoding=self.encoding, step=192)
        message.header.stamp = ns_to_stamp(stamp_ns)
        message.data = array.array('B', np.ascontiguousarray(rgb[:, :, ::-1]).tobytes())
        self._top.publish(message)

    def _publish_wrist(self, stamp_ns: int) -> None:
        rgb = self._random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        self.frames['wrist'][stamp_ns] = rgb
        _, png = cv2.imencode('.png', rgb[:, :, ::-1])
        message = CompressedImage(format='png', data=array.array('B', png.tobytes()))
        message.header.stamp = ns_to_stamp(stamp_ns)
        self._wrist.publish(message)

    def _publish_joints(
        self, publisher: Any, source: str, names: list[str], angles: dict[str, float]
    ) -> None:
        stamp_ns = self._stamp(source)
        message = JointState(name=names, position=[angles.get(name, 9.0) for name in names])
        message.header.stamp = ns_to_stamp(stamp_ns)
        for name in names:
            if name in self.states:
                self.states[name].append((stamp_ns, angles[name]))
        publisher.publish(message)
