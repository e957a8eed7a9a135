"""Settings that are fixed while an executor lives, and a snapshot of its state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from vla_runtime.execution.column_model import ColumnModel, StartParameters
from vla_runtime.execution.columns import ChunkForm, Column, CommandColumns
from vla_runtime.execution.command import CommandKind, Driver, Reason
from vla_runtime.execution.leader import LeaderParameters
from vla_runtime.execution.limits import Limits
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.stopping import StopActions
from vla_runtime.execution.watchdog import WatchdogParameters
from vla_runtime.files.setting_fields import check_settings, setting


class Mode(str, Enum):
    """Mode that the operator has asked for: none yet, stopped, or running."""

    IDLE = 'idle'
    STOPPED = 'stopped'
    RUNNING = 'running'


@dataclass(frozen=True)
class ExecutorConfig:
    """The robot as the executor sees it.

    Attributes:
        columns: commanded columns, in the robot's order.
        on_stop: way to stop, by cause.
        control_period_s: time between two ticks. A late tick moves the command no further than one
            and a half periods at top speed allow, because the robot's controller executes each
            command in about one, and then rests. Not limited when not given, nor under
            `motion_clock` ros, where the simulated robot waits for the clock as well.
        restart_after_outage_s: after a longer loss of joint states, of the policy's answers or of
            ticks the robot moves again only after `start`. A policy that takes longer than this for
            an answer is lost after three times its usual delay.
        form: how chunks and plans write the columns; as they are when not given.
        step_time_s: seconds between two rows of a chunk, as the bundle says; None takes those of an
            episode's first chunk.
        home: home pose by column, rad or m; see `HomePose`.
        leader: another arm that a person leads the robot by; None: there is none.
    """

    columns: tuple[Column, ...]
    limits: Limits | None = None
    start: StartParameters = field(default_factory=StartParameters)
    watchdog: WatchdogParameters = field(default_factory=WatchdogParameters)
    on_stop: StopActions = field(default_factory=StopActions)
    clamp_latch: int = setting(
        20,
        'number of chunks in a row outside the limits that stops the robot until ~/reset; 0: never',
        0,
        10_000,
    )
    control_period_s: float = math.inf
    restart_after_outage_s: float = 1.5
    form: ChunkForm | None = None
    step_time_s: float | None = None
    home: Mapping[str, float] = field(default_factory=dict)
    leader: LeaderParameters | None = None

    def __post_init__(self) -> None:
        names = tuple(column.name for column in self.columns)
        if self.limits is not None and self.limits.names != names:
            raise ValueError(
                f'limits are for {list(self.limits.names)}, the columns are {list(names)}'
            )
        if self.limits is not None:
            self._require_endless(self.limits)
        check_settings(self)
        for name in ('control_period_s', 'restart_after_outage_s'):
            if not (value := getattr(self, name)) > 0.0:
                raise ValueError(f'{name} is {value}, expected more than 0 seconds')

    def column_model(self) -> ColumnModel:
        return ColumnModel(
            CommandColumns(self.columns, self.form),
            self.limits,
            self.start,
            self.watchdog.max_tracking_error,
        )

    @property
    def longest_s(self) -> float:
        """Motion that one command may contain at top speed, in seconds."""
        return math.inf if self.watchdog.motion_clock == 'ros' else 1.5 * self.control_period_s

    def _require_endless(self, limits: Limits) -> None:
        for column, lower, upper in zip(
            self.columns, limits.hard_lower, limits.hard_upper, strict=True
        ):
            if column.continuous and (math.isfinite(lower) or math.isfinite(upper)):
                raise ValueError(
                    f"limits: '{column.name}' is continuous, without end stops, but has position "
                    'limits; leave out one or the other'
                )


@dataclass(frozen=True)
class ExecutorStatus:
    """State of the executor for a status message; made outside the tick.

    Attributes:
        detail: reason in words for the person at the robot; empty while nothing is wrong.
        progress: column that has furthest to go in an approach, and how far; empty without one.
        gave_way: column that gave way most to the robot in a hold, and how far; empty without one.
        step: plan step, counted from the start of the episode.
        unconditioned: under `rtc`, the chunk in force was not conditioned on the plan, and was
            blended.
        delay_estimate: estimated delay in steps.
        horizon: rows of the last chunk; 0 before the first.
        open_requests: chunks that were asked for and have not come yet.
        most_open_requests: as many may be asked for at once, as the policy says.
        silent_since_s: steady time of the first request since the last answer; None without one.
        observation_age_ms: age of the observation behind what is executed; 0 while nothing is.
        chunk: inference number of the chunk in force, -1 for none.
        pending_chunk: inference number of the chunk that takes over next, -1 for none.
        wrong_stamps: what is wrong with the stamps of the chunks; empty while nothing is.
    """

    mode: Mode
    kind: CommandKind
    reason: Reason
    detail: str
    progress: str
    gave_way: str
    episode: int
    step: int
    parameters: ExecutorParameters
    unconditioned: bool
    delay_estimate: int
    horizon: int
    open_requests: int
    most_open_requests: int
    silent_since_s: float | None
    observation_age_ms: float
    chunk: int
    pending_chunk: int
    clamp_latched: str
    dry_run: bool
    wrong_stamps: str = ''
    driver: Driver = Driver.NOBODY
