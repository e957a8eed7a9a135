"""Faults of a robot's topics that only the graph shows: two publishers, or no subscriber.

Two executors on one arm alternate commands on one controller: each controller obeys, neither
node sees a fault, and the robot shakes between two plans. Where nobody takes the commands, the
executor moves a robot that stands still.
"""

from __future__ import annotations

from collections.abc import Sequence

from rclpy.node import Node

# Whether these listen makes no difference to the robot.
_RECORDERS = ('vla_recorder', 'rosbag2_recorder')
# rmw's word for a node whose publisher was discovered before its name.
_UNKNOWN_NAME = '_NODE_NAME_UNKNOWN_'


def other_publishers(node: Node, own_topics: Sequence[str]) -> str:
    """Name a topic that another node publishes too, and that node; empty when none does.

    Args:
        node: asks the graph.
        own_topics: full name of the topic of each of the node's own publishers. They are
            counted, not recognised by the node's name, because the other node often bears the same.
    """
    for topic in dict.fromkeys(own_topics):
        own = own_topics.count(topic)
        if node.count_publishers(topic) > own:
            return f'{topic} is also published by {_names(node, topic, own)}'
    return ''


def several_publishers(node: Node, topic: str) -> str:
    """Name the publishers of a topic when they are more than one; empty otherwise."""
    count = node.count_publishers(topic)
    return f'{count} publishers on {topic}: {_names(node, topic, 0)}' if count > 1 else ''


def without_listeners(node: Node, topics: Sequence[str]) -> list[str]:
    """Return the topics that no node subscribes to, recorders left out."""
    return [
        topic
        for topic in dict.fromkeys(topics)
        if all(
            info.node_name.startswith(_RECORDERS)
            for info in node.get_subscriptions_info_by_topic(topic)
        )
    ]


def _names(node: Node, topic: str, own: int) -> str:
    mine = node.get_fully_qualified_name()
    names = [
        'a node whose name is not known yet'
        if info.node_name == _UNKNOWN_NAME
        else f'{info.node_namespace.rstrip("/")}/{info.node_name}'
        for info in node.get_publishers_info_by_topic(topic)
    ]
    for _ in range(own):
        if mine in names:
            names.remove(mine)
    return ', '.join(
        'another node of the same name, ' + name if own and name == mine else name
        for name in sorted(names)
    )
