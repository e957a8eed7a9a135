"""The executor's topics on the robot's side: commands out and others' heard, joint states in."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from geometry_msgs.msg import PoseStamped
from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import QoSProfile, qos_profile_sensor_data
from rclpy.subscription import Subscription
from sensor_msgs.msg import JointState

from vla_runtime.messages.diagnostics import StatusItem
from vla_runtime.nodes.executor.command_watch import (
    CommandWatch,
    OnSender,
    OwnPublisher,
    WatchedTopic,
)
from vla_runtime.nodes.executor.controller_conflicts import interface_conflict
from vla_runtime.nodes.executor.controller_parameters import ask_parameters
from vla_runtime.nodes.executor.controller_watch import ControllerWatch
from vla_runtime.nodes.executor.gripper_outputs import GripperOutput
from vla_runtime.nodes.executor.outputs import Output, OutputWriter
from vla_runtime.nodes.executor.trajectory_message import WayLimits
from vla_runtime.nodes.graph_faults import (
    describe_publishers,
    nothing_of_robot,
    publisher_names,
    several_publishers,
    type_name,
    why_silent,
    why_without_subscribers,
)
from vla_runtime.nodes.node_runner import OnError, guarded
from vla_runtime.nodes.output_types import message_type, require_types
from vla_runtime.nodes.qos import NEWEST, MessageStamps, with_info
from vla_runtime.robot.file import RobotError
from vla_runtime.robot.match import MatchedOutput, MeasuredTool, RobotMatch
from vla_runtime.robot.schema import JointStateTopic, Robot, repeats_hold

# Publishers of one topic, told apart by their messages' numbers. rclpy does not give
# `publisher_gid`, but DDS counts each publisher's messages and delivers them in order: the number
# right behind a stream's last one is its next. Equal numbers are told apart by their joints.

# More publishers than a topic has; the one that was silent for longest is forgotten.
_MOST = 8


@dataclass
class _Stream:
    name: int
    last: int
    joints: tuple[str, ...]
    all_joints: set[tuple[str, ...]]


class PublisherStreams:
    """Sorts the messages of one topic by publisher."""

    def __init__(self) -> None:
        # The one that was heard of last is at the end.
        self._streams: list[_Stream] = []
        self._made = 0

    def name_of(self, number: int, joints: tuple[str, ...]) -> int:
        """Number a message's publisher, known by `publication_sequence_number` and joints."""
        found = self._next_of(number, joints)
        if found is None:
            self._made += 1
            found = _Stream(self._made, number, joints, set())
            del self._streams[: len(self._streams) - _MOST + 1]
        else:
            self._streams.remove(found)
        found.last, found.joints = number, joints
        found.all_joints.add(joints)
        self._streams.append(found)
        return found.name

    def _next_of(self, number: int, joints: tuple[str, ...]) -> _Stream | None:
        """Return the stream that a message belongs to, None for a new one: the likeliest first."""
        same = [stream for stream in self._streams if stream.joints == joints]
        known = [stream for stream in self._streams if joints in stream.all_joints]
        return (
            _right_behind(same, number)
            # Messages in between were lost.
            or _nearest_behind(same, number)
            # One node may publish these joints and those by turns.
            or _right_behind(known, number)
            or _right_behind(self._streams, number)
            or _nearest_behind(known, number)
        )


def _right_behind(streams: Iterable[_Stream], number: int) -> _Stream | None:
    return next((stream for stream in streams if stream.last + 1 == number), None)


def _nearest_behind(streams: Iterable[_Stream], number: int) -> _Stream | None:
    behind = (stream for stream in streams if stream.last < number)
    return max(behind, key=lambda stream: stream.last, default=None)


# Names, positions, stamp (ns, ROS clock) and source (`topic#publisher`) of one message.
TakeState = Callable[[Sequence[str], Sequence[float], int, str], None]
# rmw's number of messages that the middleware does not count.
_UNCOUNTED = 2**64 - 1

# The slowest drivers send ten times a second.
_QUIET_S = 0.3
# Clocks of two computers differ by as much.
_AHEAD_S = 0.05
_ACKNOWLEDGE = Duration(seconds=0.5)
# A controller that is there answers at once, unless its computer is far too busy.
_ANSWERS_WITHIN_S = 1.0


