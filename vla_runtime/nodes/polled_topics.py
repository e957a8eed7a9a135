"""Subscriptions that are looked at now and then: only the newest message is ever converted.

A controller publishes its state in every cycle, up to a thousand times a second. As callbacks of
the executor node these would cost a good part of a core, for a few looks a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.subscription import Subscription

from vla_runtime.nodes.qos import NEWEST_HEARD


@dataclass(frozen=True)
class Taken:
    """A message, and when it came.

    Attributes:
        received_ns: system clock.
    """

    message: Any
    received_ns: int


class PolledTopics:
    """Subscriptions of a hidden node that nobody spins, in the context of the node given.

    Args:
        node: gives the hidden one its context, namespace and first name.
        purpose: second name of the hidden node.
    """

    def __init__(self, node: Node, purpose: str = 'watch') -> None:
        self._node = Node(
            f'_{node.get_name()}_{purpose}',
            namespace=node.get_namespace(),
            context=node.context,
            use_global_arguments=False,
            enable_rosout=False,
            start_parameter_services=False,
        )

    def subscribe(
        self, message_type: type, topic: str, qos: QoSProfile = NEWEST_HEARD
    ) -> PolledTopic:
        """Subscribe to a topic by its full name."""
        return PolledTopic(self._node.create_subscription(message_type, topic, lambda _: None, qos))

    def close(self) -> None:
        self._node.destroy_node()


class PolledTopic:
    """One such subscription."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    def take(self) -> Taken | None:
        """Return the newest message that came since the last call; None without one."""
        handle = self._subscription.handle
        with handle:
            taken = handle.take_message(self._subscription.msg_type, False)
        if taken is None:
            return None
        message, info = taken
        return Taken(message, int(info['received_timestamp']))

    def take_bytes(self) -> bytes | None:
        """Return the oldest message that waits, not decoded; None without one."""
        handle = self._subscription.handle
        with handle:
            taken = handle.take_message(self._subscription.msg_type, True)
        return None if taken is None else taken[0]
