"""Grippers behind an action: setpoints become goals, and answers become status.

Invariants:
- the control thread only leaves the newest setpoint here. Goals are sent, and answers taken, in the
  thread of the node's callbacks: rclpy's action client is for one thread;
- a setpoint is a new goal when it differs from the last goal by more than the deadband, reaches an
  end of the joint's range, or begins anew after the robot was not commanded; `goals_hz` is the
  most, and the newest setpoint is never left out for good;
- a refused goal is sent again once a second while the robot is commanded, and never after that;
- `flush` sends what is left at once: the hold before the node is deactivated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from action_msgs.msg import GoalStatus
from builtin_interfaces.msg import Time
from rclpy.action import ActionClient
from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode
from rclpy.timer import Timer
from sensor_msgs.msg import JointState

from vla_runtime.ros.messages.diagnostics import Level, StatusItem
from vla_runtime.ros.messages.output_types import action_type
from vla_runtime.ros.node_runner import OnError, guarded
from vla_runtime.ros.qos import RELIABLE
from vla_runtime.ros.robot.match import MatchedOutput, RobotMatch
from vla_runtime.ros.robot.schema import RobotJoint

_GOALS_HZ = 10.0
# Share of the joint's range that is no change.
_DEADBAND = 0.01
# A server answers within milliseconds.
_ANSWERS_WITHIN_S = 1.0
_AGAIN_AFTER_S = 1.0
# A setpoint of this age is no command any more: the executor has fallen silent.
_SILENT_AFTER_S = 0.5
# Of the range: closer to its end than this is at its end.
_AT_END = 1e-6
_UNITS = {'1': '', 'percent': '%'}


class GoalState(str, Enum):
    """What became of the newest goal."""

    NONE = 'none'
    SENT = 'sent'
    NO_SERVER = 'no_server'
    UNANSWERED = 'unanswered'
    REFUSED = 'refused'
    MOVING = 'moving'
    REACHED = 'reached'
    STALLED = 'stalled'
    ABORTED = 'aborted'
    TAKEN_OVER = 'taken_over'
    FINISHED = 'finished'


# Not taken by any server.
_LOST = (GoalState.NO_SERVER, GoalState.UNANSWERED, GoalState.REFUSED)
_TEXTS = {
    GoalState.NONE: 'no goal yet',
    GoalState.SENT: 'goal {goal} sent',
    GoalState.NO_SERVER: (
        'no action server {topic} takes goal {goal}: start the gripper controller, or mend the '
        "output's topic in the robot file"
    ),
    GoalState.UNANSWERED: (
        'no answer to goal {goal} within {answer_s:g} s: does the gripper controller hang?'
    ),
    GoalState.REFUSED: (
        'goal {goal} was refused: is the gripper controller active, and does it control '
        "'{name}'? It is sent again once a second while the robot is commanded"
    ),
    GoalState.MOVING: 'on its way to {goal}',
    GoalState.REACHED: 'reached {goal}',
    GoalState.STALLED: 'stalled at {position}, short of {goal}',
    GoalState.ABORTED: (
        "goal {goal} was aborted at {position}: the gripper controller's log says why"
    ),
    GoalState.TAKEN_OVER: (
        'goal {goal} was cancelled by the gripper controller: does another node command the '
        'gripper?'
    ),
    GoalState.FINISHED: 'goal {goal} has ended at {position}, not reached',
}
_LEVELS = {
    GoalState.NO_SERVER: Level.ERROR,
    GoalState.UNANSWERED: Level.ERROR,
    GoalState.REFUSED: Level.ERROR,
    GoalState.STALLED: Level.WARN,
    GoalState.ABORTED: Level.WARN,
    GoalState.TAKEN_OVER: Level.WARN,
    GoalState.FINISHED: Level.WARN,
}


class _Wanted(NamedTuple):
    """The newest setpoint.

    Attributes:
        position: in the joint's unit.
        beginning: counts the times that commands began anew.
        at_s: steady time at which it came.
    """

    position: float
    beginning: int
    at_s: float


@dataclass
class GoalCounters:
    """What happened since the activation."""

    goals: int = 0
    lost: int = 0
    refused: int = 0
    stalled: int = 0
    aborted: int = 0
    taken_over: int = 0


class GripperOutput:
    """One gripper's action: a client from configure to cleanup, an output while the node is active.

    Args:
        node: the executor node.
        joint: the gripper.
        matched: its output.
        match: gives the limits.
        on_error: called with where an exception was raised, and the exception.
        clock_s: steady clock.
    """

    def __init__(
        self,
        node: LifecycleNode,
        joint: RobotJoint,
        matched: MatchedOutput,
        match: RobotMatch,
        on_error: OnError,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        output = matched.output
        self.topic = output.topic
        self._node, self._joint, self._on_error, self._clock_s = node, joint, on_error, clock_s
        (self._column,) = matched.columns
        (self._name,) = matched.message_names
        self._units = matched.units
        self._max_effort = output.max_effort
        self._period_s = 1.0 / (output.goals_hz or _GOALS_HZ)
        self._lower = float(match.limits.lower[self._column])
        self._upper = float(match.limits.upper[self._column])
        self._deadband = output.deadband or _DEADBAND * (self._upper - self._lower)
        self._make_goal = _GOALS[output.kind]
        self._position_of = _POSITIONS[output.kind]
        kind = action_type(output.kind)
        self._goal_type = kind.Goal
        self._client = ActionClient(node, kind, output.topic)
        self._goals = node.create_lifecycle_publisher(JointState, output.command_topic, RELIABLE)
        self._timer: Timer | None = None
        self._forget()

    def _forget(self) -> None:
        self._wanted: _Wanted | None = None
        self._beginning = 0
        self._goal: _Wanted | None = None
        self._state = GoalState.NONE
        self._sent_s = -np.inf
        self._answer: Any = None
        self._stopped_at: float | None = None
        self.counters = GoalCounters()

    # ------------------------------------------------------------ control thread

    def send(self, setpoints: np.ndarray, stamp: Time, follows: bool) -> None:
        """Leave the setpoint of the gripper; it becomes a goal when the next one is due."""
        if not follows:
            self._beginning += 1
        self._wanted = _Wanted(float(setpoints[self._column]), self._beginning, self._clock_s())

    # ------------------------------------------------------------ thread of the node's callbacks

    def begin(self) -> None:
        """Send goals from now on, as if there had been none."""
        self._forget()
        self._timer = self._node.create_timer(
            self._period_s,
            guarded(self._on_error, self.topic, self.poll),
            clock=Clock(clock_type=ClockType.STEADY_TIME),
        )

    def flush(self) -> None:
        """Send the newest setpoint if it is a new goal, and no other after it."""
        timer, self._timer = self._timer, None
        if timer is not None:
            self._node.destroy_timer(timer)
        wanted = self._wanted
        if wanted is not None and self._is_new(wanted):
            self._send_goal(wanted)

    def close(self) -> None:
        """Leave the graph."""
        timer, self._timer = self._timer, None
        if timer is not None:
            self._node.destroy_timer(timer)
        self._client.destroy()
        self._node.destroy_lifecycle_publisher(self._goals)

    def is_served(self) -> bool:
        """Return whether an action server is there."""
        return bool(self._client.server_is_ready())

    def poll(self) -> None:
        """Send the newest setpoint if it is a new goal, or one that nobody took."""
        wanted, now_s = self._wanted, self._clock_s()
        if self._state is GoalState.SENT:
            if now_s - self._sent_s < _ANSWERS_WITHIN_S:
                return
            self._state = GoalState.UNANSWERED
            self.counters.lost += 1
        if wanted is None:
            return
        if self._state in _LOST:
            commanded = now_s - wanted.at_s < _SILENT_AFTER_S
            if commanded and now_s - self._sent_s >= _AGAIN_AFTER_S:
                self._send_goal(wanted)
        elif self._is_new(wanted):
            self._send_goal(wanted)

    def _is_new(self, wanted: _Wanted) -> bool:
        goal = self._goal
        if goal is None or goal.beginning != wanted.beginning:
            return True
        change = abs(wanted.position - goal.position)
        if change > self._deadband:
            return True
        near = _AT_END * (self._upper - self._lower)
        at_end = min(wanted.position - self._lower, self._upper - wanted.position) <= near
        return at_end and change > near

    def _send_goal(self, wanted: _Wanted) -> None:
        self._goal, self._sent_s, self._stopped_at = wanted, self._clock_s(), None
        # An answer that never came is not waited for: the client would keep its place for ever.
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.cancel()
        if not self.is_served():
            self._state = GoalState.NO_SERVER
            self.counters.lost += 1
            return
        self._state = GoalState.SENT
        self.counters.goals += 1
        position = self._in_command(wanted.position)
        goal = self._goal_type()
        self._make_goal(goal, self._name, position, self._max_effort)
        self._answer = self._client.send_goal_async(goal)
        self._answer.add_done_callback(
            guarded(self._on_error, self.topic, partial(self._on_answer, wanted))
        )
        message = JointState(name=[self._name], position=[position])
        message.header.stamp = self._node.get_clock().now().to_msg()
        self._goals.publish(message)

    def _on_answer(self, goal: _Wanted, answer: Any) -> None:
        handle = answer.result()
        if goal is not self._goal or handle is None:
            return
        if not handle.accepted:
            self._state = GoalState.REFUSED
            self.counters.refused += 1
            return
        self._state = GoalState.MOVING
        handle.get_result_async().add_done_callback(
            guarded(self._on_error, self.topic, partial(self._on_result, goal))
        )

    def _on_result(self, goal: _Wanted, answer: Any) -> None:
        response = answer.result()
        # A goal that a newer one has replaced ends as cancelled: no news.
        if goal is not self._goal or response is None:
            return
        result = response.result
        self._stopped_at = self._position_of(result)
        if result.stalled:
            self._state = GoalState.STALLED
            self.counters.stalled += 1
        elif response.status == GoalStatus.STATUS_CANCELED:
            self._state = GoalState.TAKEN_OVER
            self.counters.taken_over += 1
        elif response.status == GoalStatus.STATUS_ABORTED:
            self._state = GoalState.ABORTED
            self.counters.aborted += 1
        else:
            self._state = GoalState.REACHED if result.reached_goal else GoalState.FINISHED

    def _in_command(self, position: float) -> float:
        if self._units is None:
            return position
        return float(position * self._units.scale[0] + self._units.offset[0])

    # ------------------------------------------------------------ status

    def status(self) -> StatusItem:
        """Return the status of the newest goal; the numbers are the command's."""
        state, goal, stopped_at = self._state, self._goal, self._stopped_at
        unit = _UNITS.get(self._joint.command_unit, f' {self._joint.command_unit}')
        wanted = None if goal is None else self._in_command(goal.position)
        text = _TEXTS[state].format(
            goal='' if wanted is None else f'{wanted:.4g}{unit}',
            position='an unknown position' if stopped_at is None else f'{stopped_at:.4g}{unit}',
            topic=self.topic,
            name=self._name,
            answer_s=_ANSWERS_WITHIN_S,
        )
        level = _LEVELS.get(state, Level.OK)
        if state is GoalState.STALLED:
            # What a gripper is for.
            if self._joint.grips:
                level = Level.OK
                text += ': it holds an object, or something blocks it'
            else:
                text += ': something blocks it; a gripper that shall hold objects has grips: true'
        return StatusItem(
            f'gripper {self.topic}',
            level,
            text,
            {
                'joint': self._joint.name,
                'state': state.value,
                'goal': '' if wanted is None else wanted,
                'stopped_at': '' if stopped_at is None else stopped_at,
                **vars(self.counters),
            },
        )


def _gripper_command(goal: Any, name: str, position: float, max_effort: float | None) -> None:
    goal.command.position = position
    goal.command.max_effort = max_effort or 0.0


def _parallel_gripper_command(
    goal: Any, name: str, position: float, max_effort: float | None
) -> None:
    goal.command.name = [name]
    goal.command.position = [position]
    goal.command.effort = [] if max_effort is None else [max_effort]


def _only_position(result: Any) -> float:
    return float(result.position)


def _first_position(result: Any) -> float | None:
    # A controller that says nothing of where it is leaves the list empty.
    return float(result.state.position[0]) if len(result.state.position) else None


_GOALS: dict[str, Callable[[Any, str, float, float | None], None]] = {
    'gripper_command': _gripper_command,
    'parallel_gripper_command': _parallel_gripper_command,
}
_POSITIONS: dict[str, Callable[[Any], float | None]] = {
    'gripper_command': _only_position,
    'parallel_gripper_command': _first_position,
}
