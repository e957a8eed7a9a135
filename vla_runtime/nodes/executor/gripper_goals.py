"""Goals of one gripper: which setpoints become one, and what became of the newest. No ROS here.

Invariants:
- a setpoint is a new goal when it differs from the last goal by more than the deadband, comes to an
  end of the joint's range, or is the first after the robot was not commanded;
- nothing is sent while the server owes an answer, for a second;
- a goal that no server took, or that one has dropped, is sent again once a second while the robot
  is commanded, and never after that: a gripper must not move by itself when its controller comes
  back;
- a goal that was taken and has no result is no motion for ever: it counts as reached, or as not
  ended, when the gripper stands still.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

# A server answers within milliseconds.
ANSWERS_WITHIN_S = 1.0
AGAIN_AFTER_S = 1.0
# A controller ends a goal about a second after the gripper has come to a stand (`stall_timeout`).
STANDS_S = 3.0
# The same where the gripper's position is unknown.
UNSEEN_S = 10.0
# A measured position of this age says nothing of now.
_OLD_AFTER_S = 1.0
# A setpoint of this age is no command: the executor has fallen silent.
_SILENT_AFTER_S = 0.5
# Share of the deadband below which a change of the measured position is no motion.
_STANDS = 0.5
# Share of the range: closer to its end than this is at its end.
_AT_END = 1e-6


class GoalState(str, Enum):
    """What became of the newest goal."""

    NONE = 'none'
    SENT = 'sent'
    NO_SERVER = 'no_server'
    UNANSWERED = 'unanswered'
    REFUSED = 'refused'
    MOVING = 'moving'
    UNENDED = 'unended'
    FORGOTTEN = 'forgotten'
    REACHED = 'reached'
    STALLED = 'stalled'
    ABORTED = 'aborted'
    TAKEN_OVER = 'taken_over'
    FINISHED = 'finished'


# No server is about to carry it out.
_LOST = (GoalState.NO_SERVER, GoalState.UNANSWERED, GoalState.REFUSED, GoalState.FORGOTTEN)
# Taken by a server that owes the result.
_OPEN = (GoalState.MOVING, GoalState.UNENDED)


class Setpoint(NamedTuple):
    """A setpoint in the joint's unit and its steady time; `beginning` counts starts of commands."""

    position: float
    beginning: int
    at_s: float


@dataclass
class GoalCounters:
    """What happened since the activation."""

    goals: int = 0
    no_server: int = 0
    unanswered: int = 0
    refused: int = 0
    forgotten: int = 0
    unended: int = 0
    reached: int = 0
    stalled: int = 0
    aborted: int = 0
    taken_over: int = 0
    finished: int = 0


class GripperGoals:
    """See the module's invariants.

    Args:
        deadband: largest change that is none, in the joint's unit.

    Attributes:
        goal: the newest goal; None before the first; `state` says what became of it.
        stopped_at: where the server said that the gripper is at its end; None where it did not.
        measured: where the gripper is; None where unknown.
    """

    def __init__(self, lower: float, upper: float, deadband: float) -> None:
        self._lower, self._upper, self._deadband = lower, upper, deadband
        self._wanted: Setpoint | None = None
        self._beginning = 0
        self._sent_s = -math.inf
        self.goal: Setpoint | None = None
        self.state = GoalState.NONE
        self.stopped_at: float | None = None
        self.measured: float | None = None
        self._measured_s = -math.inf
        self._stood_at, self._moved_s = math.nan, -math.inf
        self.counters = GoalCounters()

    def want(self, position: float, now_s: float, *, follows: bool) -> None:
        """Take a setpoint; never waits. With `follows` it goes on from the one before it."""
        if not follows:
            self._beginning += 1
        # One assignment, so that the other thread sees all of it or nothing.
        self._wanted = Setpoint(position, self._beginning, now_s)

    def due(self, now_s: float) -> Setpoint | None:
        wanted = self._wanted
        if self.state is GoalState.SENT:
            if now_s - self._sent_s < ANSWERS_WITHIN_S:
                return None
            self.note(GoalState.UNANSWERED)
        if wanted is None:
            return None
        if self.state in _LOST:
            again = self._is_commanded(now_s) and now_s - self._sent_s >= AGAIN_AFTER_S
            return wanted if again else None
        return wanted if self._is_new(wanted) else None

    def bar(self, now_s: float) -> None:
        """Note that no controller would carry out a goal now: what is under way is lost."""
        under_way = self.state is GoalState.SENT or self.is_open or self._is_commanded(now_s)
        if under_way and self.state is not GoalState.REFUSED:
            self.note(GoalState.REFUSED)
        self._sent_s = now_s

    def measure(self, position: float, now_s: float) -> None:
        self.measured, self._measured_s = position, now_s
        if not abs(position - self._stood_at) <= _STANDS * self._deadband:
            self._stood_at, self._moved_s = position, now_s

    def look(self, now_s: float) -> None:
        """Judge a goal without a result by the gripper's motion."""
        seen = now_s - self._measured_s < _OLD_AFTER_S
        if not seen:
            self.measured = None
        stood_s = now_s - max(self._sent_s, self._moved_s)
        stands = stood_s > (STANDS_S if seen else UNSEEN_S)
        if self.state is GoalState.MOVING and stands:
            self.note(GoalState.REACHED if self._is_there() else GoalState.UNENDED)
        elif self.state is GoalState.UNENDED and not stands:
            self.state = GoalState.MOVING

    @property
    def is_open(self) -> bool:
        """True while a server that took the goal owes its result."""
        return self.state in _OPEN

    def _is_there(self) -> bool:
        goal, measured = self.goal, self.measured
        if goal is None or measured is None:
            return False
        return abs(measured - goal.position) <= self._deadband

    def _is_commanded(self, now_s: float) -> bool:
        return self._wanted is not None and now_s - self._wanted.at_s < _SILENT_AFTER_S

    def last(self) -> Setpoint | None:
        wanted = self._wanted
        return wanted if wanted is not None and self._is_new(wanted) else None

    def sent(self, goal: Setpoint, now_s: float, *, served: bool) -> None:
        """Note that a goal was sent, or that there was no server to send it to."""
        self.goal, self._sent_s, self.stopped_at = goal, now_s, None
        self.counters.goals += served
        self.state = GoalState.SENT
        if not served:
            self.note(GoalState.NO_SERVER)

    def note(self, state: GoalState) -> None:
        self.state = state
        name = state.value
        if hasattr(self.counters, name):
            setattr(self.counters, name, getattr(self.counters, name) + 1)

    def _is_new(self, wanted: Setpoint) -> bool:
        goal = self.goal
        if goal is None or goal.beginning != wanted.beginning:
            return True
        change = abs(wanted.position - goal.position)
        if change > self._deadband:
            return True
        near = _AT_END * (self._upper - self._lower)
        at_end = min(wanted.position - self._lower, self._upper - wanted.position) <= near
        return at_end and change > near
