"""The soak's simulated robot: joints that follow their commands with a lag, and what was commanded.

Every command is recorded with its header stamp and the time at which it came.
"""

from __future__ import annotations

import array
import time

import numpy as np
from sensor_msgs.msg import JointState
from soak_checks import Commands
from three_cameras import SENSOR, Graph

from vla_runtime.ros.executor.steady_loop import SteadyLoop
from vla_runtime.ros.messages.conversions import ns_to_stamp, stamp_to_ns
from vla_runtime.ros.robot.schema import Robot

# Beside the helpers that three_cameras makes importable.
from rclpy.qos import QoSProfile, ReliabilityPolicy  # isort: skip

RATE_HZ = 100.0
LAG_S = 0.04
# Half of max_state_age_s: what comes later may stop the robot.
_LATE_S = 0.1
# As a push would: over so long.
_PUSHED_WITHIN_S = 0.05
_ALL = QoSProfile(depth=1000, reliability=ReliabilityPolicy.RELIABLE)


class _Side:
    """One arm: a topic of joint states, and one of commands."""

    def __init__(self, graph: Graph, robot: Robot, index: int) -> None:
        source, output = robot.joint_states[index], robot.outputs[index]
        assert source.joints == output.joints
        order = [joint.name for joint in robot.joints]
        self.columns = [order.index(name) for name in source.joints]
        self.names = [robot.joint(name).in_messages for name in source.joints]
        self.newest: np.ndarray | None = None
        self.stamps, self.arrivals = array.array('q'), array.array('q')
        self.numbers = array.array('d')
        self.publisher = graph.node.create_publisher(JointState, '/' + source.topic, SENSOR)
        self._subscription = graph.node.create_subscription(
            JointState, '/' + output.topic, self._on_command, _ALL
        )

    def _on_command(self, message: JointState) -> None:
        # The stamps last: whoever counts them finds all the rest.
        self.numbers.extend(message.position)
        self.arrivals.append(time.time_ns())
        self.stamps.append(stamp_to_ns(message.header.stamp))
        self.newest = np.array(message.position)


class SimulatedRobot:
    """Publishes joint states at 100 Hz on a thread of its own.

    Attributes:
        silent: True while nothing is published.
        sensor_error: (joints,) added to what it publishes.
        positions: (joints,) where its joints are.
        problems: exceptions of the robot's thread.
        late: when a joint state came late, and by how much, ns.
    """

    def __init__(self, graph: Graph, robot: Robot, positions: np.ndarray) -> None:
        self.silent = False
        self.sensor_error = np.zeros(len(positions))
        self.positions = positions.copy()
        self.problems: list[str] = []
        self.late: list[tuple[int, int]] = []
        self._graph = graph
        self._lower = np.array([joint.lower for joint in robot.joints])
        self._upper = np.array([joint.upper for joint in robot.joints])
        self._pushed = np.full(len(positions), np.nan)
        self._last_s = time.monotonic()
        self._sides = [_Side(graph, robot, index) for index in range(len(robot.outputs))]
        self._loop = SteadyLoop(
            self._tick, RATE_HZ, 'robot', lambda error: self.problems.append(repr(error))
        )
        self._loop.start()

    def push(self, joint: int, by: float) -> None:
        """Hold a joint `by` away from where it is, within its range, until `let_go`."""
        self._pushed[joint] = np.clip(
            self.positions[joint] + by, self._lower[joint], self._upper[joint]
        )

    def let_go(self) -> None:
        """Follow the commands again."""
        self._pushed[:] = np.nan

    def commands(self) -> Commands:
        """Everything that both arms were commanded together, so far."""
        stamps = [np.array(side.stamps) for side in self._sides]
        common = stamps[0]
        for other in stamps[1:]:
            common = np.intersect1d(common, other)
        positions = np.zeros((len(common), len(self.positions)))
        arrivals = np.zeros(len(common), dtype=np.int64)
        for side, own in zip(self._sides, stamps, strict=True):
            numbers = np.array(side.numbers)[: len(own) * len(side.columns)]
            _, _, rows = np.intersect1d(common, own, return_indices=True)
            positions[:, side.columns] = numbers.reshape(len(own), -1)[rows]
            arrivals = np.maximum(arrivals, np.array(side.arrivals)[: len(own)][rows])
        return Commands(common, arrivals, positions)

    def close(self) -> None:
        self._loop.stop(2.0)

    def _tick(self, now_s: float) -> None:
        passed_s, self._last_s = now_s - self._last_s, now_s
        if passed_s > _LATE_S:
            self.late.append((time.time_ns(), round((passed_s - 1.0 / RATE_HZ) * 1e9)))
        for side in self._sides:
            if side.newest is not None:
                self._follow(side, side.newest, passed_s)
        held = np.isfinite(self._pushed)
        share = 1.0 - np.exp(-passed_s / _PUSHED_WITHIN_S)
        self.positions[held] += share * (self._pushed - self.positions)[held]
        if self.silent:
            return
        stamp = ns_to_stamp(time.time_ns())
        measured = self.positions + self.sensor_error
        for side in self._sides:
            message = JointState(name=side.names, position=measured[side.columns].tolist())
            message.header.stamp = stamp
            side.publisher.publish(message)

    def _follow(self, side: _Side, commanded: np.ndarray, passed_s: float) -> None:
        share = 1.0 - np.exp(-passed_s / LAG_S)
        free = ~np.isfinite(self._pushed[side.columns])
        own = self.positions[side.columns]
        own[free] += share * (commanded - own)[free]
        self.positions[side.columns] = np.clip(
            own, self._lower[side.columns], self._upper[side.columns]
        )