class RobotLink:
    """Publishers from configure to cleanup, subscriptions while the node is active.

    Args:
        match: map of the command's columns onto the robot's outputs.
        on_error: called with where an exception was raised, and the exception.

    Raises:
        RobotError: an output needs messages that are not installed.
    """

    def __init__(
        self, node: LifecycleNode, robot: Robot, match: RobotMatch, on_error: OnError
    ) -> None:
        self._node = node
        self._robot = robot
        for matched in match.outputs:
            require_types(robot, matched.output)
        self._all_outputs = match.outputs
        self._outputs = [matched for matched in match.outputs if not matched.output.is_action]
        self._match = match
        self._limits = match.limits
        # Why the newest message of a measured pose was not taken, by its topic.
        self._pose_faults: dict[str, str] = {}
        self._subscriptions: list[Subscription] = []
        self._takers: list[_StateTaker] = []
        self._publishers = [
            node.create_lifecycle_publisher(
                message_type(matched.output.kind), matched.output.topic, NEWEST
            )
            for matched in self._outputs
        ]
        self._grippers = [
            GripperOutput(node, robot.joint(matched.output.joints[0]), matched, match, on_error)
            for matched in match.outputs
            if matched.output.is_action
        ]
        self._own = [OwnPublisher(publisher) for publisher in self._publishers]
        self._watch = CommandWatch(
            node,
            [
                WatchedTopic(
                    topic=matched.output.topic,
                    full_name=publisher.topic_name,
                    message_type=message_type(matched.output.kind),
                    publisher=own,
                    shared_with=frozenset(
                        _full_name(node, name) for name in matched.output.shared_with
                    ),
                )
                for matched, publisher, own in zip(
                    self._outputs, self._publishers, self._own, strict=True
                )
            ],
        )

    def require_interfaces(self) -> None:
        """Raise RobotError where a controller takes the numbers for something else.

        Looked at at starts.
        """
        outputs = {
            publisher.topic_name.rpartition('/')[0]: matched.output
            for matched, publisher in zip(self._outputs, self._publishers, strict=True)
            if matched.output.kind == 'float64_multi_array'
        }
        for name, values in ask_parameters(self._node, outputs, _ANSWERS_WITHIN_S).items():
            if conflict := interface_conflict(name, outputs[name], values):
                raise RobotError(self._robot.file, 'outputs', conflict)

    def repeated_holds(self) -> str:
        return ', '.join(one.output.topic for one in self._outputs if repeats_hold(one.output))

    def writers(self, period_s: float) -> list[Output]:
        """Return the outputs that take a command's columns once a control period."""
        for gripper in self._grippers:
            gripper.begin()
        return [
            *(
                OutputWriter(matched, publisher, period_s, self._way_limits(matched))
                for matched, publisher in zip(self._outputs, self._own, strict=True)
            ),
            *self._grippers,
        ]

    def _way_limits(self, matched: MatchedOutput) -> WayLimits | None:
        if not matched.message_names:
            return None
        columns = list(matched.columns)
        lower, upper = self._limits.hard_lower[columns], self._limits.hard_upper[columns]
        acceleration = self._limits.acceleration[columns]
        if matched.units is not None:
            lower, upper = matched.units.to_robot(lower), matched.units.to_robot(upper)
            acceleration = acceleration * np.abs(matched.units.scale)
        return WayLimits(np.minimum(lower, upper), np.maximum(lower, upper), acceleration)

    def listen(self, take: TakeState, on_sender: OnSender, on_error: OnError) -> None:
        """Hear joint states, by the robot's own names, and others' commands until `ignore`."""
        self._watch.listen(on_sender, on_error)
        for source in self._robot.joint_states:
            names = source.joints or tuple(joint.name for joint in self._robot.joints)
            mine = {
                self._robot.joint(name).in_messages: self._match.observed_as(name) for name in names
            }
            stamps = MessageStamps(self._node.get_clock(), source.stamp)
            topic = self._node.resolve_topic_name(source.topic)
            taker = _StateTaker(take, mine, topic, stamps, source, self._grippers)
            self._takers.append(taker)
            callback = with_info(guarded(on_error, source.topic, taker))
            self._subscriptions.append(
                self._node.create_subscription(JointState, source.topic, callback, _qos(source))
            )

        for tool in self._match.tools:
            if tool.topic is not None:
                callback = guarded(on_error, tool.topic, self._pose_taker(take, tool))
                self._subscriptions.append(
                    self._node.create_subscription(
                        PoseStamped, tool.topic, callback, qos_profile_sensor_data
                    )
                )

    def _pose_taker(self, take: TakeState, tool: MeasuredTool) -> Callable[[PoseStamped], None]:
        topic = self._node.resolve_topic_name(str(tool.topic))
        stamps = MessageStamps(self._node.get_clock(), 'header')

        def take_pose(message: PoseStamped) -> None:
            frame = message.header.frame_id.removeprefix('/')
            if frame != tool.frame_id.removeprefix('/'):
                self._pose_faults[topic] = (
                    f"{topic}: the pose is measured in '{frame}', the workspace box is in "
                    f"'{tool.frame_id}' (frame_id of the robot file)"
                )
                return
            self._pose_faults.pop(topic, None)
            place = message.pose.position
            place_m = (place.x, place.y, place.z)
            take(tool.columns, [place_m[axis] for axis in tool.axes], stamps.of(message), topic)

        return take_pose

    def watch_controllers(
        self, now_ns: Callable[[], int], *, use_sim_time: bool
    ) -> ControllerWatch:
        outputs = [
            (matched, self._node.resolve_topic_name(matched.output.topic))
            for matched in self._all_outputs
        ]
        return ControllerWatch(
            self._node,
            outputs,
            self._robot.speed_scaling,
            use_sim_time=use_sim_time,
            now_ns=now_ns,
        )

    def apply_controller_state(self, watch: ControllerWatch) -> None:
        """Tell the grippers what their controllers would do with a goal."""
        refusals = {one.topic: one.refusal for one in watch.verdicts}
        for gripper in self._grippers:
            gripper.refusal = refusals.get(gripper.topic, '')

    def state_publishers(self) -> str:
        topics = [
            self._node.resolve_topic_name(source.topic) for source in self._robot.joint_states
        ]
        found = [several_publishers(self._node, topic) for topic in dict.fromkeys(topics)]
        return '; '.join(text for text in found if text)

    def ignore(self) -> None:
        self._watch.ignore()
        self._takers = []
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            self._node.destroy_subscription(subscription)

    def senders(self) -> str:
        return self._watch.senders()

    def without_subscribers(self) -> str:
        """Name the outputs that no node takes commands from, while listening; empty without any."""
        reasons = (
            why_without_subscribers(
                self._node, publisher.topic_name, type_name(publisher.msg_type), NEWEST, 1
            )
            for publisher in self._publishers
        )
        unserved = (f'no node takes the goals of {action}' for action in self._unserved())
        return '; '.join(filter(None, (*reasons, *unserved)))

    def nothing_there(self) -> str:
        resolve = self._node.resolve_topic_name
        heard = [resolve(source.topic) for source in self._robot.joint_states]
        commanded = [publisher.topic_name for publisher in self._publishers]
        commanded += [resolve(gripper.topic) for gripper in self._grippers]
        return nothing_of_robot(self._node, heard, commanded)

    def state_ages_ms(self, now_ns: int) -> dict[str, float]:
        """Return the age of the newest message of each joint-state topic that was heard."""
        return {
            taker.topic: (now_ns - taker.stamp_ns) * 1e-6
            for taker in self._takers
            if math.isfinite(taker.heard_s)
        }

    def state_faults(self, now_ns: int, oldest_s: float) -> str:
        """Describe the joint-state topics whose messages do not come or are of another time.

        A message older than `oldest_s` by the ROS clock `now_ns` is of no use.
        """
        topics: dict[tuple[str, str], list[str]] = {}
        for taker in self._takers:
            if fault := self._state_fault(taker, now_ns, oldest_s):
                topics.setdefault(fault, []).append(taker.topic)
        faults = [
            f'{begins} on {" and ".join(named)} {ends}' for (begins, ends), named in topics.items()
        ]
        return '; '.join([*faults, *self._tool_faults()])

    def _tool_faults(self) -> list[str]:
        kind, faults = type_name(PoseStamped), []
        for tool in self._match.tools:
            if tool.topic is None:
                continue
            topic = self._node.resolve_topic_name(tool.topic)
            why = why_silent(self._node, topic, kind, qos_profile_sensor_data, [kind])
            faults += [f'{topic}: {why}'] if why else []
            faults += filter(None, [self._pose_faults.get(topic, '')])
        return faults

    def _state_fault(
        self, taker: _StateTaker, now_ns: int, oldest_s: float
    ) -> tuple[str, str] | None:
        """Return the text before and behind the topic's name; None without a fault."""
        kind, source = type_name(JointState), taker.source
        heard_s = time.monotonic() - taker.heard_s
        if heard_s > max(oldest_s, _QUIET_S):
            since = 'yet' if math.isinf(heard_s) else f'for {heard_s:.2g} s'
            if why := why_silent(self._node, taker.topic, kind, _qos(source), [kind]):
                return 'nothing has come', f'{since}: {why}'
            names = describe_publishers(self._node, publisher_names(self._node, taker.topic, 0))
            return 'nothing has come', f'{since}, though {names} publishes there'
        age_s = (now_ns - taker.stamp_ns) * 1e-9
        if taker.stamp_ns == 0 or -_AHEAD_S < age_s <= oldest_s:
            return None
        names = describe_publishers(self._node, publisher_names(self._node, taker.topic, 0))
        when = f'{age_s:.1f} s ago' if age_s > 0 else f'{-age_s:.1f} s ahead'
        return (
            f'{names} publishes',
            f"messages stamped {when}: its clock is not this node's, or was set; set the clocks "
            "right (chrony), or give the topic 'stamp: receive'",
        )

    def _unserved(self) -> list[str]:
        return [
            self._node.resolve_topic_name(gripper.topic)
            for gripper in self._grippers
            if not gripper.is_served()
        ]

    def gripper_status(self) -> list[StatusItem]:
        return [gripper.status() for gripper in self._grippers]

    def wait_until_heard(self) -> None:
        """Send the last goals of grippers, and give the last commands time to arrive."""
        for gripper in self._grippers:
            gripper.flush()
        for publisher in self._publishers:
            publisher.wait_for_all_acked(_ACKNOWLEDGE)

    def close(self) -> None:
        grippers, self._grippers = self._grippers, []
        for gripper in grippers:
            gripper.close()
        publishers, self._publishers = self._publishers, []
        for publisher in publishers:
            self._node.destroy_lifecycle_publisher(publisher)


