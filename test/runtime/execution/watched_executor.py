"""An executor that holds each of its calls to the table of its states."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from vla_runtime.execution.command import CommandKind
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.states import TRAITS, TRANSITIONS, Event, Sent, State

CALLS = {
    'start': Event.START,
    'stop': Event.STOP,
    'pause': Event.PAUSE,
    'resume': Event.RESUME,
    'go_home': Event.HOME,
    'take_over': Event.TAKE_OVER,
    'give_back': Event.GIVE_BACK,
    'release': Event.RELEASE,
    'stop_at_once': Event.SHUTDOWN,
    'reset': Event.RESET,
    'begin_episode': Event.EPISODE,
    'set_dry_run': Event.DRY_RUN,
    'submit_chunk': Event.CHUNK,
    'tick': Event.TICK,
    'dead_man': Event.DEAD_MAN,
}
ROWS = {(row.state, row.event, row.to) for row in TRANSITIONS}
# Kinds of the commands of a tick. A plan or a way stands still while plan time does.
_HOLDS = {CommandKind.IDLE, CommandKind.HOLD}
KINDS = {
    Sent.NOTHING: {CommandKind.IDLE},
    Sent.HOLD: _HOLDS,
    Sent.REST: {*_HOLDS, CommandKind.TRACK, CommandKind.APPROACH, CommandKind.LEAD},
    Sent.PLAN: {*_HOLDS, CommandKind.TRACK},
    Sent.APPROACH: {*_HOLDS, CommandKind.APPROACH},
    Sent.LEADER: {*_HOLDS, CommandKind.LEAD},
    Sent.JOIN: _HOLDS,
}
# Changes of state that were seen in this process.
SEEN: Counter[tuple[State, Event, State]] = Counter()


class WatchedExecutor(ChunkExecutor):
    """Every change of state that a call of it makes is a row of the table, and is counted."""

    inside = False
    ticked_ns = -1


def _watched(call: Callable[..., Any], event: Event) -> Callable[..., Any]:
    @functools.wraps(call)
    def watched(self: WatchedExecutor, *given: Any, **named: Any) -> Any:
        if self.inside:  # one call of the executor makes another
            return call(self, *given, **named)
        before, self.inside = self.state, True
        try:
            result = call(self, *given, **named)
        finally:
            self.inside = False
        if self.state is not before:
            change = (before, event, self.state)
            assert change in ROWS, change
            SEEN[change] += 1
        # Between two messages of a simulated clock the last command is repeated, whatever it was.
        if event is Event.TICK and given[1] != self.ticked_ns:
            self.ticked_ns = given[1]
            assert result.kind in KINDS[TRAITS[self.state].sent], (self.state, result)
        return result

    return watched


for _name, _event in CALLS.items():
    setattr(WatchedExecutor, _name, _watched(getattr(ChunkExecutor, _name), _event))
