"""What the controllers of ros2_control say about themselves: active, refusing, slowed down.

A controller that is not active, or that refuses a command, says so in its own log only. Here it is
found by its `controller_state`, its parameters and controller_manager's list. Without control_msgs
and controller_manager_msgs, and for outputs that are no controllers of ros2_control, nothing is
known and nothing is required.

Invariants:
- nothing here waits: `look` runs in a thread of its own, all else reads what it found;
- an output's controller is the node that its topic or action lies under
  (`arm_controller/joint_trajectory`), if controller_manager lists it; MoveIt Servo is none;
- a controller that was off is on again once its own state says so, where it publishes one;
- silence of `/clock` is no silence of a controller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from action_msgs.msg import GoalStatus, GoalStatusArray
from rclpy.action import get_action_client_names_and_types_by_node
from rclpy.client import Client
from rclpy.node import Node, NodeNameNonExistentError

from vla_runtime.messages.trajectories import stamp_to_ns
from vla_runtime.nodes.executor.controller_conflicts import (
    ControllerChains,
    interface_conflict,
    joint_conflict,
)
from vla_runtime.nodes.executor.controller_parameters import ControllerParameters
from vla_runtime.nodes.executor.silences import Silence, StreamSilences
from vla_runtime.nodes.executor.trajectory_message import TrajectoryController
from vla_runtime.nodes.polled_topics import PolledTopics
from vla_runtime.nodes.qos import LATCHED
from vla_runtime.nodes.service_call import ServiceCall
from vla_runtime.robot.match import MatchedOutput
from vla_runtime.robot.schema import RobotOutput, SpeedScalingTopic

LOOKS_HZ = 100.0
# A controller publishes its state 50 times a second, or in each of its cycles.
_SILENT_S = 0.5
_SILENT = 'silent'
_LISTS_EVERY_S = 0.1
# A controller is listed as active so long before it publishes its first state.
_BEGINS_WITHIN_S = 0.5
# Way of a reference that counts as motion, rad or m, and for how long.
_MOTION, _MOTION_COUNTS_S = 1e-3, 0.3
# What was sent is on its way for no longer than this, with the delay of a trajectory.
_ON_ITS_WAY_S = 0.3
_LIVE_GOALS = (GoalStatus.STATUS_ACCEPTED, GoalStatus.STATUS_EXECUTING, GoalStatus.STATUS_CANCELING)
# An answer that took longer than this says nothing of now.
_LIST_IS_OLD_S = 1.0
_CLOCKS_KEPT = 20
# A state comes within some tenths of a millisecond on one computer.
_SAME_CLOCK_NS = (-1_000_000, 5_000_000)
_SAME_SIMULATED_CLOCK_NS = (-100_000_000, 100_000_000)
_DEFAULT_RATE_HZ = 100.0
# A controller holds, and begins anew, where its error comes to a path constraint.
_CONSTRAINT_SHARE = 0.8
# Kinds whose controllers only the list describes, as it does those behind actions.
_LISTED_KINDS = ('pose_stamped', 'twist_stamped')
_SCALING_FIELDS = {'std_msgs/Float64': 'data', 'control_msgs/SpeedScalingFactor': 'factor'}


def _message_type(package: str, part: str, name: str) -> type | None:
    try:
        found: type = getattr(import_module(f'{package}.{part}'), name)
    except (ImportError, AttributeError):
        return None
    return found


def state_type() -> type | None:
    """Return the type of a trajectory controller's state; None without control_msgs."""
    return _message_type('control_msgs', 'msg', 'JointTrajectoryControllerState')


