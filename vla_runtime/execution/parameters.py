"""Parameters that may change while the robot moves: replanning, overrun, hand-over, delay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vla_runtime.execution.handover import MOST_STEPS, HandoverParameters
from vla_runtime.execution.plan import Interpolation
from vla_runtime.files.setting_fields import check_settings, setting

ReplanMode = Literal['asynchronous', 'synchronous']
Overrun = Literal['hold', 'continue']


@dataclass(frozen=True)
class DelayParameters:
    """Estimate of the delay, in steps. Before any delay is observed it is `floor_steps`."""

    quantile: float = setting(
        0.9,
        'quantile of the observed delays that the estimate covers',
        0.01,
        1.0,
        name='delay_quantile',
    )
    window: int = setting(20, 'observed delays kept', 1, 1000, name='delay_window')
    floor_steps: int = setting(
        1, 'the estimate of the delay is never smaller', 0, MOST_STEPS, name='delay_floor_steps'
    )
    ceiling_steps: int = setting(
        20, 'the estimate of the delay is never larger', 0, MOST_STEPS, name='delay_ceiling_steps'
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.floor_steps > self.ceiling_steps:
            raise ValueError(
                f'delay_floor_steps is {self.floor_steps}: it must be at most delay_ceiling_steps, '
                f'which is {self.ceiling_steps}'
            )


@dataclass(frozen=True)
class ExecutorParameters:
    """Everything that may change while the robot moves; taken up at the next chunk boundary.

    `replan_interval` is S. `replan_mode` `asynchronous` asks so early that the next chunk arrives
    in time; `synchronous` executes S steps, holds, asks, and goes on. `overrun` is for a late
    chunk: `hold`, or `continue` for at most `max_overrun_steps` and then hold. `request_timeout_s`
    counts on the steady clock, the age of an observation on the ROS clock.
    """

    replan_interval: int = setting(
        8,
        'steps executed from a chunk before the next takes over; 1 to the horizon',
        1,
        MOST_STEPS,
    )
    replan_mode: ReplanMode = setting(
        'asynchronous',
        'asynchronous: ask for the next chunk while moving; synchronous: execute, hold, ask, go on',
    )
    overrun: Overrun = setting(
        'continue', 'when the next chunk is late: hold, or continue along the old one'
    )
    max_overrun_steps: int = setting(
        4, 'steps of the old chunk past replan_interval, with overrun: continue', 0, MOST_STEPS
    )
    interpolation: Interpolation = setting('cubic', 'curve between two steps of the plan')
    handover: HandoverParameters = field(default_factory=HandoverParameters)
    delay: DelayParameters = field(default_factory=DelayParameters)
    request_timeout_s: float = setting(
        2.0,
        'time without a chunk after which the request is given up and a new one made',
        0.05,
        60.0,
    )
    max_observation_age_s: float = setting(
        2.0,
        'a chunk whose observation is older than this on arrival is dropped',
        0.01,
        60.0,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def overrun_steps(self) -> int:
        """Steps that may be executed past the replan interval; 0 where the robot is to hold."""
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
