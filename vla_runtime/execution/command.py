"""Commands of the executor, and the vocabulary of its reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np


class CommandKind(str, Enum):
    """Kind of a command; `IDLE` must not be published, since nothing was ever commanded."""

    IDLE = 'idle'
    HOLD = 'hold'
    APPROACH = 'approach'
    TRACK = 'track'
    LEAD = 'lead'


class Reason(str, Enum):
    """Reason of a command; one word a tick, for the status message."""

    # moving
    TRACKING = 'tracking'
    OVERRUN = 'overrun'
    APPROACHING = 'approaching'
    LEADING = 'leading'
    # the plan is at its end: coming to rest, to hold
    BRAKING = 'braking'
    # waiting, nothing is wrong
    NOT_STARTED = 'not_started'
    STOPPED = 'stopped'
    RELEASED = 'released'
    PAUSED = 'paused'
    WAITING_FOR_CHUNK = 'waiting_for_chunk'
    SYNCHRONOUS_WAIT = 'synchronous_wait'
    SPEED_SCALED_TO_ZERO = 'speed_scaled_to_zero'
    # the policy is late
    STARVED = 'starved'
    # something is wrong
    STATE_MISSING = 'state_missing'
    STATE_STALE = 'state_stale'
    STATE_FROM_FUTURE = 'state_from_future'
    STATE_NOT_FINITE = 'state_not_finite'
    STATE_IMPLAUSIBLE = 'state_implausible'
    STATE_DOUBLED = 'state_doubled'
    TRACKING_ERROR = 'tracking_error'
    STEP_FROM_MEASURED = 'step_from_measured'
    APPROACH_TIMEOUT = 'approach_timeout'
    TICK_LATE = 'tick_late'
    CLOCK_JUMP = 'clock_jump'
    CLOCK_STOPPED = 'clock_stopped'
    CLOCK_INVALID = 'clock_invalid'
    CLAMP_LATCH = 'clamp_latch'
    CONTROLLER = 'controller'
    INTERNAL_ERROR = 'internal_error'


# Reasons for which the robot moves.
MOVING = (
    Reason.TRACKING,
    Reason.OVERRUN,
    Reason.APPROACHING,
    Reason.LEADING,
    Reason.BRAKING,
)


class LimitKind(str, Enum):
    """Limit that changed a command."""

    POSITION = 'position'
    VELOCITY = 'velocity'
    ACCELERATION = 'acceleration'
    STEP_FROM_MEASURED = 'step_from_measured'


class ChunkRefusal(str, Enum):
    """Reason why a chunk is refused."""

    NOT_RUNNING = 'not_running'
    PAUSED = 'paused'
    LEADING = 'leading'
    HOLDING = 'holding'
    APPROACHING = 'approaching'
    OTHER_EPISODE = 'other_episode'
    DUPLICATE = 'duplicate'
    REQUEST_CLOSED = 'request_closed'
    OUT_OF_ORDER = 'out_of_order'
    OBSERVATION_FROM_FUTURE = 'observation_from_future'
    OBSERVATION_TOO_OLD = 'observation_too_old'
    OBSERVATION_UNKNOWN = 'observation_unknown'
    MALFORMED = 'malformed'
    WRONG_JOINTS = 'wrong_joints'
    NOT_FINITE = 'not_finite'
    NO_ROTATION = 'no_rotation'
    OUT_OF_REACH = 'out_of_reach'
    WRONG_STEP_TIME = 'wrong_step_time'
    INTERVAL_EXCEEDS_HORIZON = 'interval_exceeds_horizon'
    LIMIT = 'limit'
    CLAMP_LATCH = 'clamp_latch'
    USEFUL_PART_PAST = 'useful_part_past'
    START_TOO_FAR = 'start_too_far'
    INTERNAL_ERROR = 'internal_error'


class Driver(str, Enum):
    """Who drives the robot; a robot that rests, or goes home, is driven by nobody."""

    POLICY = 'policy'
    LEADER = 'leader'
    NOBODY = 'nobody'


@dataclass(slots=True)
class Command:
    """One tick's command. The executor owns it and overwrites it at the next tick.

    Attributes:
        kind: publish everything but `IDLE`, and nothing while `dry_run`.
        setpoints: (columns,) float64, the value to command in each column's own kind: rad or m,
            rad/s or m/s, and a quaternion of length 1 in the columns of a rotation.
        velocities: (columns,) float64, feed-forward velocity of position columns, within the
            velocity limit; equal to `setpoints` in velocity columns; zero in a hold that rests.
        step: step of the plan that is being executed, -1 while none is.
        chunk: inference number of the chunk that the step comes from, -1 while none is.
        row: row of that chunk, -1 while none is.
        limited: the motion limiter changed this command by what a person would care about.
        dry_run: computed and reported only; must not be published.
        seats: the setpoints were set to where the robot is: no motion leads there from the last
            command.
        settled: the robot is at rest, and this hold has been given for a while: a controller that
            keeps its last command needs no more of it.
    """

    kind: CommandKind
    reason: Reason
    setpoints: np.ndarray
    velocities: np.ndarray
    step: int = -1
    chunk: int = -1
    row: int = -1
    limited: bool = False
    dry_run: bool = False
    seats: bool = False
    settled: bool = False

    def leave_step(self) -> None:
        """Note that no step of a plan is being executed."""
        self.step = self.chunk = self.row = -1


@dataclass(frozen=True)
class SubmitResult:
    """Answer to a chunk.

    Attributes:
        refusal: None when it was accepted.
        text: reason of the refusal, or a note on the chunk, for the person at the robot.
        join_step: plan step at which it takes over, -1 when refused.
        join_index: row that is executed first: steps consumed since its observation.
        delay_steps: steps between its observation and its arrival.
        clamped: some of it was outside the limits and clamped.
    """

    refusal: ChunkRefusal | None
    text: str = ''
    join_step: int = -1
    join_index: int = -1
    delay_steps: int = -1
    clamped: bool = False

    @property
    def accepted(self) -> bool:
        return self.refusal is None


@dataclass(frozen=True)
class StartResult:
    """Answer to a start.

    `text` says why the executor was not started, or what the robot does first; `reason` is the
    fault of the measured state that kept it from starting, or None.
    """

    started: bool
    text: str = ''
    reason: Reason | None = None


@dataclass
class Counters:
    """Everything that happened since the executor was made; only ever counts up.

    `received == accepted + sum(refused)`, and
    `accepted == taken_over + superseded + dropped + (1 if a chunk is pending)`.
    `observation_age_ns` adds up the ages of the observations behind the `tracked_ticks`; `limited`
    counts the ticks in which a limit changed a command.
    """

    ticks: int = 0
    steps: int = 0
    received: int = 0
    accepted: int = 0
    taken_over: int = 0
    superseded: int = 0
    dropped: int = 0
    late: int = 0
    short: int = 0
    clamped: int = 0
    policy_restarts: int = 0
    refused: dict[ChunkRefusal, int] = field(default_factory=lambda: dict.fromkeys(ChunkRefusal, 0))
    tracked_ticks: int = 0
    observation_age_ns: int = 0
    overrun_ticks: int = 0
    overrun_steps: int = 0
    starved_ticks: int = 0
    limited_ticks: int = 0
    limited: dict[tuple[str, LimitKind], int] = field(default_factory=dict)
    requests: int = 0
    requests_timed_out: int = 0
    holds: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    clock_jumps: int = 0
    late_ticks: int = 0
    states_malformed: int = 0
    states_out_of_order: int = 0
    states_implausible: int = 0
    internal_errors: int = 0

    @property
    def mean_observation_age_ms(self) -> float:
        """Mean age of the observation behind what was executed; 0 before anything was."""
        return self.observation_age_ns * 1e-6 / max(self.tracked_ticks, 1)

    @property
    def starvations(self) -> int:
        return self.holds[Reason.STARVED]

    def count_limited(self, causes: Iterable[tuple[str, LimitKind]]) -> None:
        self.limited_ticks += 1
        for cause in causes:
            self.limited[cause] = self.limited.get(cause, 0) + 1
