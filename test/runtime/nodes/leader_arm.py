"""A person's leader arm in the graph: it speaks at its rate, and does as a test says."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
from executor_bench import HOME
from graph import Graph
from sensor_msgs.msg import JointState, Joy

from vla_runtime.messages.trajectories import ns_to_stamp
from vla_tabletop.sim.world import JOINT_NAMES

# The leader counts in degrees, under names of its own.
LEADER_YAML = f"""
leader:
  topic: leader/joint_states
  mode: offset
  joints: [{', '.join(f'{{joint: {name}, name: l_{name}, unit: deg}}' for name in JOINT_NAMES[:5])}]
"""


class LeaderArm:
    """Publishes from a thread of its own, `away` rad from the robot's home.

    Attributes:
        silent: it has died.
        glitch: what a message in five says instead of its first joint, deg; None: nothing.
        wave_rad: height of its motion, half a turn of it a second.
    """

    def __init__(self, graph: Graph, namespace: str, rate_hz: float, away: float = 0.5) -> None:
        self.silent, self.wave_rad = False, 0.15
        self.glitch: float | None = None
        self.place = HOME[:5] + away
        self._graph, self._period_s = graph, 1.0 / rate_hz
        node = graph.node
        self._publisher = node.create_publisher(JointState, f'{namespace}/leader/joint_states', 10)
        self._joy = node.create_publisher(Joy, f'{namespace}/joy', 10)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def press(self, pressed: bool) -> None:
        self._joy.publish(Joy(buttons=[0, int(pressed)]))

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(self._period_s):
            number += 1
            if self.silent:
                continue
            way = self.wave_rad * math.sin(math.pi * time.monotonic())
            degrees = np.degrees(self.place + way)
            if self.glitch is not None and number % 5 == 0:
                degrees[0] = self.glitch
            message = JointState(
                name=[f'l_{name}' for name in JOINT_NAMES[:5]], position=degrees.tolist()
            )
            message.header.stamp = ns_to_stamp(self._graph.node.get_clock().now().nanoseconds)
            self._publisher.publish(message)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._graph.node.destroy_publisher(self._publisher)
        self._graph.node.destroy_publisher(self._joy)
