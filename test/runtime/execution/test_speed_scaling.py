"""Plan time follows the speed scaling within the limits of acceleration."""

from __future__ import annotations

import numpy as np
import pytest
from reported_states import report
from watched_executor import WatchedExecutor

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import Reason
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.types import ActionChunk, ChunkHeader

PERIOD_S, STEP_S, T0_NS, SPEED, ACCELERATION = 0.01, 0.05, 10**18, 0.8, 8.0


class Robot:
    """An executor on a ramp of `SPEED`, and a robot that is where it is commanded."""

    def __init__(self) -> None:
        limits = make_limits(('j',), {'j': ColumnLimits(-9.0, 9.0, 1.5, ACCELERATION, 0.5)})
        self.core = WatchedExecutor(
            ExecutorConfig((Column('j'),), limits, control_period_s=PERIOD_S), ExecutorParameters()
        )
        self.ticks, self.chunks, self.positions = 0, 0, [0.0]
        report(self.core.observe_state, ('j',), self.positions, self.now_ns)
        self.tick()
        assert self.core.start(self.now_s, self.now_ns).started

    @property
    def now_s(self) -> float:
        return self.ticks * PERIOD_S

    @property
    def now_ns(self) -> int:
        return T0_NS + self.ticks * 10_000_000

    def tick(self) -> None:
        self.ticks += 1
        self.core.observe_state(('j',), [self.positions[-1]], self.now_ns)
        command = self.core.tick(self.now_s, self.now_ns)
        self.positions.append(float(command.setpoints[0]))
        request = self.core.poll_request(self.now_s, self.now_ns)
        if request is not None:
            rows = self.positions[-1] + SPEED * STEP_S * np.arange(1, 31)[:, None]
            if len(request.rows):
                rows = request.rows[0, 0] + SPEED * STEP_S * np.arange(0, 30)[:, None]
            chunk = ActionChunk(rows, ('j',), ('position',), STEP_S, np.zeros((30, 0), np.float32))
            self.core.submit_chunk(
                chunk,
                ChunkHeader(self.now_ns, 0, self.chunks, request=request.request),
                self.now_s,
                self.now_ns,
            )
            self.chunks += 1

    def run(self, seconds: float) -> np.ndarray:
        """Go on; return the speed of every tick."""
        begin = len(self.positions) - 1
        for _ in range(round(seconds / PERIOD_S)):
            self.tick()
        return np.diff(self.positions[begin:]) / PERIOD_S


@pytest.mark.parametrize('factor', [0.7, 0.3, 0.05])
def test_a_plan_is_followed_at_the_share_of_its_speed(factor: float) -> None:
    robot = Robot()
    assert robot.run(2.0)[-50:].mean() == pytest.approx(SPEED, rel=0.02)
    robot.core.set_speed_scaling(factor)
    robot.run(0.5)
    assert robot.run(2.0).mean() == pytest.approx(factor * SPEED, rel=0.05)
    robot.core.set_speed_scaling(1.0)
    robot.run(1.0)
    assert robot.run(1.0).mean() == pytest.approx(SPEED, rel=0.02)


def test_zero_holds_without_a_jump_and_goes_on_where_it_was() -> None:
    robot = Robot()
    robot.run(2.0)
    robot.core.set_speed_scaling(0.0)
    speeds = np.concatenate([robot.run(1.0), robot.run(30.0)])
    assert robot.core.status().reason is Reason.SPEED_SCALED_TO_ZERO
    assert np.abs(np.diff(speeds) / PERIOD_S).max() <= ACCELERATION * 1.001
    assert speeds.min() > -1e-9 and not speeds[50:].any()
    at = robot.positions[-1]
    robot.core.set_speed_scaling(1.0)
    speeds = robot.run(2.0)
    assert np.abs(np.diff(speeds) / PERIOD_S).max() <= ACCELERATION * 1.001
    assert speeds.min() > -1e-9 and speeds[-20:].mean() == pytest.approx(SPEED, rel=0.05)
    assert robot.positions[-1] > at + 1.0


def test_a_stop_is_not_scaled() -> None:
    robot = Robot()
    robot.run(2.0)
    robot.core.set_speed_scaling(0.3)
    robot.run(1.0)
    robot.core.stop()
    assert not robot.run(0.5)[-30:].any()


@pytest.mark.parametrize('said', [float('nan'), -1.0])
def test_what_is_no_share_holds(said: float) -> None:
    robot = Robot()
    robot.run(1.0)
    robot.core.set_speed_scaling(said)
    robot.run(1.0)
    assert robot.core.status().reason is Reason.SPEED_SCALED_TO_ZERO
