"""The soak's simulated robot: joints that follow their commands with a lag.

Every command is recorded with its header stamp and the time at which it came.
"""

from __future__ import annotations

import array
import time

import numpy as np
from parts.graph_rig import SENSOR, Graph
from parts.soak_checks import Commands
from sensor_msgs.msg import JointState

from vla_runtime.messages.trajectories import ns_to_stamp, stamp_to_ns
from vla_runtime.nodes.executor.steady_loop import SteadyLoop
from vla_runtime.robot.schema import Robot

# Beside the helpers that graph_rig makes importable.
from rclpy.qos import QoSProfile, ReliabilityPolicy  # isort: skip

RATE_HZ = 100.0
LAG_S = 0.04
# A joint that is so near to its command has come back to it, rad or m.
_BACK = 0.005
# Half of max_state_age_s: what comes later may stop the robot.
_LATE_S = 0.1
# Powered motors wait this long for a hold at the measured position.
_ANSWER_S = 15.0
# Duration of a push.
_PUSHED_WITHIN_S = 0.05
# `frame_id` of commands that a fault sends.
OTHER = 'another node'
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
        if message.header.frame_id:
            # Of another node (`OTHER`), which holds the robot where it is.
            return
        # Stamps last: whoever counts them finds the other data complete.
        self.numbers.extend(message.position)
        self.arrivals.append(time.time_ns())
        self.stamps.append(stamp_to_ns(message.header.stamp))
        self.newest = np.array(message.position)