@dataclass(frozen=True)
class Verdict:
    """What is known of one output's controller.

    Attributes:
        name: full name of its node.
        active: None where nobody says so.
        asked: somebody is about to say so.
        unread: its parameters are about to come.
        refusal: why it takes no commands, and what mends it; empty where nothing is known of it.
        warning: why its motion is not what it could be; empty without a reason.
        of_action: the output is a gripper's action, whose faults do not stop the arm.
    """

    name: str
    topic: str
    columns: tuple[int, ...] = ()
    active: bool | None = None
    asked: bool = False
    unread: bool = False
    refusal: str = ''
    warning: str = ''
    of_action: bool = False


class ControllerWatch:
    """Watches the outputs' controllers; see the module. Topics have full names."""

    def __init__(
        self,
        node: Node,
        outputs: Sequence[tuple[MatchedOutput, str]],
        scaling_topic: SpeedScalingTopic | None,
        *,
        use_sim_time: bool,
        now_ns: Callable[[], int],
    ) -> None:
        self._topics = PolledTopics(node)
        self._lists: dict[str, _ControllerList] = {}
        self._controllers: list[_Controller] = []
        self._listed: list[_ListedController] = []
        for matched, topic in outputs:
            name = topic.rpartition('/')[0]
            if name and matched.output.kind in ('joint_trajectory', 'float64_multi_array'):
                manager = f'{name.rpartition("/")[0]}/controller_manager'
                listed = self._lists.setdefault(manager, _ControllerList(node, manager))
                controller = _Controller(
                    node, name, matched, self._topics, listed, now_ns, use_sim_time=use_sim_time
                )
                self._controllers.append(controller)
            elif name and (matched.output.kind in _LISTED_KINDS or matched.output.is_action):
                manager = f'{name.rpartition("/")[0]}/controller_manager'
                listed = self._lists.setdefault(manager, _ControllerList(node, manager))
                self._listed.append(_ListedController(name, matched.output, listed))
        self._scaling = None
        if scaling_topic is not None:
            self._scaling = _ScalingTopic(self._topics, node, scaling_topic)
        self._verdicts: tuple[Verdict, ...] = ()

    def look(self, now_s: float) -> None:
        """Take what came, and judge; `now_s` is the steady clock."""
        for listed in self._lists.values():
            listed.look(now_s)
        for controller in self._controllers:
            controller.ask_after(now_s)
        if self._scaling is not None:
            self._scaling.look()
        self._verdicts = tuple(controller.look(now_s) for controller in self._controllers)
        self._verdicts += tuple(controller.look() for controller in self._listed)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return self._verdicts

    def unwatched(self) -> str:
        """Name the packages that are missing to watch the controllers of this graph; else empty."""
        missing = [
            package
            for package, watched in (
                ('control_msgs', self._controllers),
                ('controller_manager_msgs', self._lists.values()),
            )
            if any(one.is_unreadable() for one in watched)
        ]
        if not missing:
            return ''
        debs = ' '.join(f'ros-$ROS_DISTRO-{package.replace("_", "-")}' for package in missing)
        return (
            f"not installed: {', '.join(missing)}. So the state of the robot's controllers cannot "
            'be read, and an inactive one is noticed only when the robot does not follow: '
            f'sudo apt install {debs}'
        )

    def trajectory_controllers(self) -> dict[str, TrajectoryController | None]:
        """Return, by the outputs' topics, the controllers whose rules trajectories may count on."""
        return {one.topic: one.trajectory for one in self._controllers}

    def scaling(self) -> float:
        """Share of its speed that the robot moves at, 0.0 to 1.0: the least reported."""
        factors = [] if self._scaling is None else [self._scaling.factor]
        factors += [controller.scaling for controller in self._controllers]
        return min(factors, default=1.0)

    def references(self, columns: int) -> np.ndarray:
        """Return the positions that the active controllers hold or follow.

        (columns,) float64, robot units; not-a-number where unknown.
        """
        found = np.full(columns, np.nan)
        for controller in self._controllers:
            found[list(controller.columns)] = controller.reference
        return found

    def newest_silence(self) -> Silence | None:
        found = [one.silence for one in self._controllers if one.silence is not None]
        return max(found, key=lambda silence: silence.ended_s, default=None)

    def why_led(self, sent_s: Mapping[str, float], now_s: float) -> str:
        """Name controllers that follow another node.

        `sent_s` is the steady time of our last command.
        """
        found = (
            controller.why_led(sent_s.get(controller.topic, -np.inf), now_s)
            for controller in self._controllers
        )
        return '; '.join(filter(None, found))

    def close(self) -> None:
        for controller in self._controllers:
            controller.close()
        for listed in self._lists.values():
            listed.close()
        self._topics.close()


