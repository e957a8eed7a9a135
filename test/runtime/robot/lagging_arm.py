"""The shipped robots, and one that follows its commands late, by a model of its drives."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from paths import ROOT
from tiny_policy import tiny_spec

from vla_runtime.bundle.schema import ActionSpec, StateSpec
from vla_runtime.execution.command import Command, CommandKind
from vla_runtime.execution.config import ExecutorConfig, Mode
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.robot.file import Robot, load_robot
from vla_runtime.robot.match import RobotMatch, match_robot
from vla_runtime.types import ActionChunk, ChunkHeader

FILES = [
    file
    for file in sorted((ROOT / 'config' / 'robots').glob('*.yaml'))
    if all(output.joints for output in load_robot(file).outputs)
]


def matched(robot: Robot) -> RobotMatch:
    """The robot with a policy that speaks its own names and units and needs no camera."""
    spec = replace(
        tiny_spec(),
        cameras=(),
        state=tuple(StateSpec(joint.name, joint.unit) for joint in robot.joints),
        actions=tuple(ActionSpec(joint.name, joint.unit, 'absolute') for joint in robot.joints),
    )
    return match_robot(robot, spec, 'bundle')


# --- A robot that follows its commands late, by a model of its drives, and a policy that rests

PERIOD_S = 0.01
STEP_S = 0.05
HORIZON = 30
# Physics and measurements are computed so many times in a tick.
PARTS = 5


class LaggingArm:
    """Moves between two places, and rests at each of them within its plan.

    Args:
        robot: of a robot file.
        lag_s: delay from a command to the drive.
        speed: speed of the policy, rad/s or m/s.
        rate_hz: of the joint states.
        smoothing_s: time constant of a drive that follows as a low pass does.
        dead_way: distance that a command goes before friction lets its joint follow.
        sag: distance by which the joints hang below their commands.
        measured_late_s: time from a measurement to its arrival.
        joints: joints that the policy moves; all.
        share: share of the range between the two places.
    """

    def __init__(
        self,
        robot: Robot,
        *,
        lag_s: float = 0.0,
        speed: float = 1.0,
        rate_hz: float = 100.0,
        smoothing_s: float = 0.0,
        dead_way: float = 0.0,
        sag: float = 0.0,
        measured_late_s: float = 0.0,
        joints: Sequence[str] = (),
        share: float = 0.2,
    ) -> None:
        match = matched(robot)
        self.columns, self.limits = match.columns, match.limits
        self.names = [column.name for column in match.columns]
        self.executor = ChunkExecutor(
            ExecutorConfig(
                columns=match.columns,
                limits=match.limits,
                start=robot.start,
                on_stop=robot.on_stop,
                clamp_latch=0,
                control_period_s=PERIOD_S,
            ),
            ExecutorParameters(),
        )
        lower = np.maximum(match.limits.lower, -3.0)
        upper = np.minimum(match.limits.upper, 3.0)
        moves = np.array([not joints or name in joints for name in self.names])
        self.places = [lower + (0.4 + share * moves * end) * (upper - lower) for end in (0.0, 1.0)]
        self.goal = self.places[0].copy()
        self.speed, self.lag_s, self.smoothing_s = speed, lag_s, smoothing_s
        self.dead_way, self.sag, self.late_s = dead_way, sag, measured_late_s
        self.every = max(1, round(PARTS / (PERIOD_S * rate_hz)))
        self.positions = self.places[0] - sag
        self.driven = self.places[0].copy()
        self.off = np.zeros(len(self.names), dtype=bool)
        self.now_s, self.ros_ns, self.parts, self.number = 50.0, 10**18, 0, 0
        self._sent: deque[tuple[float, np.ndarray]] = deque()
        self._measured: deque[tuple[float, int, list[float]]] = deque()
        self.command: Command | None = None

    def start(self) -> None:
        """Start the executor, with joint states that have come for a second."""
        self.run(1.0)
        result = self.executor.start(self.now_s, self.ros_ns)
        assert result.started, result.text

    def go(self, place: int, rest_s: float) -> bool:
        """Move to a place and rest there; return whether the robot was stopped."""
        self.goal = self.places[place]
        way_s = float(np.abs(self.places[1] - self.places[0]).max()) / self.speed
        return self.run(way_s + 0.3 + rest_s)

    def run(self, seconds: float) -> bool:
        """Tick for so long, or until the robot is stopped; return whether it was."""
        for _ in range(round(seconds / PERIOD_S)):
            self.tick()
            if self.executor.mode is Mode.STOPPED:
                return True
        return False

    def tick(self) -> None:
        for _ in range(PARTS):
            self._pass(PERIOD_S / PARTS)
        self.command = self.executor.tick(self.now_s, self.ros_ns)
        if self.command.kind is not CommandKind.IDLE:
            self._sent.append((self.now_s, self.command.setpoints.copy()))
        request = self.executor.poll_request(self.now_s, self.ros_ns)
        if request is not None:
            rows = request.rows if len(request.rows) else self.positions[None]
            self._answer(rows[min(len(rows) - 1, max(request.certain - 1, 0))], request.request)

    def _pass(self, dt_s: float) -> None:
        self.now_s += dt_s
        self.ros_ns += round(dt_s * 1e9)
        self.parts += 1
        while len(self._sent) > 1 and self._sent[1][0] <= self.now_s - self.lag_s + 1e-9:
            self._sent.popleft()
        if self._sent and self._sent[0][0] <= self.now_s - self.lag_s + 1e-9:
            self._drive(self._sent[0][1], dt_s)
        if self.parts % self.every == 0:
            self._measured.append((self.now_s, self.ros_ns, self.positions.tolist()))
        while self._measured and self._measured[0][0] <= self.now_s - self.late_s + 1e-9:
            _, stamp_ns, positions = self._measured.popleft()
            self.executor.observe_state(self.names, positions, stamp_ns)

    def _drive(self, command: np.ndarray, dt_s: float) -> None:
        """Let the joints follow a command: friction first, then the drive, then its speed."""
        aim = np.clip(self.driven, command - self.dead_way, command + self.dead_way)
        step = aim - self.driven
        if self.smoothing_s:
            step *= min(1.0, dt_s / self.smoothing_s)
        most = np.minimum(self.limits.velocity, 10.0) * dt_s
        step = np.clip(step, -most, most)
        self.driven = self.driven + np.where(self.off, 0.0, step)
        self.positions = self.driven - self.sag

    def _answer(self, place: np.ndarray, request: int | None) -> None:
        rows = []
        for _ in range(HORIZON):
            way = self.speed * STEP_S
            place = place + np.clip(self.goal - place, -way, way)
            rows.append(place)
        chunk = ActionChunk(
            np.array(rows),
            tuple(self.names),
            ('position',) * len(self.names),
            STEP_S,
            np.zeros((HORIZON, 0), np.float32),
        )
        self.number += 1
        header = ChunkHeader(self.ros_ns, self.executor.episode, self.number, request=request)
        self.executor.submit_chunk(chunk, header, self.now_s, self.ros_ns)
