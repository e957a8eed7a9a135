"""When to ask for the next chunk: replan interval, and the delay observed so far, in steps."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, get_args

from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.plan import Interpolation

ReplanMode = Literal['asynchronous', 'synchronous']
Overrun = Literal['hold', 'continue']


@dataclass(frozen=True)
class DelayParameters:
    """How the delay is estimated.

    Attributes:
        quantile: share of the observed delays that the estimate covers, 0 to 1.
        window: observed delays that are kept.
        floor_steps: the estimate is never smaller; also the estimate before anything is observed.
        ceiling_steps: the estimate is never larger.
    """

    quantile: float = 0.9
    window: int = 20
    floor_steps: int = 1
    ceiling_steps: int = 20

    def __post_init__(self) -> None:
        if not 0.0 < self.quantile <= 1.0:
            raise ValueError(f'delay quantile is {self.quantile}, expected above 0 and at most 1')
        if self.window < 1:
            raise ValueError(f'delay window is {self.window}, expected 1 or more')
        if not 0 <= self.floor_steps <= self.ceiling_steps:
            raise ValueError(
                f'delay floor_steps is {self.floor_steps} and ceiling_steps '
                f'{self.ceiling_steps}, expected 0 <= floor <= ceiling'
            )


@dataclass(frozen=True)
class ExecutorParameters:
    """Everything that may change while the robot moves; taken up at the next chunk boundary.

    Attributes:
        replan_interval: S, steps executed from a chunk before the next takes over.
        replan_mode: `asynchronous` asks so early that the next chunk arrives in time;
            `synchronous` executes S steps, holds, asks, and goes on.
        overrun: what follows the S steps when the next chunk is late: `hold`, or `continue` along
            the old chunk for at most `max_overrun_steps` and then hold.
        max_overrun_steps: see `overrun`.
        interpolation: `cubic` (continuous velocity) or `linear`.
        handover: how one chunk follows another.
        delay: how the delay is estimated.
        request_timeout_s: ask again when a request is older than this, seconds on the steady
            clock.
        max_observation_age_s: a chunk whose observation is older than this on arrival is dropped.
    """

    replan_interval: int = 10
    replan_mode: ReplanMode = 'asynchronous'
    overrun: Overrun = 'hold'
    max_overrun_steps: int = 0
    interpolation: Interpolation = 'cubic'
    handover: HandoverParameters = field(default_factory=HandoverParameters)
    delay: DelayParameters = field(default_factory=DelayParameters)
    request_timeout_s: float = 2.0
    max_observation_age_s: float = 5.0

    def __post_init__(self) -> None:
        if self.replan_interval < 1:
            raise ValueError(
                f'replan_interval is {self.replan_interval}, expected 1 to the horizon'
            )
        for name, words in (
            ('replan_mode', get_args(ReplanMode)),
            ('overrun', get_args(Overrun)),
            ('interpolation', get_args(Interpolation)),
        ):
            if getattr(self, name) not in words:
                raise ValueError(
                    f"{name} is '{getattr(self, name)}', expected one of {list(words)}"
                )
        if self.max_overrun_steps < 0:
            raise ValueError(f'max_overrun_steps is {self.max_overrun_steps}, expected 0 or more')
        for name in ('request_timeout_s', 'max_observation_age_s'):
            if not getattr(self, name) > 0.0:
                raise ValueError(f'{name} is {getattr(self, name)}, expected more than 0 seconds')

    @property
    def overrun_steps(self) -> int:
        """Steps that may be executed past the replan interval."""
        return self.max_overrun_steps if self.overrun == 'continue' else 0

    def require_horizon(self, horizon: int) -> None:
        """Raise `ValueError` unless a chunk of this horizon can serve the replan interval."""
        if self.replan_interval > horizon:
            raise ValueError(
                f'replan_interval is {self.replan_interval} steps but a chunk has only '
                f'{horizon}; set replan_interval between 1 and {horizon}'
            )


class DelayEstimator:
    """A quantile of the delays observed in this episode, in steps.

    The first inference warms up engines and caches and never counts.
    """

    def __init__(self) -> None:
        self._delays: deque[int] = deque()
        self._warming_up = True

    def clear(self) -> None:
        """A new episode, or a new policy process: nothing known, warm-up to come."""
        self._delays.clear()
        self._warming_up = True

    def observe(self, delay_steps: int, parameters: DelayParameters) -> None:
        """Count one delay, unless it is the warm-up's."""
        if self._warming_up:
            self._warming_up = False
            return
        self._delays.append(delay_steps)
        while len(self._delays) > parameters.window:
            self._delays.popleft()

    def estimate(self, parameters: DelayParameters) -> int:
        """The smallest delay that covers the quantile of those observed, within its bounds."""
        if not self._delays:
            return parameters.floor_steps
        ordered = sorted(self._delays)
        rank = math.ceil(parameters.quantile * len(ordered)) - 1
        return min(max(ordered[rank], parameters.floor_steps), parameters.ceiling_steps)


class Requests:
    """Whether a chunk has been asked for and is still awaited."""

    def __init__(self) -> None:
        self._asked_at_s: float | None = None
        self.answered = False

    @property
    def open(self) -> bool:
        return self._asked_at_s is not None

    def ask(self, now_s: float) -> None:
        """A request went out."""
        self._asked_at_s = now_s

    def answer(self) -> None:
        """A chunk that serves the coming boundary was accepted."""
        self._asked_at_s = None
        self.answered = True

    def close(self) -> None:
        """The request came to nothing (its chunk was refused, or the plan was dropped)."""
        self._asked_at_s = None

    def renew(self) -> None:
        """A boundary was passed: what was answered is in force now, the next chunk is not."""
        self.answered = False

    def timed_out(self, now_s: float, timeout_s: float) -> bool:
        """Whether the open request is too old to be waited for any longer."""
        return self._asked_at_s is not None and now_s - self._asked_at_s > timeout_s