def why_refused(verdicts: Sequence[Verdict]) -> str:
    """Name the controllers that would not take commands; empty where all may."""
    return '; '.join(verdict.refusal for verdict in verdicts if verdict.refusal)


def why_not_yet(verdicts: Sequence[Verdict]) -> str:
    """Name the controllers that have just been asked; empty where all is known."""
    asked = [f"'{verdict.name}'" for verdict in verdicts if verdict.asked]
    if not asked:
        unread = any(verdict.unread for verdict in verdicts)
        return 'the parameters of a controller are being read: call ~/start again' if unread else ''
    return f'{", ".join(asked)} was just asked whether it is active: call ~/start again'


def warnings_of(verdicts: Sequence[Verdict]) -> str:
    return '; '.join(verdict.warning for verdict in verdicts if verdict.warning)


class _Controller:
    def __init__(
        self,
        node: Node,
        name: str,
        matched: MatchedOutput,
        topics: PolledTopics,
        listed: _ControllerList,
        now_ns: Callable[[], int],
        *,
        use_sim_time: bool,
    ) -> None:
        self._node, self.name = node, name
        self._output: RobotOutput = matched.output
        self.topic = matched.output.topic
        self._joints = tuple(matched.message_names)
        self.columns = tuple(matched.columns)
        self._units = matched.units
        self._listed = listed
        self._now_ns, self._use_sim_time = now_ns, use_sim_time
        self._parameters = ControllerParameters(node, name)
        self._state_topic = f'{name}/controller_state'
        self._states = None
        self._action = f'{name}/follow_joint_trajectory'
        self._goals = None
        if matched.output.kind == 'joint_trajectory':
            if (state := state_type()) is not None:
                self._states = topics.subscribe(state, self._state_topic)
            status = f'{self._action}/_action/status'
            self._goals = topics.subscribe(GoalStatusArray, status, LATCHED)
        self._published_s: float | None = None
        self._heard_s: float | None = None
        self._silences = StreamSilences()
        self._asked_after_s: float | None = None
        # Steady times: found not to be active, listed as active again, the reference moved.
        self._off_s: float | None = None
        self._listed_s: float | None = None
        self._moved_s = -np.inf
        # Goals of its action that are alive, and the steady times at which they were seen first.
        self._live: dict[bytes, float] = {}
        self._heard_ros_ns = 0
        self._ages_ns: deque[int] = deque(maxlen=_CLOCKS_KEPT)
        self._scales = False
        self._lag: dict[str, float] = {}
        self.scaling = 1.0
        # (joints,) robot units; not-a-number where it is unknown.
        self.reference = np.full(len(self.columns), np.nan)
        # Where the reference was when it moved last.
        self._stood_at = self.reference
        self.trajectory: TrajectoryController | None = None

    @property
    def silence(self) -> Silence | None:
        return self._silences.newest

    def ask_after(self, now_s: float) -> None:
        """Ask controller_manager at once where a state is overdue."""
        heard_s = self._heard_s
        if heard_s is None or heard_s == self._asked_after_s or self._off_s is not None:
            return
        if now_s - heard_s > self._silences.longest_usual_s:
            self._asked_after_s = heard_s
            self._listed.ask_soon()

    def look(self, now_s: float) -> Verdict:
        self._parameters.look()
        self._hear(now_s)
        self._hear_goals(now_s)
        active, state = self._is_active(now_s)
        self.trajectory = self._as_trajectory_controller()
        if active is False and self._off_s is None:
            self._off_s = now_s
            self._parameters.ask_anew()
            self._silences.pause()
        elif active:
            self._off_s = None
        if not active:
            self.reference = self._stood_at = np.full(len(self.columns), np.nan)
        asked = active is None and (self._listed.asked or self._published_s is not None)
        return Verdict(
            self.name,
            self.topic,
            self.columns,
            active,
            asked,
            self._parameters.is_awaited(),
            self._refusal(active, state),
            self._warning(active),
        )

    def is_unreadable(self) -> bool:
        watched = self._output.kind == 'joint_trajectory'
        unreadable = watched and self._states is None
        return unreadable and self._node.count_publishers(self._state_topic) > 0

    def close(self) -> None:
        self._parameters.close()

    def _hear(self, now_s: float) -> None:
        taken = None if self._states is None else self._states.take()
        if taken is None:
            return
        state = taken.message
        self._silences.hear(now_s)
        self._heard_s, self._heard_ros_ns = now_s, self._now_ns()
        here_ns = self._heard_ros_ns if self._use_sim_time else taken.received_ns
        self._ages_ns.append(here_ns - stamp_to_ns(state.header.stamp))
        names, positions = list(state.joint_names), state.reference.positions
        held_at = dict(zip(names, positions, strict=False))
        found: np.ndarray = np.array([held_at.get(name, np.nan) for name in self._joints])
        if self._units is not None:
            found = (found - self._units.offset) / self._units.scale
        self.reference = found
        if np.count_nonzero(np.abs(found - self._stood_at) > _MOTION):
            self._moved_s, self._stood_at = now_s, found
        elif np.isnan(self._stood_at).any():
            self._stood_at = found
        self._note_lag(names, state.error.positions)
        self._note_scaling(state)

    def _hear_goals(self, now_s: float) -> None:
        taken = None if self._goals is None else self._goals.take()
        if taken is None:
            return
        live = (
            bytes(one.goal_info.goal_id.uuid)
            for one in taken.message.status_list
            if one.status in _LIVE_GOALS
        )
        self._live = {goal: self._live.get(goal, now_s) for goal in live}

    def why_led(self, sent_s: float, now_s: float) -> str:
        """Describe another node's command that it follows and no later one replaced; else empty."""
        if self._off_s is not None:
            return ''
        if any(since_s > sent_s for since_s in list(self._live.values())):
            clients = _action_clients(self._node, self._action)
            whose = f' of {" or ".join(clients)}' if clients else ''
            return (
                f"controller '{self.name}' carries out a goal{whose} ({self._action}): wait for "
                f'its end, or cancel it (ros2 service call {self._action}/_action/cancel_goal '
                'action_msgs/srv/CancelGoal), then ~/start'
            )
        moves = now_s - self._moved_s < _MOTION_COUNTS_S
        if moves and self._moved_s > sent_s + _ON_ITS_WAY_S:
            return (
                f"controller '{self.name}' moves the robot, and nothing is sent from here: another "
                'node commands it; let it end first, then ~/start'
            )
        return ''

    def _note_lag(self, names: Sequence[str], errors: Sequence[float]) -> None:
        for name, error in zip(names, errors, strict=False):
            self._lag[name] = max(self._lag.get(name, 0.0), abs(error))

    def _note_scaling(self, state: Any) -> None:
        factor = getattr(state, 'speed_scaling_factor', None)
        # A controller that knows no scaling leaves the field at zero.
        self._scales |= 'speed_scaling.initial_scaling_factor' in self._parameters.values
        self._scales |= bool(factor)
        if factor is not None and self._scales and np.isfinite(factor):
            self.scaling = min(max(float(factor), 0.0), 1.0)

    def _is_active(self, now_s: float) -> tuple[bool | None, str]:
        """Return whether it is active, and its state in a word; None where nobody says so."""
        listed = self._listed.state_of(self.name)
        if listed is not None:
            if listed != 'active':
                self._listed_s = None
                return False, listed
            return not self._begins(now_s), listed
        if self._states is None:
            return None, ''
        if self._heard_s is None:
            if self._published_s is None:
                if self._node.count_publishers(self._state_topic):
                    self._published_s = now_s
                return None, ''
            silent_s = now_s - self._published_s
            return (False if silent_s > _SILENT_S else None), _SILENT
        silent_s = now_s - self._heard_s
        if self._use_sim_time:
            silent_s = min(silent_s, (self._now_ns() - self._heard_ros_ns) * 1e-9)
        return silent_s <= _SILENT_S, _SILENT

    def _begins(self, now_s: float) -> bool:
        """Return whether it has just been switched on, and its first state is to come."""
        if self._off_s is None or self._heard_s is None or self._heard_s > self._off_s:
            return False
        if self._listed_s is None:
            self._listed_s = now_s
        return now_s - self._listed_s < _BEGINS_WITHIN_S

    def _as_trajectory_controller(self) -> TrajectoryController | None:
        known = 'interpolation_method' in self._parameters.values
        if self._output.kind != 'joint_trajectory' or not (known or self._heard_s is not None):
            return None
        rate_hz = self._output.update_rate_hz or self._parameters.values.get('update_rate')
        least_ns, most_ns = _SAME_SIMULATED_CLOCK_NS if self._use_sim_time else _SAME_CLOCK_NS
        same_clock = self._output.same_clock
        if same_clock is None:
            same_clock = bool(self._ages_ns) and least_ns <= min(self._ages_ns) <= most_ns
        splines = self._parameters.values.get('interpolation_method') == 'splines'
        return TrajectoryController(1.0 / (rate_hz or _DEFAULT_RATE_HZ), same_clock, splines)

    def _refusal(self, active: bool | None, state: str) -> str:
        if active is False:
            if state == 'active':
                return f"controller '{self.name}' has just been activated: call ~/start again"
            how = f'{state} in {self._listed.manager}'
            if state == _SILENT:
                how = f'not active ({self._state_topic} is silent)'
            return (
                f"controller '{self.name}' is {how}: activate it (ros2 control "
                f'switch_controllers --activate {self.name.rpartition("/")[2]}), then ~/start'
            )
        if chained := self._listed.chain_refusal_of(self.name):
            return chained
        name, output, values = self.name, self._output, self._parameters.values
        kind = self._listed.type_of(name)
        return interface_conflict(name, output, values, kind) or joint_conflict(
            name, output, self._joints, values
        )

    def _warning(self, active: bool | None) -> str:
        if active is False or self._output.kind != 'joint_trajectory':
            return ''
        values, found = self._parameters.values, []
        if values.get('interpolation_method') == 'none':
            found.append(
                f"controller '{self.name}' has interpolation_method none: the arm moves in steps; "
                'set it to splines'
            )
        tight = [
            f"'{joint}' {lag:.2g} of {allowed:g}"
            for joint, lag in self._lag.items()
            if (allowed := values.get(f'constraints.{joint}.trajectory') or 0.0) > 0.0
            and lag >= _CONSTRAINT_SHARE * allowed
        ]
        if tight:
            found.append(
                f"controller '{self.name}' holds where a joint is further from its trajectory than "
                f'constraints.JOINT.trajectory, and these came near: {", ".join(tight)}; raise '
                'it above the lag of the arm, or set it to 0'
            )
        return '; '.join(found)


