"""Surroundings of the executor under test: an arm that follows, and chunks by hand."""

from __future__ import annotations

import threading

import numpy as np
from graph import RELIABLE, SENSOR, Graph
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from tabletop_policy import HORIZON, STEP_TIME_S
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.messages.trajectories import (
    chunk_to_message,
    message_to_plan,
    ns_to_stamp,
)
from vla_runtime.types import ActionChunk, ChunkHeader
from vla_tabletop.sim.world import JOINT_NAMES

HOME = np.array([0.1, -0.3, 1.6, 1.7, 0.0, 0.2])
_PERIOD_S = 0.02


class Arm:
    """Publishes joint states all the time; the joints are wherever they were last commanded.

    Attributes:
        follows: True while the joints go where they are commanded.
        silent: True while nothing is published.
        names: in its messages.
        positions: (6,) of its joints.
        commands: messages that the arm's controller got, in order.
        plans: requests of the executor.
    """

    def __init__(self, graph: Graph, namespace: str = '') -> None:
        self._graph = graph
        self.heal()
        self.go_home()
        self.commands: list[JointTrajectory] = []
        self.plans: list[JointTrajectory] = []
        node = graph.node
        self._states = node.create_publisher(JointState, f'{namespace}/joint_states', SENSOR)
        self._chunks = node.create_publisher(JointTrajectory, f'{namespace}/action_chunk', RELIABLE)
        self._subscriptions = [
            node.create_subscription(
                JointTrajectory,
                f'{namespace}/arm_controller/joint_trajectory',
                self._on_arm,
                RELIABLE,
            ),
            node.create_subscription(
                JointTrajectory, f'{namespace}/committed_plan', self.plans.append, RELIABLE
            ),
        ]
        self._gripper_topic = f'{namespace}/gripper_controller/commands'
        self.plug_gripper_in()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def plug_gripper_in(self) -> None:
        """Take the gripper's commands."""
        self._gripper = self._graph.node.create_subscription(
            Float64MultiArray, self._gripper_topic, self._on_gripper, RELIABLE
        )

    def unplug_gripper(self) -> None:
        """End the gripper's controller."""
        self._graph.node.destroy_subscription(self._gripper)

    def close(self) -> None:
        """Stop publishing and leave the graph."""
        self._stop.set()
        self._thread.join()
        for subscription in (*self._subscriptions, self._gripper):
            self._graph.node.destroy_subscription(subscription)
        for publisher in (self._states, self._chunks):
            self._graph.node.destroy_publisher(publisher)

    def go_home(self) -> None:
        """Be where it began, by hand."""
        self.positions = HOME.copy()

    def heal(self) -> None:
        """Publish and follow as it should."""
        self.follows, self.silent = True, False
        self.names = list(JOINT_NAMES)

    def now_ns(self) -> int:
        return int(self._graph.node.get_clock().now().nanoseconds)

    def state_ns(self) -> int:
        """Stamp of a joint state."""
        return self.now_ns()

    def commanded(self) -> np.ndarray:
        """(n, 5) positions that the arm was commanded, in order."""
        return np.array([list(command.points[-1].positions) for command in self.commands])

    def longest_way(self) -> float:
        """Longest way of a joint within one command, rad.

        Each command carries the one before it, so that one that a busy machine loses between two
        others is no step.
        """
        ways = [np.ptp([p.positions for p in command.points], axis=0) for command in self.commands]
        return float(np.max(ways))

    def answer(self, number: int, rise_rad: float = 0.02, **changes) -> JointTrajectory:
        """Answer the newest request: every joint rises by `rise_rad` a step, from where it is."""
        plan = message_to_plan(self.plans[-1])
        actions = self.positions + rise_rad * np.arange(1, HORIZON + 1)[:, None]
        chunk = ActionChunk(
            actions=changes.get('actions', actions),
            names=changes.get('names', JOINT_NAMES),
            kinds=('position',) * len(JOINT_NAMES),
            step_time_s=STEP_TIME_S,
            normalised=np.zeros((HORIZON, 0), dtype=np.float32),
        )
        message = chunk_to_message(
            chunk,
            ChunkHeader(
                changes.get('stamp_ns', self.now_ns()),
                changes.get('episode', plan.episode),
                number,
                tied=False,
            ),
        )
        self.send(message)
        return message

    def send(self, message: JointTrajectory) -> None:
        """Publish a chunk as it is."""
        self._chunks.publish(message)

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            if self.silent:
                continue
            message = JointState(name=self.names, position=self.positions.tolist())
            message.header.stamp = ns_to_stamp(self.state_ns())
            self._states.publish(message)

    def _on_arm(self, message: JointTrajectory) -> None:
        self.commands.append(message)
        if self.follows:
            self.positions[:5] = message.points[-1].positions

    def _on_gripper(self, message: Float64MultiArray) -> None:
        if self.follows:
            self.positions[5] = message.data[0]
