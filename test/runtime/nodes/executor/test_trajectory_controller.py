"""An arm under `joint_trajectory_controller` follows the executor at every rate of the controller.

The arm is modelled here: a servo with lag, and with sag under its own weight. The controller's
rules are the simulated robot's (`tabletop.sim.controller`), and its messages those to a subscriber
that nobody knows; `test_trajectory_message` has the rules of the real controller.
"""

from __future__ import annotations

import numpy as np
import pytest

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import CommandKind
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.nodes.executor.control_loop import ControlLoop
from vla_runtime.nodes.executor.outputs import OutputWriter
from vla_runtime.robot.match import MatchedOutput
from vla_runtime.robot.schema import RobotOutput
from vla_runtime.types import ActionChunk, ChunkHeader
from vla_tabletop.sim.controller import JointFollower

PERIOD_S, STEP_S, LAG_S, T0_NS = 0.01, 0.05, 0.04, 10**18
# Updates a second, and the latest arrival of a message after its tick, milliseconds.
CONTROLLERS = [(100, 0), (100, 9), (125, 4), (200, 4), (500, 4)]


class Arm:
    """One joint: executor, messages, controller and servo, millisecond by millisecond."""

    def __init__(self, update_hz: int, late_ms: int, sag_rad: float = 0.0) -> None:
        limits = make_limits(('j',), {'j': ColumnLimits(-2.0, 2.0, 4.0, 30.0, 0.4)})
        self.core = ChunkExecutor(
            ExecutorConfig((Column('j'),), limits, control_period_s=PERIOD_S), ExecutorParameters()
        )
        output = RobotOutput(kind='joint_trajectory', topic='arm', joints=('j',))
        writer = OutputWriter(MatchedOutput(output, (0,), ('j',)), self, PERIOD_S)
        self.loop = ControlLoop(self.core, [writer], lambda: self.now_ns, self._note_request)
        self.follower = JointFollower(['j'], np.zeros(1))
        self.position, self.lag_rad, self.command = 0.0, [0.0], 0.0
        self._servo, self._sag_rad = 0.0, sag_rad
        self._every_ms, self._late_ms = 1000 // update_hz, late_ms
        self._random = np.random.default_rng(0)
        self._way: list[tuple[int, list[float], list[list[float]]]] = []
        self._request: int | None = None
        self._chunks, self._begun_s = 0, 0.0
        self.now_ms = 0

    @property
    def now_s(self) -> float:
        return self.now_ms * 1e-3

    @property
    def now_ns(self) -> int:
        return T0_NS + self.now_ms * 1_000_000

    def publish(self, message) -> None:
        due = self.now_ms + int(self._random.integers(0, self._late_ms + 1))
        times = [point.time_from_start.nanosec * 1e-9 for point in message.points]
        self._way.append((due, times, [list(point.positions) for point in message.points]))
        self.command = message.points[-1].positions[0]

    def _note_request(self, plan) -> None:
        self._request = plan.request

    def run(self, seconds: float, amplitude: float = 0.0) -> None:
        """Go on; with an amplitude, answer every request with a sine of 1.5 rad/s."""
        for _ in range(round(seconds * 1000)):
            if self.now_ms % 10 == 0:
                self.loop.observe_state(('j',), [self.position], self.now_ns)
                self.loop.tick(self.now_s)
                self._answer(amplitude)
            while self._way and self._way[0][0] <= self.now_ms:
                _, times, positions = self._way.pop(0)
                self.follower.follow(['j'], times, np.array(positions))
            if self.now_ms % self._every_ms == 0:
                measured = np.array([self.position])
                self._servo = float(self.follower.update(self.now_s, measured)[0])
            self.position += (self._servo - self._sag_rad - self.position) * 1e-3 / LAG_S
            self.lag_rad.append(abs(self.command - self.position))
            self.now_ms += 1

    def _answer(self, amplitude: float) -> None:
        if self._request is None or not amplitude:
            return
        times = self.now_s + STEP_S * np.arange(1, 17)
        chunk = ActionChunk(
            amplitude * np.sin(1.5 * (times - self._begun_s))[:, None],
            ('j',),
            ('position',),
            STEP_S,
            np.zeros((16, 0), np.float32),
        )
        self.core.submit_chunk(
            chunk,
            ChunkHeader(self.now_ns, 0, self._chunks, request=self._request),
            self.now_s,
            self.now_ns,
        )
        self._chunks += 1
        self._request = None

    def start(self) -> None:
        self.run(0.6)
        self._begun_s = self.now_s
        assert self.loop.start(self.now_s).started


@pytest.mark.parametrize(('update_hz', 'late_ms'), CONTROLLERS)
def test_an_arm_follows_its_plan(update_hz: int, late_ms: int) -> None:
    arm = Arm(update_hz, late_ms)
    arm.start()
    arm.run(5.0, amplitude=0.8)
    assert arm.core.status().kind is CommandKind.TRACK
    # 1.2 rad/s at most: the servo's lag, and at most two periods of the executor.
    assert max(arm.lag_rad[1100:]) < 1.2 * (LAG_S + 2.5 * PERIOD_S)


@pytest.mark.parametrize(('update_hz', 'late_ms'), CONTROLLERS)
def test_an_arm_that_sags_under_its_weight_does_not_sink_while_it_holds(
    update_hz: int, late_ms: int
) -> None:
    arm = Arm(update_hz, late_ms, sag_rad=0.02)
    arm.start()
    arm.run(20.0)
    # From the start on it sags twice: below where it stood, which was held at the start.
    assert arm.position > -0.05
    assert not arm.core.status().gave_way
