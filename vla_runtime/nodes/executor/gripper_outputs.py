"""Grippers behind an action: setpoints become goals, and answers become status.

Invariants:
- the control thread only leaves the newest setpoint here. Goals are sent, and answers taken, in the
  thread of the node's callbacks: rclpy's action client is for one thread. No tick waits for it;
- a goal is never cancelled here: a controller of ros2_controllers 4.26 that is not active reads an
  interface then that it has given back;
- at most `goals_hz` goals a second; the newest setpoint is sent when its turn comes, also when no
  other comes after it;
- `flush` sends what is left at once: the hold before the node is deactivated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from action_msgs.msg import GoalStatus
from builtin_interfaces.msg import Time
from rclpy.action import ActionClient
from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode
from rclpy.timer import Timer
from sensor_msgs.msg import JointState

from vla_runtime.messages.diagnostics import Level, StatusItem
from vla_runtime.nodes.executor.gripper_goals import (
    ANSWERS_WITHIN_S,
    GoalState,
    GripperGoals,
    Setpoint,
)
from vla_runtime.nodes.node_runner import OnError, guarded
from vla_runtime.nodes.output_types import action_type
from vla_runtime.nodes.qos import RELIABLE
from vla_runtime.robot.match import MatchedOutput, RobotMatch
from vla_runtime.robot.schema import RobotJoint

_GOALS_HZ = 10.0
# The result of a goal is asked for again: a server that was started anew, or a controller that was
# switched off and on, does not know the goal, and says so.
_ASKS_AGAIN_S = 2.0
# Joint states that came so recently say where the gripper is.
_MEASURED_FOR_S = 1.0
# Share of the joint's range that is no change.
_DEADBAND = 0.01
_UNITS = {'1': '', 'percent': '%'}
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
    GoalState.FORGOTTEN: (
        'goal {goal} was dropped: the gripper controller was switched off or started again. It is '
        'sent again once a second while the robot is commanded'
    ),
    GoalState.UNENDED: (
        'goal {goal} was accepted and does not end, and the gripper stands at {position}: is the '
        'gripper controller active (ros2 control list_controllers)?'
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
_BARRED = '{refusal}. Goal {goal} is sent when it is active, while the robot is commanded'
_LEVELS = {
    GoalState.NO_SERVER: Level.ERROR,
    GoalState.UNANSWERED: Level.ERROR,
    GoalState.REFUSED: Level.ERROR,
    GoalState.FORGOTTEN: Level.ERROR,
    GoalState.UNENDED: Level.ERROR,
    GoalState.STALLED: Level.WARN,
    GoalState.ABORTED: Level.WARN,
    GoalState.TAKEN_OVER: Level.WARN,
    GoalState.FINISHED: Level.WARN,
}


class GripperOutput:
    """One gripper's action: a client from configure to cleanup, an output while the node is active.

    Attributes:
        refusal: why the action's controller would carry out no goal; empty where nothing is known.
    """

    def __init__(
        self,
        node: LifecycleNode,
        joint: RobotJoint,
        matched: MatchedOutput,
        match: RobotMatch,
        on_error: OnError,
    ) -> None:
        output = matched.output
        self.topic = output.topic
        # A gripper keeps its last goal.
        self.repeats_hold = False
        self.refusal = ''
        self._node, self._joint, self._on_error = node, joint, on_error
        (self._column,) = matched.columns
        (self._name,) = matched.message_names
        self._units = matched.units
        self._max_effort = output.max_effort
        self._period_s = 1.0 / (output.goals_hz or _GOALS_HZ)
        lower, upper = (
            float(limit[self._column]) for limit in (match.limits.lower, match.limits.upper)
        )
        deadband = output.deadband or _DEADBAND * (upper - lower)
        self._new_goals = partial(GripperGoals, lower, upper, deadband)
        self._goals = self._new_goals()
        self._make_goal = _GOALS[output.kind]
        self._position_of = _POSITIONS[output.kind]
        kind = action_type(output.kind)
        self._goal_type = kind.Goal
        self._client: ActionClient = ActionClient(node, kind, output.topic)
        self._commanded = node.create_lifecycle_publisher(
            JointState, output.command_topic, RELIABLE
        )
        self._timer: Timer | None = None
        self._answer: Any = None
        # The goal that was accepted, and when its result was asked for.
        self._accepted: Any = None
        self._accepted_s = self._asked_s = 0.0
        self._measured_s = -math.inf

    def send(self, setpoints: np.ndarray, stamp: Time, follows: bool) -> None:
        """Leave the gripper's setpoint; called by the control loop."""
        self._goals.want(float(setpoints[self._column]), time.monotonic(), follows=follows)

    def observe_state(self, names: Sequence[str], positions: Sequence[float]) -> None:
        if self._joint.name not in names:
            return
        index = names.index(self._joint.name)
        if index < len(positions) and math.isfinite(positions[index]):
            self._measured_s = time.monotonic()
            self._goals.measure(positions[index], self._measured_s)

    def begin(self) -> None:
        self._goals = self._new_goals()
        self._timer = self._node.create_timer(
            self._period_s,
            guarded(self._on_error, self.topic, self._poll),
            clock=Clock(clock_type=ClockType.STEADY_TIME),
        )

    def flush(self) -> None:
        """Send the newest setpoint if it is a new goal, and no other after it."""
        self._stop_timer()
        goal = self._goals.last()
        if goal is not None and not self.refusal:
            self._send_goal(goal)

    def close(self) -> None:
        self._stop_timer()
        self._client.destroy()
        self._node.destroy_lifecycle_publisher(self._commanded)

    def is_served(self) -> bool:
        return bool(self._client.server_is_ready())

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            self._node.destroy_timer(timer)

    def _poll(self) -> None:
        goals, now_s = self._goals, time.monotonic()
        if self.refusal:
            goals.bar(now_s)
            return
        if goals.is_open:
            self._look(now_s)
        goal = goals.due(now_s)
        if goal is not None:
            self._send_goal(goal)

    def _look(self, now_s: float) -> None:
        """Find out whether a goal that was accepted is still somebody's."""
        if not self.is_served():
            self._goals.note(GoalState.NO_SERVER)
            return
        self._goals.look(now_s)
        # Twice as late each time: a server keeps every request until the goal ends.
        if now_s - self._asked_s >= max(_ASKS_AGAIN_S, self._asked_s - self._accepted_s):
            self._ask(now_s)

    def _send_goal(self, goal: Setpoint) -> None:
        # An answer that never came is not waited for: the client would remember it for ever.
        answer, self._answer, self._accepted = self._answer, None, None
        if answer is not None and not answer.done():
            answer.cancel()
        served = self.is_served()
        self._goals.sent(goal, time.monotonic(), served=served)
        if not served:
            return
        position = self._in_command(goal.position)
        message = self._goal_type()
        self._make_goal(message, self._name, position, self._max_effort)
        self._answer = self._client.send_goal_async(
            message, feedback_callback=guarded(self._on_error, self.topic, self._on_feedback)
        )
        self._answer.add_done_callback(guarded(self._on_error, self.topic, self._on_answer))
        command = JointState(name=[self._name], position=[position])
        command.header.stamp = self._node.get_clock().now().to_msg()
        self._commanded.publish(command)

    def _on_answer(self, answer: Any) -> None:
        handle = answer.result()
        # None: cancelled here. A goal that a newer one has replaced is no news.
        if handle is None or answer is not self._answer:
            return
        if not handle.accepted:
            self._goals.note(GoalState.REFUSED)
            return
        self._goals.note(GoalState.MOVING)
        self._accepted, self._accepted_s = handle, time.monotonic()
        self._ask(self._accepted_s)

    def _ask(self, now_s: float) -> None:
        self._asked_s = now_s
        result = self._accepted.get_result_async()
        callback = partial(self._on_result, self._accepted)
        result.add_done_callback(guarded(self._on_error, self.topic, callback))

    def _on_result(self, accepted: Any, answer: Any) -> None:
        response = answer.result()
        if response is None or accepted is not self._accepted or not self._goals.is_open:
            return
        if response.status == GoalStatus.STATUS_UNKNOWN:
            self._goals.note(GoalState.FORGOTTEN)
            return
        self._goals.stopped_at = self._position_of(response.result)
        self._goals.note(_end_of(response))

    def _on_feedback(self, message: Any) -> None:
        """Take the server's measured position where no joint state has one."""
        position, now_s = self._position_of(message.feedback), time.monotonic()
        if position is None or now_s - self._measured_s < _MEASURED_FOR_S:
            return
        if self._units is not None:
            position = (position - self._units.offset[0]) / self._units.scale[0]
        self._goals.measure(float(position), now_s)

    def _in_command(self, position: float) -> float:
        if self._units is None:
            return position
        return float(position * self._units.scale[0] + self._units.offset[0])

    def status(self) -> StatusItem:
        """Return the status of the newest goal; its numbers are the command's."""
        goals = self._goals
        state, goal, stopped_at = goals.state, goals.goal, goals.stopped_at
        if state is GoalState.UNENDED and goals.measured is not None:
            stopped_at = self._in_command(goals.measured)
        unit = _UNITS.get(self._joint.command_unit, f' {self._joint.command_unit}')
        wanted = None if goal is None else self._in_command(goal.position)
        barred = state is GoalState.REFUSED and self.refusal
        text = (_BARRED if barred else _TEXTS[state]).format(
            refusal=self.refusal,
            goal='' if wanted is None else f'{wanted:.4g}{unit}',
            position='an unknown position' if stopped_at is None else f'{stopped_at:.4g}{unit}',
            topic=self.topic,
            name=self._name,
            answer_s=ANSWERS_WITHIN_S,
        )
        level = _LEVELS.get(state, Level.OK)
        if state is GoalState.STALLED and self._joint.grips:
            # Holding an object is what a gripper is for.
            level = Level.OK
            text += ': it holds an object, or something blocks it'
        elif state is GoalState.STALLED:
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
                **vars(goals.counters),
            },
        )


def _end_of(response: Any) -> GoalState:
    # A controller may call a stall a success or an abort, as it is configured.
    if response.result.stalled:
        return GoalState.STALLED
    if response.status == GoalStatus.STATUS_CANCELED:
        return GoalState.TAKEN_OVER
    if response.status == GoalStatus.STATUS_ABORTED:
        return GoalState.ABORTED
    return GoalState.REACHED if response.result.reached_goal else GoalState.FINISHED


def _gripper_command(goal: Any, name: str, position: float, max_effort: float | None) -> None:
    goal.command.position = position
    # The controller's own where it is 0.
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
# The position in a result and in feedback.
_POSITIONS: dict[str, Callable[[Any], float | None]] = {
    'gripper_command': _only_position,
    'parallel_gripper_command': _first_position,
}
