"""One closed-loop episode on a simulated clock: world, chunk source, and the robots' executor.

No DDS, threads or wall time: an inference takes as long as the condition says. A tick is the
executor node's: measured state, arrived chunks, the command, then a request, answered from the
present images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from vla_runtime.execution.command import CommandKind
from vla_runtime.execution.config import ExecutorConfig, Mode
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.parameters import DelayParameters, ExecutorParameters
from vla_runtime.processing.fast_tokens import AnswerError
from vla_runtime.types import ActionChunk, ChunkHeader, CommittedPlan, Observation, PlanRequest
from vla_tabletop.sim.tasks import Outcome, OutcomeName
from vla_tabletop.study.chunk_sources import ChunkSource
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.smoothness import CacheUse, Jerk, jerk_of
from vla_tabletop.study.world import World

# Somewhere in 2023: stamps of zero mean 'no time' in ROS.
_START_NS = 1_700_000_000_000_000_000
# A start needs half a second of joint states.
_REPORTS, _REPORT_PERIOD_NS = 7, 100_000_000

# For a recorder: plan step of the observation, and the chunk that came of it.
ChunkListener = Callable[[int, ActionChunk], None]


@dataclass(frozen=True)
class EpisodeResult:
    """Result of an episode. Lengths in the policy's steps, jumps in rad and rad/s.

    Attributes:
        seed: of scene, task and noise.
        outcome: `success`, `wrong_block` or `timeout`.
        touched: block touched or pushed over; None after a timeout.
        meant: block of the robot's instruction.
        refused: chunks that the executor refused, and answers that were no chunk.
        delay_steps: mean of the accepted chunks after the first; NaN without any.
        starved_ticks: ticks on hold for a late chunk.
        position_jump: mean over seams of the norm over joints between new chunk and unfinished
            old plan, at the same step; NaN without any.
        velocity_jump: mean change over all seams of a step's mean velocity, after hand-over;
            NaN without any.
        jerk: jerk of the commanded positions.
        halted: why the executor had stopped at the end; empty if it had not.
        trajectory: SHA-256 of all commanded positions, cut to 16 digits.
    """

    seed: int
    family: str
    outcome: OutcomeName
    touched: int | None
    meant: int
    steps: float
    inferences: int
    refused: int
    delay_steps: float
    starved_ticks: int
    position_jump: float
    velocity_jump: float
    jerk: Jerk
    halted: str
    trajectory: str = ''
    cache_use: CacheUse = field(default_factory=CacheUse)

    @property
    def success(self) -> bool:
        return self.outcome == 'success'

    @property
    def obeyed(self) -> bool:
        """True when the robot touched the block of its instruction."""
        return self.touched == self.meant


def run_episode(
    world: World,
    source: ChunkSource,
    condition: Condition,
    seed: int,
    index: int = 0,
    on_chunk: ChunkListener | None = None,
) -> EpisodeResult:
    """Run the episode of a seed; scene, task and noise are functions of seed and condition.

    `index` of the family among the condition's.
    """
    source.begin(condition, seed)
    asked = world.begin(condition, seed, index, source.needs_images)
    loop = _Loop(world, source, condition, asked.instruction, on_chunk)
    outcome = None
    while outcome is None:
        loop.tick()
        outcome = world.judge()
    return loop.result(seed, asked.family, outcome, asked.meant)


@dataclass(frozen=True)
class _Flight:
    """A chunk on its way to the executor."""

    due_ns: int
    stamp_ns: int
    number: int
    chunk: ActionChunk
    tied: bool
    request: int | None


class _Loop:
    """The world, the executor and the chunks between them."""

    def __init__(
        self,
        world: World,
        source: ChunkSource,
        condition: Condition,
        instruction: str,
        on_chunk: ChunkListener | None,
    ) -> None:
        self._world, self._source, self._condition = world, source, condition
        self._instruction, self._on_chunk = instruction, on_chunk
        self._names = [column.name for column in world.columns]
        self._period_ns, step_ns = round(world.tick_s * 1e9), round(world.step_time_s * 1e9)
        self._ticks_per_step = step_ns // self._period_ns
        self._executor = _make_executor(world, condition)
        # Plan time passes in the tick that follows a delivery, so a chunk that arrives with the end
        # of its last step still finds that step begun and is joined where it ends.
        self._delay_ns = round(condition.delay_steps * step_ns)
        self._now_ns = _START_NS
        self._flights: list[_Flight] = []
        # Requests whose answers were no chunks, and the number of those answers.
        self._unanswered: set[int | None] = set()
        self._unreadable = 0
        self._number = 0
        self._delays: list[int] = []
        self._setpoints: list[np.ndarray] = []  # one a tick
        self._takeovers: list[int] = []  # ticks
        for ago in range(_REPORTS - 1, -1, -1):
            self._measure(self._now_ns - ago * _REPORT_PERIOD_NS)
        self._executor.tick(self._now_s, self._now_ns)
        started = self._executor.start(self._now_s, self._now_ns)
        if not started.started:
            raise RuntimeError(f'the executor does not start: {started.text}')

    @property
    def _now_s(self) -> float:
        return (self._now_ns - _START_NS) * 1e-9

    def tick(self) -> None:
        executor, counters = self._executor, self._executor.counters
        self._measure(self._now_ns)
        self._deliver()
        taken_over = counters.taken_over
        command = executor.tick(self._now_s, self._now_ns)
        if counters.taken_over > taken_over:
            self._takeovers.append(len(self._setpoints))
        if command.kind is not CommandKind.IDLE:
            self._setpoints.append(command.setpoints.copy())
        plan = executor.poll_request(self._now_s, self._now_ns)
        if plan is None and self._unanswered:
            # The policy node answers a repeat of a request that it failed at.
            plan = executor.repeat_request(self._now_s, self._now_ns)
            if plan is not None and plan.request not in self._unanswered:
                plan = None
        if plan is not None:
            self._infer(plan)
        self._world.step(self._setpoints[-1] if self._setpoints else self._world.measured())
        self._now_ns += self._period_ns

    def _measure(self, stamp_ns: int) -> None:
        positions = self._world.measured().tolist()
        self._executor.observe_state(self._names, positions, stamp_ns)

    def _infer(self, plan: PlanRequest) -> None:
        """Answer a request from the present images; the chunk arrives after the delay."""
        self._unanswered.discard(plan.request)
        try:
            chunk, tied = self._source.chunk(
                self._world, self._observe(), self._plan_for_policy(plan)
            )
        except AnswerError:
            self._unanswered.add(plan.request)
            self._unreadable += 1
            return
        assert plan.step is not None
        if self._on_chunk is not None:
            self._on_chunk(plan.step, chunk)
        due_ns = self._now_ns + self._delay_ns
        self._flights.append(_Flight(due_ns, self._now_ns, self._number, chunk, tied, plan.request))
        self._number += 1
        if not self._delay_ns:
            self._deliver()

    def _observe(self) -> Observation:
        if not self._source.needs_images:
            return Observation({}, self._world.proprioception(), self._instruction)
        observation = self._world.observe(self._instruction)
        absent = dict.fromkeys(self._condition.absent_cameras)
        return replace(observation, images={**observation.images, **absent})

    def _plan_for_policy(self, plan: PlanRequest) -> CommittedPlan | None:
        """The request as the policy conditions on it: row 0 is the step that is current now."""
        rows = plan.rows[: self._source.horizon]
        if not len(rows):
            return None
        columns = [plan.names.index(name) for name in self._source.action_names]
        return CommittedPlan(rows[:, columns], min(plan.certain, len(rows)), len(rows))

    def _deliver(self) -> None:
        for flight in [flight for flight in self._flights if flight.due_ns <= self._now_ns]:
            self._flights.remove(flight)
            result = self._executor.submit_chunk(
                flight.chunk,
                ChunkHeader(
                    flight.stamp_ns,
                    self._executor.episode,
                    flight.number,
                    tied=flight.tied,
                    request=flight.request,
                ),
                self._now_s,
                self._now_ns,
            )
            if result.accepted and flight.number > 0:
                self._delays.append(result.delay_steps)

    def result(self, seed: int, family: str, outcome: Outcome, meant: int) -> EpisodeResult:
        executor, counters = self._executor, self._executor.counters
        # The first is the start.
        seams = list(executor.handovers)[1:]
        compared = [seam for seam in seams if not seam.from_hold]
        status = executor.status()
        return EpisodeResult(
            seed=seed,
            family=family,
            outcome=outcome.name,
            touched=outcome.block,
            meant=meant,
            steps=outcome.time_s / self._world.step_time_s,
            inferences=self._number,
            refused=sum(counters.refused.values()) + self._unreadable,
            delay_steps=_mean([float(delay) for delay in self._delays]),
            starved_ticks=counters.starved_ticks,
            position_jump=_mean([float(np.linalg.norm(seam.position_jump)) for seam in compared]),
            velocity_jump=_mean([float(np.linalg.norm(seam.velocity_jump)) for seam in seams]),
            jerk=self._jerk(),
            halted='' if status.mode is Mode.RUNNING else status.detail or status.reason.value,
            trajectory=hashlib.sha256(np.array(self._setpoints).tobytes()).hexdigest()[:16],
            cache_use=self._source.cache_use,
        )

    def _jerk(self) -> Jerk:
        """Compute the jerk on the grid of steps, which begins with the first chunk."""
        if not self._takeovers:
            return Jerk(np.nan, np.nan, np.nan)
        ticks = self._ticks_per_step
        first = self._takeovers[0] % ticks
        rows = np.array(self._setpoints[first::ticks])
        places = [(tick - first) // ticks for tick in self._takeovers]
        return jerk_of(rows, self._world.step_time_s, places[1:], places[:1])


def _make_executor(world: World, condition: Condition) -> ChunkExecutor:
    return ChunkExecutor(
        ExecutorConfig(world.columns, world.limits, clamp_latch=0),
        _executor_parameters(condition),
    )


def _executor_parameters(condition: Condition) -> ExecutorParameters:
    whole_steps = -int(-condition.delay_steps // 1)
    return ExecutorParameters(
        replan_interval=condition.replan_interval,
        overrun=condition.overrun,
        max_overrun_steps=condition.max_overrun_steps,
        handover=HandoverParameters(mode=condition.handover),
        delay=DelayParameters(floor_steps=whole_steps, ceiling_steps=max(whole_steps, 20)),
        max_observation_age_s=60.0,
        request_timeout_s=60.0,
    )


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float('nan')
