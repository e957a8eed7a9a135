"""When a task of `RunPolicy` ends, and how: from states and plans, without ROS 2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from vla_runtime.execution.command import MOVING, Driver
from vla_runtime.execution.config import Mode
from vla_runtime.types import PlanRequest

# States come five times and once a second; a busy machine is late with them.
EXECUTOR_SILENT_S, POLICY_SILENT_S = 3.0, 6.0
# A state from before the start may still be on its way.
STARTS_WITHIN_S = 3.0
REST_TOLERANCE = 0.01


class Outcome(IntEnum):
    """How a task ended; the numbers of `RunPolicy.Result`."""

    AT_REST = 1
    TIME_OVER = 2
    ENDED_BY_NEXT = 3
    CANCELED = 4
    PREEMPTED = 5
    TIMED_OUT = 6
    START_REFUSED = 7
    STOPPED = 8
    POLICY_LOST = 9
    EXECUTOR_LOST = 10
    CLIENT_LOST = 11
    SHUT_DOWN = 12
    JUDGED_SUCCESS = 13
    JUDGED_FAILURE = 14

    @property
    def succeeded(self) -> bool:
        return self in (
            Outcome.AT_REST,
            Outcome.TIME_OVER,
            Outcome.ENDED_BY_NEXT,
            Outcome.JUDGED_SUCCESS,
        )

    @property
    def lets_next_go_on(self) -> bool:
        """Whether the next task of the queue begins without a stop."""
        return self.succeeded or self in (
            Outcome.CANCELED,
            Outcome.TIMED_OUT,
            Outcome.PREEMPTED,
            Outcome.JUDGED_FAILURE,
        )


# By `ExecutorState.episode_outcome`.
_VERDICTS = {
    'success': Outcome.JUDGED_SUCCESS,
    'failure': Outcome.JUDGED_FAILURE,
    'time_limit': Outcome.TIMED_OUT,
}


@dataclass(frozen=True)
class Ending:
    """An outcome, and the same for the person at the robot."""

    outcome: Outcome
    text: str


@dataclass(frozen=True)
class TaskLimits:
    """What ends a task by itself; seconds, 0 for none.

    Attributes:
        time_succeeds: it has succeeded when its time is over.
        rest_tolerance: so far (rad or m) a plan may move a joint at rest; 0: the usual one.
    """

    time_s: float = 0.0
    time_succeeds: bool = False
    rest_s: float = 0.0
    rest_tolerance: float = 0.0

    def __post_init__(self) -> None:
        for name in ('time_s', 'rest_s', 'rest_tolerance'):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f'{name} is {getattr(self, name)}, expected 0 or more')


class TaskProgress:
    """One task, from its begin. Times are of the steady clock; one thread calls.

    Attributes:
        mode, chunk, reason, text, start_refused: as the executor's newest state has them; the last
            is None before there is one.
        has_run: the executor has said that it runs, since the start.
        holds: the robot stands, though it was started.
    """

    def __init__(self, limits: TaskLimits, now_s: float) -> None:
        self.chunk, self.reason, self.text = -1, '', ''
        self.start_refused: str | None = None
        self.has_run = self.holds = False
        self._limits = limits
        self._begun_s = self._executor_s = self._policy_s = now_s
        self._started_s: float | None = None
        self.mode = self._driver = ''
        # Episode and its outcome: of the first state, which is from before the start, and now.
        self._episode_before: tuple[int, str] | None = None
        self._episode = (0, '')
        self._policy_fault = ''
        self._chunks_before: int | None = None
        self._chunks = 0
        self._held_s = 0.0
        # Where the plan rests, for how long, and until which ROS time plans were looked at.
        self._rest_at: np.ndarray | None = None
        self._rested_s = self._rest_seen_s = 0.0

    def start(self, now_s: float) -> None:
        """The executor has answered that it runs."""
        self._started_s = now_s

    def excuse(self, now_s: float) -> None:
        """Count nobody's silence until now: there was nobody to listen."""
        self._executor_s = self._policy_s = now_s

    def seconds(self, now_s: float) -> float:
        return now_s - self._begun_s

    @property
    def runs(self) -> bool:
        """Whether the executor runs, by its newest state."""
        return self.mode == Mode.RUNNING

    @property
    def paused(self) -> bool:
        """Whether a person has paused it, or sent it home, by its newest state."""
        return is_paused(self.mode, self._driver)

    @property
    def judged(self) -> bool:
        """Whether the episode is over, by its newest state."""
        return bool(self._episode[1])

    @property
    def held_s(self) -> float:
        return self._held_s

    @property
    def chunks(self) -> int:
        """Chunks that took over since the begin."""
        return self._chunks

    def see_executor(self, now_s: float, state: Any) -> None:
        """Note an `ExecutorState`."""
        if self.holds:
            self._held_s += now_s - self._executor_s
        self._executor_s = now_s
        self.mode, self._driver = state.mode, state.driver
        self.reason, self.text, self.chunk = state.reason, state.text, state.chunk
        self.start_refused = state.start_refused
        self._episode = state.episode, state.episode_outcome
        if self._episode_before is None:
            self._episode_before = self._episode
        if self._chunks_before is None or state.chunks < self._chunks_before:
            self._chunks_before = state.chunks
        self._chunks = state.chunks - self._chunks_before
        if self._started_s is not None and self.runs:
            self.has_run = True
        self.holds = self.has_run and self.reason not in MOVING

    def see_policy(self, now_s: float, *, lifecycle: str, text: str) -> None:
        self._policy_s = now_s
        self._policy_fault = '' if lifecycle == 'active' else f'{lifecycle}: {text}'

    def see_plan(self, plan: PlanRequest) -> None:
        """Note whether a committed plan moves the robot, and until when.

        Only rows that are executed for certain count as rest: the next chunk may replace the
        others, and what is executed between two plans is not known here.
        """
        rows, step_s = plan.rows, plan.step_time_s or 0.0
        if not len(rows):
            return
        moves = np.array([kind == 'velocity' for kind in plan.kinds], dtype=bool)
        places = np.where(moves, rows * step_s * len(rows), rows)
        tolerance = self._limits.rest_tolerance or REST_TOLERANCE
        at = self._rest_at
        if at is None or at.shape != places[0].shape:
            far = True
        else:
            far = bool(np.max(np.abs(places - np.where(moves, 0.0, at))) > tolerance)
        begin_s = plan.stamp_ns * 1e-9
        end_s = begin_s + plan.certain * step_s
        if far:
            self._rest_at, self._rested_s = places[-1], 0.0
        else:
            self._rested_s += max(0.0, end_s - max(begin_s, self._rest_seen_s))
        self._rest_seen_s = max(self._rest_seen_s, end_s)

    def ending(self, now_s: float) -> Ending | None:
        """Return how the task ends now; None while it goes on."""
        return self._loss(now_s) or self._stop(now_s) or self._verdict() or self._goal(now_s)

    def _loss(self, now_s: float) -> Ending | None:
        if (silent_s := now_s - self._executor_s) > EXECUTOR_SILENT_S:
            text = f'the executor node has said nothing for {silent_s:.0f} s: has it ended?'
            return Ending(Outcome.EXECUTOR_LOST, text)
        if self.mode == 'inactive':
            return Ending(Outcome.EXECUTOR_LOST, f'the executor node is not active: {self.text}')
        if (silent_s := now_s - self._policy_s) > POLICY_SILENT_S:
            text = f'the policy node has said nothing for {silent_s:.0f} s: has it ended?'
            return Ending(Outcome.POLICY_LOST, text)
        if self._policy_fault:
            return Ending(Outcome.POLICY_LOST, f'the policy node is {self._policy_fault}')
        return None

    def _stop(self, now_s: float) -> Ending | None:
        started_s = self._started_s
        if started_s is None or self.runs:
            return None
        if self.has_run or now_s - started_s > STARTS_WITHIN_S:
            return Ending(Outcome.STOPPED, self.text)
        return None

    def _verdict(self) -> Ending | None:
        """Return how a person, or the executor's time limit, has ended the episode since."""
        episode, outcome = self._episode
        if not (self.has_run and outcome) or self._episode == self._episode_before:
            return None
        return Ending(_VERDICTS[outcome], f'episode {episode} has ended: {outcome}')

    def _goal(self, now_s: float) -> Ending | None:
        limits = self._limits
        if 0.0 < limits.time_s <= self.seconds(now_s):
            outcome = Outcome.TIME_OVER if limits.time_succeeds else Outcome.TIMED_OUT
            return Ending(outcome, f'its {limits.time_s:g} s are over')
        moved = self._started_s is not None and self._chunks > 0 and not self.holds
        if not moved:
            self._rest_at, self._rested_s = None, 0.0
        elif 0.0 < limits.rest_s <= self._rested_s:
            return Ending(
                Outcome.AT_REST, f'the plan has not moved a joint for {limits.rest_s:g} s'
            )
        return None


def is_paused(mode: str, driver: str) -> bool:
    """Return whether an executor of this mode and driver is paused, or goes home to be so."""
    return mode == Mode.RUNNING and driver == Driver.NOBODY
