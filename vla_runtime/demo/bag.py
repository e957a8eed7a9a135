"""A rosbag2 bag (MCAP) written from serialised messages, with the pure-Python `rosbags`."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Literal

from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

_VERSION: Literal[9] = 9


class BagError(ValueError):
    """The bag cannot be written where it should be."""


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
        self.messages = 0

    def add_topic(self, topic: str, type_name: str) -> None:
        """Announce a topic; `type_name` is like `sensor_msgs/msg/JointState`."""
        self._connections[topic] = self._writer.add_connection(
            topic, type_name, typestore=self._types
        )

    def write(self, topic: str, stamp_ns: int, serialised: bytes) -> None:
        """Write one message as it came from the wire; a closed bag takes no more."""
        with self._lock:
            if self._open:
                self._writer.write(self._connections[topic], stamp_ns, serialised)  # type: ignore[arg-type]
                self.messages += 1

    def close(self) -> None:
        """Finish the file."""
        with self._lock:
            if self._open:
                self._open = False
                self._writer.close()