class SimulatedRobot:
    """Publishes joint states at 100 Hz on a thread of its own.

    Attributes:
        silent: nothing is published.
        sensor_error: (joints,) added to what it publishes.
        errs_for: samples for which it errs; below 0: without end.
        repeats: old measurements are published under new stamps.
        every: periods between two joint states.
        positions: (joints,) where its joints are.
        late: when a joint state was late, and by how much, ns.
    """

    def __init__(self, graph: Graph, robot: Robot, positions: np.ndarray) -> None:
        self.silent = False
        self.powered = True
        self.sensor_error = np.zeros(len(positions))
        self.errs_for = -1
        self.repeats = False
        self.every = 1
        # Stamps ahead of the clock: by how much, ns, and how many remain.
        self._ahead_ns, self._ahead_for = 0, 0
        self._periods = 0
        self._measured = positions.copy()
        self.positions = positions.copy()
        self.problems: list[str] = []
        self.late: list[tuple[int, int]] = []
        self._graph = graph
        self._turns = np.array([joint.unit == 'rad' for joint in robot.joints])
        self._lower = np.array([joint.lower for joint in robot.joints])
        self._upper = np.array([joint.upper for joint in robot.joints])
        self._velocity = np.array([joint.velocity for joint in robot.joints])
        self._pushed = np.full(len(positions), np.nan)
        # Joints that were pushed, until they are back at their command.
        self._springs = np.zeros(len(positions), dtype=bool)
        self._mark, self._furthest = positions.copy(), np.zeros(len(positions))
        # Target of a hand, and its way a period.
        self._guided: tuple[np.ndarray, np.ndarray] | None = None
        # Steady time until which motors wait to come on; infinite if none do.
        self._waits_until_s = float('inf')
        self._last_s = time.monotonic()
        self._sides = [_Side(graph, robot, index) for index in range(len(robot.outputs))]
        # Past positions and their times.
        self._times, self._places = array.array('q'), array.array('d')
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
        self._springs |= np.isfinite(self._pushed)
        self._pushed[:] = np.nan

    def stamp_ahead(self, seconds: float, samples: int) -> None:
        """Stamp the next joint states so many seconds ahead of the clock."""
        self._ahead_ns, self._ahead_for = round(seconds * 1e9), samples

    def guide(self, by: np.ndarray, seconds: float) -> None:
        """Let a hand move it, within its range, and wait until it is there."""
        where = np.clip(self.positions + by, self._lower, self._upper)
        self._guided = where, np.abs(where - self.positions) / (seconds * RATE_HZ)
        end_s = time.monotonic() + 2.0 * seconds + 1.0
        while self._guided is not None and time.monotonic() < end_s:
            time.sleep(0.01)

    def power_on(self) -> None:
        """The motors come on once the command is where the robot is, or after a while without.

        Joint states come first, as the page on safety asks of a driver.
        """
        self.silent, self._waits_until_s = False, time.monotonic() + _ANSWER_S

    def mark(self) -> None:
        """Count motion of the motors from here on."""
        self._mark, self._furthest = self.positions.copy(), np.zeros(len(self.positions))

    def moved(self) -> np.ndarray:
        """(joints,) how far the motors have moved each joint away from the mark, at most."""
        return self._furthest.copy()

    @property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """(n,) times, ns, and (n, joints) positions then."""
        times = np.array(self._times)
        places = np.array(self._places)[: len(times) * len(self.positions)]
        return times, places.reshape(len(times), -1)

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
        times, places = self.places
        at = np.maximum(np.searchsorted(times, common, side='right') - 1, 0)
        return Commands(common, arrivals, positions, places[at])

    def close(self) -> None:
        self._loop.stop(2.0)

    def _tick(self, now_s: float) -> None:
        passed_s, self._last_s = now_s - self._last_s, now_s
        if passed_s > _LATE_S:
            self.late.append((time.time_ns(), round((passed_s - 1.0 / RATE_HZ) * 1e9)))
        if self._guided is not None:
            self._let_hand_move(*self._guided)
        if self._may_follow(now_s):
            for side in self._sides:
                if side.newest is not None:
                    self._follow(side, side.newest, passed_s)
        held = np.isfinite(self._pushed)
        share = 1.0 - np.exp(-passed_s / _PUSHED_WITHIN_S)
        self.positions[held] += share * (self._pushed - self.positions)[held]
        # Whoever pushes moves it, and not its motors.
        self._mark[held] = self.positions[held]
        now_ns = time.time_ns()
        self._places.extend(self.positions)
        self._times.append(now_ns)
        self._periods += 1
        if self.silent or self._periods % self.every:
            return
        stamp = ns_to_stamp(now_ns + (self._ahead_ns if self._ahead_for > 0 else 0))
        self._ahead_for -= self._ahead_for > 0
        if not self.repeats:
            self._measured = self.positions + self.sensor_error * (self.errs_for != 0)
        measured = self._measured
        self.errs_for -= self.errs_for > 0
        for side in self._sides:
            message = JointState(name=side.names, position=measured[side.columns].tolist())
            message.header.stamp = stamp
            side.publisher.publish(message)

    def _let_hand_move(self, where: np.ndarray, step: np.ndarray) -> None:
        self.positions += np.clip(where - self.positions, -step, step)
        self._mark = self.positions.copy()
        if np.allclose(self.positions, where, atol=1e-9):
            self._guided = None

    def _may_follow(self, now_s: float) -> bool:
        if not self.powered and (now_s >= self._waits_until_s or self._command_has_come()):
            self.powered, self._waits_until_s = True, float('inf')
            self.mark()
        return self.powered

    def _command_has_come(self) -> bool:
        """Return whether motors are due and every arm joint is where it is commanded."""
        return self._waits_until_s < float('inf') and all(
            side.newest is None or not (self._away(side) > _BACK).any() for side in self._sides
        )

    def _away(self, side: _Side) -> np.ndarray:
        away = np.abs(side.newest - self.positions[side.columns])
        return np.where(self._turns[side.columns], away, 0.0)

    def _follow(self, side: _Side, commanded: np.ndarray, passed_s: float) -> None:
        columns = side.columns
        share, most = 1.0 - np.exp(-passed_s / LAG_S), self._velocity[columns] * passed_s
        own = self.positions[columns]
        step = np.clip(share * (commanded - own), -most, most)
        own = np.where(np.isfinite(self._pushed[columns]), own, own + step)
        self.positions[columns] = np.clip(own, self._lower[columns], self._upper[columns])
        # One that springs back from a push is moved by whoever pushed it.
        springs = self._springs[columns]
        self._mark[columns] = np.where(springs, own, self._mark[columns])
        self._springs[columns] &= np.abs(commanded - own) > _BACK
        away = np.abs(self.positions - self._mark)[columns]
        self._furthest[columns] = np.maximum(self._furthest[columns], away)
