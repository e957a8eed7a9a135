"""An arm that goes to its last command as a servo does, its states, and a policy that answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from executor_bench import HOME, Arm, chunk_message
from graph import Graph
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.messages.trajectories import message_to_plan, ns_to_stamp
from vla_runtime.types import ChunkHeader
from vla_tabletop.sim.world import JOINT_NAMES

# What the demo's policy has.
HORIZON, STEP_TIME_S = 30, 0.05
# A servo's speed, rad/s, and the speed of a person's hand.
SERVO, HAND = 3.0, 1.0
_PERIOD_S = 0.01
# Where the policy goes: far enough for a test, and not with the elbow.
_GOAL = HOME + np.array([1.4, 0.3, 0.0, -0.5, 1.4, 0.0])
_SPEED = 0.15
# A command so near is where the arm is, rad.
_THERE = 0.05

Change = Callable[[JointState], JointState]


class LatchedArm(Arm):
    """Follows its latch, the last command, at a servo's speed; a hand may guide it meanwhile.

    Args:
        graph: the test's.
        namespace: of the executor.
        rate_hz: rate of the joint states.

    Attributes:
        latch: (6,) the last command; None before the first.
        answers: the policy answers.
        false_samples: that are still to be published, changed by `change`.
        published: count of joint states.
    """

    QOS = 10

    def __init__(self, graph: Graph, namespace: str, rate_hz: float) -> None:
        self._every_s = 1.0 / rate_hz
        self.latch: np.ndarray | None = None
        self.answers = True
        self.false_samples = 0
        self.change: Change = lambda message: message
        self.published = 0
        self._number = 0
        self._mark = HOME.copy()
        self._furthest = np.zeros(6)
        # Where a hand takes it.
        self._guided: np.ndarray | None = None
        super().__init__(graph, namespace)

    # ------------------------------------------------------------ what happens to it

    def mark(self) -> None:
        """Count motion from here on."""
        self._mark, self._furthest = self.positions.copy(), np.zeros(6)

    def moved(self) -> np.ndarray:
        """(6,) how far its motors have moved each joint away from the mark, at most."""
        return self._furthest.copy()

    def guide(self, by: np.ndarray) -> None:
        """Let a person's hand move it, and wait until it is there."""
        self._guided = self.positions + by
        self._graph.wait_for(lambda: self._guided is None, 'a hand that guides the arm')
        self.mark()

    def power_on(self) -> None:
        """The joint states come, and the motors once the command is where the arm is."""
        self.silent = False
        self._graph.wait_for(
            lambda: self.latch is None or np.abs(self.latch - self.positions)[:5].max() <= _THERE,
            'a hold where the arm is',
        )
        self.mark()
        self.follows = True

    def glitch(self, samples: int, change: Change) -> None:
        """Publish so many false samples, and three true ones after them."""
        self.mark()
        self.change, self.false_samples = change, samples
        self._graph.wait_for(lambda: not self.false_samples, f'{samples} false samples')
        count = self.published + 3
        self._graph.wait_for(lambda: self.published >= count, 'true samples')

    # ------------------------------------------------------------ its threads

    def _run(self) -> None:
        last_s = published_s = time.monotonic()
        while not self._stop.wait(min(_PERIOD_S, self._every_s)):
            now_s = time.monotonic()
            # A thread that was kept waiting has missed periods; the arm has not.
            elapsed_s, last_s = min(now_s - last_s, _PERIOD_S), now_s
            if self._guided is not None:
                self._go(self._guided, HAND * elapsed_s)
                if np.array_equal(self.positions, self._guided):
                    self._guided = None
            if self.follows and self.latch is not None:
                self._go(self.latch, SERVO * elapsed_s)
                np.maximum(self._furthest, np.abs(self.positions - self._mark), out=self._furthest)
            if not self.silent and now_s - published_s >= self._every_s - 1e-4:
                published_s = now_s
                self._publish()

    def _go(self, where: np.ndarray, step: float) -> None:
        self.positions = self.positions + np.clip(where - self.positions, -step, step)

    def _publish(self) -> None:
        positions = [float(self.positions[JOINT_NAMES.index(name)]) for name in self.names]
        message = JointState(name=self.names, position=positions)
        message.header.stamp = ns_to_stamp(self.now_ns())
        if self.false_samples:
            self.false_samples -= 1
            message = self.change(message)
        self._states.publish(message)
        self.published += 1

    def _on_arm(self, message: JointTrajectory) -> None:
        self.commands.append(message)
        self._take(slice(0, 5), np.array(message.points[-1].positions))

    def _on_gripper(self, message: Float64MultiArray) -> None:
        self._take(slice(5, 6), np.array(message.data))

    def _take(self, joints: slice, numbers: np.ndarray) -> None:
        latch = self.positions.copy() if self.latch is None else self.latch.copy()
        latch[joints] = numbers
        self.latch = latch

    def _on_request(self, request: Any) -> None:
        if not self.answers:
            return
        plan = message_to_plan(request)
        at = self.positions
        if len(plan.rows):
            at = np.array(plan.rows[min(max(plan.certain - 1, 0), len(plan.rows) - 1)])
        rows = []
        for _ in range(HORIZON):
            at = at + np.clip(_GOAL - at, -_SPEED * STEP_TIME_S, _SPEED * STEP_TIME_S)
            rows.append(at)
        self._number += 1
        header = ChunkHeader(
            self.now_ns(), plan.episode, self._number, tied=False, request=plan.request
        )
        self.send(chunk_message(np.array(rows), header))