def command_topics(node: LifecycleNode, match: RobotMatch) -> dict[str, frozenset[str]]:
    """Return full names of the outputs' topics and actions: to the nodes that may share each."""
    return {
        node.resolve_topic_name(matched.output.topic): frozenset(
            _full_name(node, name) for name in matched.output.shared_with
        )
        for matched in match.outputs
    }


def _qos(source: JointStateTopic) -> QoSProfile:
    if source.reliability == 'best_effort':
        return qos_profile_sensor_data
    return QoSProfile(depth=source.depth)


def _full_name(node: LifecycleNode, name: str) -> str:
    """A relative name is in this node's namespace, as a topic's is."""
    return name if name.startswith('/') else f'{node.get_namespace().rstrip("/")}/{name}'


class _StateTaker:
    """One topic's messages under the robot's joint names."""

    def __init__(
        self,
        take: TakeState,
        mine: Mapping[str, str],
        topic: str,
        stamps: MessageStamps,
        source: JointStateTopic,
        grippers: Sequence[GripperOutput],
    ) -> None:
        self._grippers = grippers
        self.topic, self.source = topic, source
        self.heard_s, self.stamp_ns = -math.inf, 0
        self._streams = PublisherStreams()
        self._take = take
        self._mine = mine
        self._stamps = stamps
        self._in_message: list[str] = []
        self._names: tuple[str, ...] = ()

    def __call__(self, message: JointState, info: Mapping[str, Any]) -> None:
        if message.name != self._in_message:
            self._in_message = list(message.name)
            # Joints of other topics may bear the same name there: an empty name is nobody's.
            self._names = tuple(self._mine.get(name, '') for name in message.name)
        number = info.get('publication_sequence_number')
        source = self.topic
        self.heard_s, self.stamp_ns = time.monotonic(), self._stamps.of(message)
        if number is not None and number != _UNCOUNTED:
            # Of two publishers of the same joints one may tell their effort alone.
            told = (*self._in_message, 'position' if message.position else '')
            source = f'{source}#{self._streams.name_of(number, told)}'
        self._take(self._names, message.position, self.stamp_ns, source)
        for gripper in self._grippers:
            gripper.observe_state(self._names, message.position)