def _action_clients(node: Node, action: str) -> list[str]:
    found = []
    for name, namespace in node.get_node_names_and_namespaces():
        try:
            clients = get_action_client_names_and_types_by_node(node, name, namespace)
        except NodeNameNonExistentError:  # it left the graph in between
            continue
        if any(client == action for client, _ in clients):
            found.append(f"'{namespace.rstrip('/')}/{name}'")
    return found


class _ControllerList:
    def __init__(self, node: Node, manager: str) -> None:
        self.manager = manager
        self._node = node
        self._type: Any = _message_type('controller_manager_msgs', 'srv', 'ListControllers')
        self._client: Client | None = None
        if self._type is not None:
            self._client = node.create_client(self._type, f'{manager}/list_controllers')
        self._call: ServiceCall | None = None
        self._next_s = 0.0
        # State and type of each controller.
        self._states: dict[str, tuple[str, str]] = {}
        self._chains = ControllerChains()
        self._answered_s = 0.0

    def look(self, now_s: float) -> None:
        if self._client is None or not self._client.service_is_ready():
            self._states, self._call = {}, None
            return
        if self._call is None:
            if now_s >= self._next_s:
                self._call = ServiceCall(self._client, self._type.Request())
            return
        answer = self._call.answer()
        if answer is None:
            # What is on its way may be long overtaken.
            if now_s - self._answered_s > _LIST_IS_OLD_S:
                self._states = {}
            return
        self._call, self._answered_s = None, now_s
        self._next_s = now_s + _LISTS_EVERY_S
        self._states = {one.name: (one.state, one.type) for one in answer.controller}
        self._chains.take(answer.controller)

    def ask_soon(self) -> None:
        self._next_s = 0.0

    @property
    def asked(self) -> bool:
        return self._call is not None and not self._states

    def state_of(self, controller: str) -> str | None:
        """None where the list does not have it."""
        return self._states.get(controller.rpartition('/')[2], (None, ''))[0]

    def type_of(self, controller: str) -> str:
        """'' where the list does not have it."""
        return self._states.get(controller.rpartition('/')[2], (None, ''))[1]

    def chain_refusal_of(self, controller: str, *, then_start: bool = True) -> str:
        if self.state_of(controller) is None:
            return ''
        return self._chains.refusal_of(controller, self.manager, then_start=then_start)

    def is_unreadable(self) -> bool:
        service = f'{self.manager}/list_controllers'
        offered = (name for name, _ in self._node.get_service_names_and_types())
        return self._type is None and service in offered

    def close(self) -> None:
        if self._client is not None:
            self._node.destroy_client(self._client)


