"""A bench whose commands have stamps, so that speeds and accelerations can be read from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from executor_bench import PATIENT_ROBOT, RELIABLE, Arm, Bench
from graph import Graph
from sensor_msgs.msg import JointState

from vla_runtime.messages.trajectories import stamp_to_ns

# Of every joint of the robot file.
VELOCITY, ACCELERATION = 3.0, 40.0
TOPIC = 'arm/commands'
STAMPED_ROBOT = PATIENT_ROBOT.replace(
    'kind: joint_trajectory\n    topic: arm_controller/joint_trajectory',
    f'kind: joint_state\n    topic: {TOPIC}',
)


class StampedArm(Arm):
    """The arm of the bench, commanded by stamped positions.

    Attributes:
        stamped: (stamp in seconds, (5,) positions) of each command, in order.
    """

    def __init__(self, graph: Graph, namespace: str = '') -> None:
        self.stamped: list[tuple[float, np.ndarray]] = []
        super().__init__(graph, namespace)
        self._subscriptions.append(
            graph.node.create_subscription(
                JointState, f'{namespace}/{TOPIC}', self._on_stamped, RELIABLE
            )
        )

    def _on_stamped(self, message: JointState) -> None:
        stamp_s = stamp_to_ns(message.header.stamp) * 1e-9
        place = np.array(message.position)
        self.stamped.append((stamp_s, place))
        if self.follows:
            self.positions[:5] = place


class StampedBench(Bench):
    """One executor and its stamped arm; `more` is added to the robot file."""

    def __init__(self, made: Graph, bundle: Path, namespace: str, more: str = '') -> None:
        robot = bundle.parent / f'stamped_{namespace.strip("/")}.yaml'
        robot.write_text(f'{STAMPED_ROBOT}{more}', encoding='utf-8')
        super().__init__(made, bundle, namespace, '-p', f'robot:={robot}')
        self.arm.close()
        self.arm = StampedArm(made, namespace)

    def begin(self) -> None:
        super().begin()
        self.arm.stamped.clear()

    @property
    def stamped(self) -> list[tuple[float, np.ndarray]]:
        return self.arm.stamped

    def place(self) -> np.ndarray:
        """Position of the newest command, (5,)."""
        return self.stamped[-1][1]

    def wait_for_stamped(self, count: int) -> None:
        target = len(self.stamped) + count
        self.graph.wait_for(lambda: len(self.stamped) >= target, f'{count} more commands')

    def assert_within_limits(self) -> None:
        """No command is faster, or more sudden, than the robot file allows, by their stamps.

        A command that is lost on its way makes a mean of two, which keeps the same bounds.
        """
        taken = list(self.stamped)
        assert len(taken) > 5
        times = np.array([stamp_s for stamp_s, _ in taken])
        places = np.array([place for _, place in taken])
        spans = np.diff(times)[:, None]
        assert (spans > 0.0).all()
        speeds = np.diff(places, axis=0) / spans
        # Stamps are rounded to nanoseconds, and the differences of seconds to tenths of them.
        assert np.abs(speeds).max() <= VELOCITY * 1.001
        changes = np.abs(np.diff(speeds, axis=0)) / (0.5 * (spans[1:] + spans[:-1]))
        assert changes.max() <= ACCELERATION * 1.01, changes.max()
