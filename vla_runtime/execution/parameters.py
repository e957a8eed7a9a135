"""What may change while the robot moves: replan interval, overrun, hand-over, delay estimate."""

from __future__ import annotations

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
        request_timeout_s: give a request up when it is older than this, and make a new one; seconds
            on the steady clock.
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
        """Steps that may be executed past the replan interval; none where the hold is wanted."""
        continues = self.overrun == 'continue' and self.replan_mode == 'asynchronous'
        return self.max_overrun_steps if continues else 0

    def require_horizon(self, horizon: int) -> None:
        """Raise `ValueError` where more steps are wanted than a chunk of this horizon has."""
        if self.replan_interval > horizon:
            raise ValueError(
                f'replan_interval is {self.replan_interval} steps but a chunk has only '
                f'{horizon}; set replan_interval between 1 and {horizon}'
            )
        for name, steps, least in (
            ('blend_steps', self.handover.blend_steps, 1),
            ('max_overrun_steps', self.max_overrun_steps, 0),
        ):
            if steps > horizon:
                raise ValueError(
                    f'{name} is {steps} but a chunk has only {horizon} steps; set {name} between '
                    f'{least} and {horizon}'
                )
