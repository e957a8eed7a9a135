"""Faults of a robot's topics that only the graph shows: who is there, and who cannot meet whom.

Two executors on one arm alternate commands, and neither node sees a fault. Where nobody takes the
commands, the executor moves a robot that stands still. A publisher and a subscription that differ
in type or quality of service never meet, and ROS 2 says so to neither node.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rclpy.duration import Duration
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.topic_endpoint_info import TopicEndpointInfo

from vla_runtime.nodes.middleware import describe_reach

# Beginning of what `nothing_of_robot` says.
NOTHING_THERE = 'nothing of the robot is in this graph'
# Their subscriptions make no difference to the robot.
_RECORDERS = ('vla_recorder', 'rosbag2_recorder')
# rmw's word for a node whose publisher was discovered before its name.
_UNKNOWN_NAME = '_NODE_NAME_UNKNOWN_'
# Policies of which a publisher must offer at least what a subscription asks for, weakest first.
_RANKS = {
    'reliability': ('BEST_EFFORT', 'RELIABLE'),
    'durability': ('VOLATILE', 'TRANSIENT_LOCAL'),
    'liveliness': ('AUTOMATIC', 'MANUAL_BY_TOPIC'),
}
_PERIODS = ('deadline', 'liveliness_lease_duration')
# A century: rmw's word for ever is shorter than DDS's.
_ENDLESS_NS = 100 * 365 * 86_400 * 1_000_000_000
# Topics named where nothing is published on the one that was meant.
_MOST_NEAR = 4


@dataclass(frozen=True)
class QosConflict:
    """A quality of service that a publisher does not offer."""

    policy: str
    offered: str
    asked: str


def qos_conflicts(offered: QoSProfile, asked: QoSProfile) -> list[QosConflict]:
    """Return what a subscription asks for and a publisher does not offer.

    Rules of DDS's requested-offered contract
    (https://docs.ros.org/en/jazzy/Concepts/Intermediate/About-Quality-of-Service-Settings.html).
    """
    found = []
    for policy, ranks in _RANKS.items():
        has, wants = getattr(offered, policy).name, getattr(asked, policy).name
        if has in ranks and wants in ranks and ranks.index(has) < ranks.index(wants):
            found.append(QosConflict(policy, has.lower(), wants.lower()))
    for policy in _PERIODS:
        has_s, wants_s = (_period_s(getattr(one, policy)) for one in (offered, asked))
        if has_s > wants_s:
            has = f'{has_s:g} s' if math.isfinite(has_s) else 'none'
            found.append(QosConflict(policy, has, f'{wants_s:g} s'))
    return found


def _period_s(duration: Duration) -> float:
    """Return seconds, infinite where the duration is no bound: the default 0, or the longest."""
    nanoseconds = duration.nanoseconds
    return nanoseconds * 1e-9 if 0 < nanoseconds < _ENDLESS_NS else math.inf


def type_name(message_type: type) -> str:
    """Return the name of a message class as the graph has it, such as `sensor_msgs/msg/Image`."""
    return f'{message_type.__module__.partition(".")[0]}/msg/{message_type.__name__}'


def other_publishers(node: Node, own_topics: Sequence[str]) -> str:
    """Name a topic that another node publishes too, and that node; empty when none does.

    `own_topics` has the topic of each publisher of this node. They are counted, not recognised by
    the node's name, because the other node often bears the same.
    """
    for topic in dict.fromkeys(own_topics):
        own = own_topics.count(topic)
        if node.count_publishers(topic) > own:
            names = describe_publishers(node, publisher_names(node, topic, own))
            return f'{topic} is also published by {names}'
    return ''


def several_publishers(node: Node, topic: str) -> str:
    """Name the publishers of a topic when they are more than one; empty otherwise."""
    count = node.count_publishers(topic)
    if count < 2:
        return ''
    return f'{count} publishers on {topic}: {_listed(publisher_names(node, topic, 0))}'


def why_unlike(node: Node, topic: str, message_type: type) -> str:
    """Name a publisher of chunks or plans in their other form; empty where there is none."""
    mine = type_name(message_type)
    for info in node.get_publishers_info_by_topic(topic):
        if info.topic_type not in (mine, ''):
            return (
                f'{_called(info)} publishes {info.topic_type} on {topic}, and this node takes '
                f'{mine}: build vla_interfaces for both nodes, or for neither'
            )
    return ''


def full_names(node: Node) -> list[str]:
    """Return the full names of all nodes; a name that several nodes bear is there so often."""
    return [
        f'{namespace.rstrip("/")}/{name}'
        for name, namespace in node.get_node_names_and_namespaces()
    ]


def publisher_names(node: Node, topic: str, own: int) -> list[str]:
    """Return the full names of the nodes with a publisher on a topic; '' where none is known yet.

    `own` publishers of this node are left out by number: another node may bear its name.
    """
    infos = _without_own(node.get_publishers_info_by_topic(topic), node, own)
    return sorted(_name(info) for info in infos)


def listener_names(node: Node, topic: str) -> list[str]:
    """Return the full names of other nodes that listen on a topic, recorders left out."""
    return sorted(_name(info) for info in _listeners(node, topic, 0))


def describe_publishers(node: Node, names: Iterable[str]) -> str:
    """Describe nodes by what `publisher_names` gives, those of the node's own name too."""
    mine = node.get_fully_qualified_name()
    return _listed(
        f'another node of the same name, {name}' if name == mine else name for name in names
    )


def nothing_of_robot(
    node: Node, heard: Iterable[str], commanded: Iterable[str], own_subscriptions: int = 1
) -> str:
    """Say that no node publishes `heard` or takes commands on `commanded`; empty where one does.

    `own_subscriptions` of the node on each of `commanded` do not count.
    """
    if any(map(node.count_publishers, heard)) or any(
        # An action is known by its status topic.
        _listeners(node, topic, own_subscriptions)
        or node.count_publishers(f'{topic}/_action/status')
        for topic in commanded
    ):
        return ''
    return (
        f'{NOTHING_THERE} ({describe_reach(os.environ)}): is its driver on, '
        'and started with the same two?'
    )


def why_without_subscribers(
    node: Node, topic: str, message_type: str, offered: QoSProfile, own_subscriptions: int
) -> str:
    """Describe why nobody takes what this node publishes on a topic; empty when somebody does.

    Args:
        message_type: this node's, such as `sensor_msgs/msg/JointState`.
        own_subscriptions: this node's own there; like recorders they do not count.
    """
    reasons = []
    for info in _listeners(node, topic, own_subscriptions):
        if info.topic_type != message_type:
            reasons.append(f'{_called(info)} takes {info.topic_type} there, not {message_type}')
        elif wrong := qos_conflicts(offered, info.qos_profile):
            asks = ', '.join(f'{one.policy} {one.asked}' for one in wrong)
            has = ', '.join(f'{one.policy} {one.offered}' for one in wrong)
            reasons.append(f'{_called(info)} asks for {asks}, but this node offers {has}')
        else:
            return ''
    why = f' ({"; ".join(dict.fromkeys(reasons))})' if reasons else ''
    return f'no node takes commands from {topic}{why}'


def why_silent(
    node: Node, topic: str, message_type: str, asked: QoSProfile, near_types: Sequence[str]
) -> str:
    """Describe why nothing can come on a topic; empty when a publisher there could be heard.

    Args:
        message_type: this node's, such as `sensor_msgs/msg/Image`.
        near_types: types of topics that may have been meant.
    """
    reasons, names_another = [], True
    for info in node.get_publishers_info_by_topic(topic):
        if info.topic_type != message_type:
            reasons.append(
                f'{_called(info)} publishes {info.topic_type} there, and {message_type} is expected'
            )
        elif wrong := qos_conflicts(info.qos_profile, asked):
            has = ', '.join(f'{one.policy} {one.offered}' for one in wrong)
            asks = ', '.join(f'{one.policy} {one.asked}' for one in wrong)
            reasons.append(f'{_called(info)} offers {has}, but the robot file asks for {asks}')
            names_another = False
        else:
            return ''
    reason = '; '.join(dict.fromkeys(reasons)) or 'no node publishes it'
    if names_another and (near := _near_topics(node, topic, near_types)):
        reason += f'; published near it: {", ".join(near)}'
    return reason


def _near_topics(node: Node, topic: str, types: Sequence[str]) -> list[str]:
    """Return other topics of these types that have a publisher, nearest name first."""
    found = {
        name: kinds[0]
        for name, kinds in node.get_topic_names_and_types()
        if name != topic and kinds[0] in types and node.count_publishers(name)
    }
    likeness: Callable[[str], float] = lambda name: difflib.SequenceMatcher(  # noqa: E731
        None, name, topic
    ).ratio()
    nearest = sorted(found, key=lambda name: (-likeness(name), name))[:_MOST_NEAR]
    return [f'{name} ({found[name]})' for name in nearest]


def _listeners(node: Node, topic: str, own: int) -> list[TopicEndpointInfo]:
    infos = _without_own(node.get_subscriptions_info_by_topic(topic), node, own)
    return [info for info in infos if not info.node_name.startswith(_RECORDERS)]


def _without_own(
    infos: Iterable[TopicEndpointInfo], node: Node, own: int
) -> list[TopicEndpointInfo]:
    mine, kept = node.get_fully_qualified_name(), []
    for info in infos:
        if own and _name(info) == mine:
            own -= 1
        else:
            kept.append(info)
    return kept


def _name(info: TopicEndpointInfo) -> str:
    if info.node_name == _UNKNOWN_NAME:
        return ''
    return f'{info.node_namespace.rstrip("/")}/{info.node_name}'


def _called(info: TopicEndpointInfo) -> str:
    return _listed([_name(info)])


def _listed(names: Iterable[str]) -> str:
    return ', '.join(name or 'a node whose name is not known yet' for name in names)
