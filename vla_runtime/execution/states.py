"""States of the executor: what each means for chunks and commands, and what leads to another.

The state is never stored. It follows from what the parts of the executor know
(`ChunkExecutor.state`), and the executor asks `TRAITS` what a chunk comes to in it. `TRANSITIONS`
is the whole list of changes: the tests find no other, and the page on the executor shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vla_runtime.execution.command import ChunkRefusal


class State(str, Enum):
    """State of the executor; a dry run is a setting beside it, with which nothing is published."""

    IDLE = 'idle'
    WAITING = 'waiting'
    TRACKING = 'tracking'
    APPROACHING = 'approaching'
    JOINING = 'joining'
    BRAKING = 'braking'
    HOLDING = 'holding'
    LATCHED = 'latched'
    PAUSED = 'paused'
    LEADING = 'leading'
    STOPPING = 'stopping'
    STOPPED = 'stopped'
    RELEASING = 'releasing'
    RELEASED = 'released'


class Event(str, Enum):
    """Call of the executor that may change its state."""

    START = '~/start'
    STOP = '~/stop'
    RELEASE = '~/release'
    PAUSE = '~/pause'
    RESUME = '~/resume'
    HOME = '~/home'
    TAKE_OVER = '~/take_over'
    GIVE_BACK = '~/take_over with false'
    RESET = '~/reset'
    EPISODE = 'a new episode'
    DRY_RUN = 'dry_run changes'
    CHUNK = 'a chunk comes'
    TICK = 'a tick'
    DEAD_MAN = 'ticks end'
    SHUTDOWN = 'shutdown'


class Sent(str, Enum):
    """What the controllers are sent."""

    NOTHING = 'nothing'
    HOLD = 'the last position, which gives way a little; zero velocity'
    REST = 'the way to rest, then the last position'
    PLAN = 'the plan'
    APPROACH = 'the way to the first row, home, or back inside the limits'
    LEADER = 'what the leader says, within the limits'
    JOIN = 'the slow way to where the robot is said to be'


@dataclass(frozen=True)
class Traits:
    """What a state means.

    Attributes:
        sent: what the controllers are sent.
        refusal: why every chunk is refused; None where it is judged by what is in it.
        text: the refusal in words, for the sender; `{because}` and `{latch}` are
            filled in.
        may_lead: a leader may take over.
    """

    sent: Sent
    refusal: ChunkRefusal | None = None
    text: str = ''
    may_lead: bool = False

    @property
    def asks(self) -> bool:
        """Whether chunks are asked for: to execute them, or to record what they would have been."""
        return self.refusal in (None, ChunkRefusal.LEADING)


_NOT_RUNNING = (ChunkRefusal.NOT_RUNNING, 'the executor is not started')
_ON_ITS_WAY = (ChunkRefusal.APPROACHING, 'the robot is on its way to where it may set out')

TRAITS = {
    State.IDLE: Traits(Sent.NOTHING, *_NOT_RUNNING),
    State.WAITING: Traits(Sent.REST, may_lead=True),
    State.TRACKING: Traits(Sent.PLAN, may_lead=True),
    State.APPROACHING: Traits(Sent.APPROACH, *_ON_ITS_WAY, may_lead=True),
    State.JOINING: Traits(Sent.JOIN, *_ON_ITS_WAY),
    State.BRAKING: Traits(Sent.REST, ChunkRefusal.HOLDING, 'the robot is coming to rest{because}'),
    State.HOLDING: Traits(Sent.HOLD, ChunkRefusal.HOLDING, 'the robot holds{because}'),
    State.LATCHED: Traits(Sent.REST, ChunkRefusal.CLAMP_LATCH, '{latch}'),
    State.PAUSED: Traits(
        Sent.REST, ChunkRefusal.PAUSED, 'the robot is paused until ~/resume', may_lead=True
    ),
    State.LEADING: Traits(Sent.LEADER, ChunkRefusal.LEADING, 'a leader leads the robot'),
    State.STOPPING: Traits(Sent.REST, *_NOT_RUNNING),
    State.STOPPED: Traits(Sent.HOLD, *_NOT_RUNNING),
    State.RELEASING: Traits(Sent.REST, *_NOT_RUNNING),
    State.RELEASED: Traits(Sent.NOTHING, *_NOT_RUNNING),
}


@dataclass(frozen=True)
class Transition:
    """One row of the table: what leads from a state to another one.

    Attributes:
        when: condition that tells it from the other rows of this state and event.
        to: state afterwards; `TRAITS[to].sent` is what is sent from then on.
    """

    state: State
    event: Event
    when: str
    to: State


def _rows(
    states: tuple[State, ...], event: Event, *ends: tuple[State, str]
) -> tuple[Transition, ...]:
    return tuple(Transition(state, event, when, to) for to, when in ends for state in states)


RUNNING = (
    State.WAITING,
    State.TRACKING,
    State.APPROACHING,
    State.JOINING,
    State.BRAKING,
    State.HOLDING,
    State.LATCHED,
    State.PAUSED,
    State.LEADING,
)
_S, _E = State, Event
_RESTS = 'the robot rests inside its limits'
_SAGS = 'it sags below its last command, or is outside its limits by no more than may be'
_MOVES = 'the robot moves, and `on_stop` brakes'
_STOPS = 'the robot rests, or `on_stop` freezes'
_FAULT = 'a fault that may pass; the robot moves, and `on_stop` brakes'
_FREEZES = 'a fault that may pass; the robot rests, or `on_stop` freezes'
_PERSON = 'a fault that a person has to look at; the robot rests, or `on_stop` freezes'
_PERSON_MOVES = 'a fault that a person has to look at; the robot moves, and `on_stop` brakes'
_LATCH = 'too many chunks in a row were outside the limits'
_SILENT = 'no tick came for `tick_timeout_s`'
# Rows of several states and one event. An event without a row in a state changes nothing there.
TRANSITIONS: tuple[Transition, ...] = (
    # ~/start
    *_rows((_S.IDLE, _S.STOPPED, _S.RELEASING, _S.RELEASED), _E.START, (_S.WAITING, _RESTS)),
    *_rows((_S.IDLE, _S.STOPPED, _S.RELEASING, _S.RELEASED), _E.START, (_S.APPROACHING, _SAGS)),
    *_rows(
        (_S.STOPPED, _S.RELEASING),
        _E.START,
        (_S.JOINING, 'called again within a minute: it is where nobody saw it go'),
    ),
    *_rows((_S.STOPPING, _S.RELEASING), _E.START, (_S.BRAKING, 'the robot has not come to rest')),
    # chunks
    *_rows(
        (_S.WAITING,),
        _E.CHUNK,
        (_S.TRACKING, 'it is taken'),
        (_S.APPROACHING, 'it begins too far from the robot, and `start.on_too_far` approaches'),
    ),
    *_rows(
        (_S.TRACKING,),
        _E.CHUNK,
        (
            _S.APPROACHING,
            'before the first tick of the plan: it begins too far away',
        ),
    ),
    # ticks
    *_rows((_S.TRACKING,), _E.TICK, (_S.WAITING, 'the plan is at its end')),
    *_rows((_S.APPROACHING,), _E.TICK, (_S.WAITING, 'the robot is there')),
    *_rows((_S.JOINING,), _E.TICK, (_S.WAITING, 'the command is there')),
    *_rows(
        (_S.WAITING, _S.TRACKING, _S.APPROACHING, _S.JOINING, _S.LATCHED),
        _E.TICK,
        (_S.HOLDING, _FREEZES),
    ),
    *_rows(
        (_S.WAITING, _S.TRACKING, _S.APPROACHING, _S.PAUSED),
        _E.TICK,
        (_S.BRAKING, _FAULT),
    ),
    *_rows(
        RUNNING,
        _E.TICK,
        (_S.STOPPED, _PERSON),
    ),
    *_rows(
        (_S.WAITING, _S.TRACKING, _S.APPROACHING, _S.BRAKING, _S.PAUSED),
        _E.TICK,
        (_S.STOPPING, _PERSON_MOVES),
    ),
    *_rows((_S.WAITING, _S.TRACKING, _S.HOLDING, _S.BRAKING), _E.TICK, (_S.LATCHED, _LATCH)),
    *_rows(
        (_S.BRAKING,),
        _E.TICK,
        (_S.HOLDING, 'the robot rests, and the fault stays'),
        (_S.WAITING, 'the robot rests, and the fault has passed'),
        (_S.APPROACHING, 'the same, outside its limits'),
    ),
    *_rows(
        (_S.HOLDING,),
        _E.TICK,
        (_S.WAITING, 'the fault has passed'),
        (_S.TRACKING, 'the simulated clock goes on'),
        (_S.APPROACHING, 'the fault has passed; the robot is outside its limits'),
        (_S.JOINING, 'the fault has passed; the command was on its way'),
    ),
    *_rows((_S.STOPPING,), _E.TICK, (_S.STOPPED, 'the robot rests')),
    *_rows((_S.RELEASING,), _E.TICK, (_S.RELEASED, 'the robot rests, and was sent so')),
    *_rows(
        (_S.STOPPED, _S.RELEASING),
        _E.TICK,
        (_S.IDLE, 'the robot rests; `dry_run` changes'),
    ),
    # ~/stop, ~/release, dry_run, shutdown
    *_rows(
        (_S.WAITING, _S.TRACKING, _S.APPROACHING, _S.BRAKING, _S.PAUSED),
        _E.STOP,
        (_S.STOPPING, _MOVES),
    ),
    *_rows(
        RUNNING,
        _E.STOP,
        (_S.STOPPED, _STOPS),
    ),
    *_rows((*RUNNING, _S.STOPPING, _S.STOPPED), _E.RELEASE, (_S.RELEASING, '')),
    *_rows(
        (_S.WAITING, _S.TRACKING, _S.APPROACHING, _S.BRAKING, _S.PAUSED),
        _E.DRY_RUN,
        (_S.STOPPING, _MOVES),
    ),
    *_rows(
        (*RUNNING, _S.STOPPING),
        _E.DRY_RUN,
        (_S.STOPPED, 'the rest was not sent yet, or the dry run goes on'),
    ),
    *_rows(
        (*RUNNING, _S.STOPPING, _S.STOPPED, _S.RELEASING, _S.RELEASED),
        _E.DRY_RUN,
        (_S.IDLE, 'the robot rests, or the dry run ends'),
    ),
    *_rows((*RUNNING, _S.STOPPING), _E.SHUTDOWN, (_S.STOPPED, '')),
    # ~/pause, ~/resume, ~/home
    *_rows(
        (_S.WAITING, _S.TRACKING, _S.APPROACHING),
        _E.PAUSE,
        (_S.BRAKING, _MOVES),
        (_S.PAUSED, _STOPS),
    ),
    *_rows((_S.BRAKING,), _E.TICK, (_S.PAUSED, 'the robot rests, and is paused')),
    *_rows((_S.HOLDING,), _E.TICK, (_S.PAUSED, 'the fault has passed, and the robot is paused')),
    *_rows((_S.JOINING,), _E.TICK, (_S.PAUSED, 'the command is there, and the robot is paused')),
    *_rows((_S.APPROACHING,), _E.TICK, (_S.PAUSED, 'the robot is at home')),
    *_rows(
        (_S.PAUSED,),
        _E.TICK,
        (_S.APPROACHING, 'the robot rests, and is to go home'),
        (_S.HOLDING, _FREEZES),
    ),
    *_rows(
        (_S.PAUSED,),
        _E.RESUME,
        (_S.WAITING, _RESTS),
        (_S.APPROACHING, 'the robot is outside its limits'),
    ),
    *_rows(
        (_S.WAITING, _S.TRACKING, _S.APPROACHING),
        _E.HOME,
        (_S.BRAKING, _MOVES),
        (_S.PAUSED, _STOPS),
    ),
    *_rows((_S.STOPPING, _S.RELEASING, _S.PAUSED), _E.HOME, (_S.BRAKING, _MOVES)),
    *_rows((_S.PAUSED,), _E.PAUSE, (_S.BRAKING, 'it has come home, and still moves')),
    *_rows(
        (_S.IDLE, _S.STOPPED, _S.RELEASING, _S.RELEASED),
        _E.HOME,
        (_S.PAUSED, 'it was started, and rests'),
    ),
    *_rows(
        (_S.STOPPED, _S.RELEASING),
        _E.HOME,
        (_S.JOINING, 'it was started where nobody saw it go'),
    ),
    # a leader
    *_rows(
        (_S.WAITING, _S.TRACKING, _S.APPROACHING, _S.PAUSED),
        _E.TAKE_OVER,
        (_S.LEADING, 'its messages come, and are plausible'),
    ),
    *_rows(
        (_S.WAITING, _S.TRACKING, _S.APPROACHING),
        _E.TICK,
        (_S.LEADING, 'it sets out, with `engage: motion`'),
    ),
    *_rows(
        (_S.LEADING,),
        _E.GIVE_BACK,
        (_S.WAITING, 'the policy goes on from there'),
        (_S.PAUSED, 'it took over in a pause'),
    ),
    *_rows(
        (_S.LEADING,),
        _E.TICK,
        (_S.WAITING, 'it rests, with `engage: motion`'),
        (_S.BRAKING, 'it is lost, or there is a fault that may pass; the robot moves'),
        (_S.PAUSED, 'it is lost; the robot rests'),
        (_S.HOLDING, _FREEZES),
        (_S.STOPPING, _PERSON_MOVES),
    ),
    *_rows((_S.LEADING,), _E.PAUSE, (_S.BRAKING, _MOVES), (_S.PAUSED, _STOPS)),
    *_rows((_S.LEADING,), _E.HOME, (_S.BRAKING, _MOVES), (_S.PAUSED, _STOPS)),
    *_rows((_S.LEADING,), _E.STOP, (_S.STOPPING, _MOVES)),
    *_rows((_S.LEADING,), _E.DRY_RUN, (_S.STOPPING, _MOVES)),
    *_rows(
        (_S.LEADING,),
        _E.DEAD_MAN,
        (_S.BRAKING, f'{_SILENT}; {_MOVES}'),
        (_S.HOLDING, f'{_SILENT}; {_STOPS}'),
    ),
    # ~/reset, and an episode that begins
    *_rows((_S.TRACKING, _S.APPROACHING), _E.RESET, (_S.WAITING, 'it comes to rest there')),
    *_rows((_S.TRACKING, _S.APPROACHING), _E.EPISODE, (_S.WAITING, 'it comes to rest there')),
    *_rows(
        (_S.LATCHED,),
        _E.RESET,
        (_S.WAITING, 'the latch is open'),
        (_S.PAUSED, 'the latch is open, and the robot is paused'),
    ),
    *_rows(
        (_S.APPROACHING,),
        _E.RESET,
        (_S.PAUSED, 'the robot is paused: it comes to rest there'),
    ),
    *_rows(
        (_S.APPROACHING,),
        _E.EPISODE,
        (_S.PAUSED, 'the robot is paused: it comes to rest there'),
    ),
    # the dead man
    *_rows(
        (_S.TRACKING, _S.APPROACHING, _S.WAITING), _E.DEAD_MAN, (_S.BRAKING, f'{_SILENT}; {_MOVES}')
    ),
    *_rows(
        (_S.WAITING, _S.TRACKING, _S.APPROACHING, _S.JOINING, _S.PAUSED),
        _E.DEAD_MAN,
        (_S.HOLDING, f'{_SILENT}; {_STOPS}'),
    ),
    *_rows(
        (_S.BRAKING,),
        _E.DEAD_MAN,
        (_S.HOLDING, 'the robot rests'),
        (_S.LATCHED, 'the robot rests, behind a closed latch'),
    ),
    *_rows((_S.STOPPING,), _E.DEAD_MAN, (_S.STOPPED, 'the robot rests')),
)
