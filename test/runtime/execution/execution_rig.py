"""A robot and a policy around an executor, on clocks that move on command only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from reported_states import report
from watched_executor import WatchedExecutor

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import Command, CommandKind, Reason, StartResult, SubmitResult
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.limits import ColumnLimits, Limits, make_limits
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.types import ActionChunk, ChunkHeader, PlanRequest

ROS_START_NS = 1_700_000_000_000_000_000
STEP_NS = 40_000_000
RAMP = [0.01 * (row + 1) for row in range(30)]
SWITCH = HandoverParameters(mode='switch')
TWO = ('a', 'b')


@dataclass(frozen=True)
class Tick:
    """Copy of the outcome of one tick."""

    now_s: float
    ros_ns: int
    command: Command

    @property
    def position(self) -> float:
        return float(self.command.setpoints[0])


def chunk_of(
    rows: np.ndarray | list[float] | list[list[float]],
    names: tuple[str, ...] = ('a', 'b'),
    kinds: tuple[str, ...] | None = None,
    step_time_s: float = STEP_NS * 1e-9,
) -> ActionChunk:
    """A chunk; a list of numbers is the same number in every column."""
    actions = np.asarray(rows, dtype=np.float64)
    if actions.ndim == 1:
        actions = np.repeat(actions[:, None], len(names), axis=1)
    return ActionChunk(
        actions, names, kinds or ('position',) * len(names), step_time_s, actions.astype(np.float32)
    )


def alike(names: Sequence[str], limit: ColumnLimits, **more: Any) -> Limits:
    """The same limits for every column."""
    return make_limits(tuple(names), dict.fromkeys(names, limit), **more)


def holding(**changes: object) -> ExecutorParameters:
    """Parameters that hold the robot where a chunk is late: what is executed is easily counted."""
    values: dict[str, object] = {
        'replan_interval': 10,
        'overrun': 'hold',
        'max_overrun_steps': 0,
        'max_observation_age_s': 5.0,
    }
    return ExecutorParameters(**{**values, **changes})


class Rig:
    """An executor whose robot follows every command exactly; every tick is kept."""

    def __init__(
        self,
        parameters: ExecutorParameters | None = None,
        columns: tuple[Column, ...] = (Column('a'), Column('b')),
        period_ns: int = 10_000_000,
        dry_run: bool = False,
        **config: object,
    ) -> None:
        self.parameters = parameters or holding(replan_interval=5)
        config.setdefault('clamp_latch', 0)
        self.config = ExecutorConfig(columns, **config)
        self.executor = WatchedExecutor(self.config, self.parameters, dry_run)
        self.names = tuple(column.name for column in columns)
        self.kinds = tuple(column.kind for column in columns)
        self.period_ns = period_ns
        self.now_s = 50.0
        self.ros_ns = ROS_START_NS
        self.measured = np.zeros(len(columns))
        self.state_arrives = True
        # Whether the driver has said anything yet.
        self.reports = False
        self.robot_follows = True
        self.ticks: list[Tick] = []
        self.number = 0

    @property
    def command(self) -> Command:
        return self.ticks[-1].command

    @property
    def reason(self) -> str:
        return self.command.reason.value

    def tick(self, count: int = 1, measure: bool = True) -> Command:
        """Let one period pass, measure, tick; `count` times."""
        for _ in range(count):
            self.now_s += self.period_ns * 1e-9
            self.ros_ns += self.period_ns
            if measure:
                self.measure()
            self.tick_now()
        return self.command

    def measure(self) -> None:
        if not self.state_arrives:
            return
        if not self.reports:
            self.reports = True
            self.report()
        self.executor.observe_state(list(self.names), list(self.measured), self.ros_ns)

    def tick_now(self) -> Command:
        """Tick without any time passing."""
        command = self.executor.tick(self.now_s, self.ros_ns)
        kept = replace(
            command, setpoints=command.setpoints.copy(), velocities=command.velocities.copy()
        )
        self.ticks.append(Tick(self.now_s, self.ros_ns, kept))
        if self.robot_follows and kept.kind is not CommandKind.IDLE and not kept.dry_run:
            moves = np.array([kind == 'position' for kind in self.kinds])
            self.measured[moves] = kept.setpoints[moves]
        return kept

    def report(self) -> None:
        """Let the driver have reported for the half second that a start needs."""
        report(self.executor.observe_state, self.names, list(self.measured), self.ros_ns)

    def started(self) -> Rig:
        """Tick once, then start."""
        self.tick(2)
        result = self.start()
        assert result.started, result.text
        self.tick()
        return self

    def start(self) -> StartResult:
        return self.executor.start(self.now_s, self.ros_ns)

    def poll(self, past_steps: int = 0) -> PlanRequest | None:
        return self.executor.poll_request(self.now_s, self.ros_ns, past_steps)

    def offer(self, chunk: ActionChunk, header: ChunkHeader) -> SubmitResult:
        return self.executor.submit_chunk(chunk, header, self.now_s, self.ros_ns)

    def submit(
        self,
        rows: np.ndarray | list[float] | list[list[float]] | ActionChunk,
        observation_ns: int | None = None,
        number: int | None = None,
        episode: int | None = None,
        tied: bool = True,
    ) -> SubmitResult:
        """Offer a chunk, by default observed right now and with the next number."""
        if not isinstance(rows, ActionChunk):
            rows = chunk_of(rows, self.names, self.kinds)
        self.number = self.number + 1 if number is None else number
        header = ChunkHeader(
            self.ros_ns if observation_ns is None else observation_ns,
            self.executor.episode if episode is None else episode,
            self.number,
            tied=tied,
        )
        return self.offer(rows, header)

    def run_until(self, condition: Callable[[Command], bool], limit: int = 2000) -> Command:
        """Tick until the command fulfils a condition."""
        for _ in range(limit):
            if condition(self.tick()):
                return self.command
        raise AssertionError(f'never happened in {limit} ticks; last: {self.command}')

    def executed(self) -> list[tuple[int, int, int]]:
        """(step, chunk, row) of every step, in the order of execution, each once."""
        steps: list[tuple[int, int, int]] = []
        for tick in self.ticks:
            command = tick.command
            found = (command.step, command.chunk, command.row)
            if command.kind is CommandKind.TRACK and (not steps or steps[-1] != found):
                steps.append(found)
        return steps


class CameraPolicy:
    """Answers each request from the newest frame, one at a time, `inference_s` later.

    Args:
        rig: rig whose requests are answered.
        frame_s: period of the camera; the newest frame is the observation.
        inference_s: from request to answer.
    """

    past_steps = 0

    def __init__(self, rig: Rig, frame_s: float, inference_s: float) -> None:
        self.rig, self.frame_s, self.inference_s = rig, frame_s, inference_s
        # Frames of this time never come, from and to, seconds.
        self.gap_s = (0.0, 0.0)
        self.plan: PlanRequest | None = None
        self.due_s, self.seen = 0.0, 0.0
        self.observation_ns, self.asked_ns, self.answers = 0, 0, 0

    def work(self) -> None:
        """Take what the executor asks for, and answer what is ready."""
        rig = self.rig
        if self.plan is not None and rig.now_s >= self.due_s:
            plan, self.plan = self.plan, None
            self.answers += 1
            self.answer(plan)
        plan = rig.poll(self.past_steps)
        if plan is not None and self.plan is None:
            self.plan, self.due_s = plan, rig.now_s + self.inference_s
            now_s = (rig.ros_ns - ROS_START_NS) * 1e-9
            if self.gap_s[0] < now_s < self.gap_s[1]:
                now_s = self.gap_s[0]
            frame_s = int(now_s / self.frame_s) * self.frame_s
            self.observation_ns = ROS_START_NS + round(frame_s * 1e9)
            self.asked_ns, self.seen = rig.ros_ns, float(rig.measured[0])

    def answer(self, plan: PlanRequest) -> None:
        raise NotImplementedError


def rig_of(**config: Any) -> Rig:
    return Rig(holding(replan_interval=20, handover=SWITCH), **config)


def moving(**config: Any) -> Rig:
    """A robot in the middle of a chunk."""
    rig = rig_of(**config).started()
    assert rig.submit(RAMP).accepted
    rig.tick(20)
    assert rig.command.kind is CommandKind.TRACK
    return rig


def assert_held(rig: Rig, reason: Reason) -> None:
    """The newest tick holds at the command of the one before it, at rest."""
    before, now = rig.ticks[-2].command, rig.command
    assert now.kind is CommandKind.HOLD and now.reason is reason
    assert (now.setpoints == before.setpoints).all()
    assert (now.velocities == 0.0).all()