class _ScalingTopic:
    """The robot's own speed scaling, as its driver publishes it."""

    def __init__(self, topics: PolledTopics, node: Node, given: SpeedScalingTopic) -> None:
        package, _, name = given.type.partition('/')
        message_type = _message_type(package, 'msg', name)
        if message_type is None:
            raise ValueError(
                f"the robot file's speed_scaling.type is {given.type}, but {package} is not "
                f'installed: sudo apt install ros-$ROS_DISTRO-{package.replace("_", "-")}'
            )
        self._given = given
        self._topic = topics.subscribe(message_type, node.resolve_topic_name(given.topic))
        self.factor = 1.0

    def look(self) -> None:
        taken = self._topic.take()
        if taken is None:
            return
        factor = float(getattr(taken.message, _SCALING_FIELDS[self._given.type])) / self._given.full
        self.factor = min(factor, 1.0) if factor > 0.0 else 0.0


class _ListedController:
    """An output's controller of which controller_manager's list alone tells."""

    def __init__(self, name: str, output: RobotOutput, listed: _ControllerList) -> None:
        self._name, self._output, self._list = name, output, listed

    def look(self) -> Verdict:
        state, of_action = self._list.state_of(self._name), self._output.is_action
        return Verdict(
            self._name,
            self._output.topic,
            active=None if state is None else state == 'active',
            asked=state is None and self._list.asked,
            refusal=self._list.chain_refusal_of(self._name, then_start=not of_action),
            of_action=of_action,
        )
