"""A rosbag2 bag (MCAP) written from serialised messages, with the pure-Python `rosbags`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal

from rosbags.interfaces import (
    Qos,
    QosDurability,
    QosHistory,
    QosLiveliness,
    QosReliability,
    QosTime,
)
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

_VERSION: Literal[9] = 9
# The longest duration that ROS 2 knows: no deadline, no lifespan, no lease.
_NEVER = QosTime(9223372036, 854775807)


class BagError(ValueError):
    """The bag cannot be written where it should be."""


@dataclass(frozen=True)
class Offer:
    """The QoS of a topic's publisher, with which `ros2 bag play` publishes again.

    Attributes:
        depth: messages kept for subscribers.
        reliable: sent again when lost.
        latched: transient local: a subscriber that comes later gets the newest, too.
    """

    depth: int
    reliable: bool = True
    latched: bool = False

    def profile(self) -> Qos:
        """The same in the bag's words."""
        return Qos(
            history=QosHistory.KEEP_LAST,
            depth=self.depth,
            reliability=QosReliability.RELIABLE if self.reliable else QosReliability.BEST_EFFORT,
            durability=QosDurability.TRANSIENT_LOCAL if self.latched else QosDurability.VOLATILE,
            deadline=_NEVER,
            lifespan=_NEVER,
            liveliness=QosLiveliness.AUTOMATIC,
            liveliness_lease_duration=_NEVER,
            avoid_ros_namespace_conventions=False,
        )


class Bag:
    """An open bag; any thread may write.

    Args:
        folder: of the bag; must not exist yet.

    Raises:
        BagError: it exists.
    """

    def __init__(self, folder: Path) -> None:
        if folder.exists():
            raise BagError(f'{folder} exists already: name another folder, or remove it')
        self._types = get_typestore(Stores.ROS2_JAZZY)
        self._writer = Writer(folder, version=_VERSION, storage_plugin=StoragePlugin.MCAP)
        self._writer.open()
        self._lock = Lock()
        self._connections: dict[str, object] = {}
        self._open = True

    def add_topic(self, topic: str, type_name: str, offer: Offer) -> None:
        """Announce a topic; `type_name` is like `sensor_msgs/msg/JointState`."""
        self._connections[topic] = self._writer.add_connection(
            topic, type_name, typestore=self._types, offered_qos_profiles=[offer.profile()]
        )

    def write(self, topic: str, stamp_ns: int, serialised: bytes) -> None:
        """Write one message as it came from the wire; a closed bag takes no more."""
        with self._lock:
            if self._open:
                self._writer.write(self._connections[topic], stamp_ns, serialised)  # type: ignore[arg-type]

    def close(self) -> None:
        """Finish the file."""
        with self._lock:
            if self._open:
                self._open = False
                self._writer.close()
