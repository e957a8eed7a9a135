"""A rosbag2 bag (MCAP) written from serialised messages, with the pure-Python `rosbags`.

Messages stay as they came; chunks of about 1 MiB are compressed with zstd. A disk that is full ends
the recording, never its caller: what was written whole is a closed bag.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from rosbags.interfaces import (
    Connection,
    Qos,
    QosDurability,
    QosHistory,
    QosLiveliness,
    QosReliability,
    QosTime,
)
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer

from vla_runtime.recording.storage_file import message_types

# Reserve disk space to close files on a full disk.


class Reserve:
    """Room beside a folder's files, held by a file without a name; a context that releases it.

    The system takes it back when this process ends. OSError where there is no such room.
    """

    def __init__(self, folder: Path, size: int, purpose: str) -> None:
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open until released
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder)) from None
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as error:
            self.release()
            why = f'{error.strerror}; {size / 2**20:.0f} MiB must be free for {purpose}'
            raise OSError(error.errno, why, str(folder)) from None

    def release(self) -> None:
        """Give the room back; again does nothing."""
        self._file.close()

    def __enter__(self) -> Reserve:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_VERSION: Literal[9] = 9
# ZSTD_c_checksumFlag of zstd's interface.
_CHECKSUM_FLAG = 201
# The longest duration that ROS 2 knows: no deadline, no lifespan, no lease.
_NEVER = QosTime(9223372036, 854775807)
# More than the last chunk (1 MiB and a message) and the index of an hour.
_CLOSING_BYTES = 4 << 20


class BagError(ValueError):
    """The bag cannot be written where it should be."""


@dataclass(frozen=True)
class Offer:
    """The QoS of a topic's publisher, with which `ros2 bag play` publishes again.

    Attributes:
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
        folder: must not exist yet.
        on_failure: called once with why recording has ended, in the thread that writes or closes.

    Raises:
        BagError: it exists.
        OSError: the disk has no room for it.
    """

    def __init__(self, folder: Path, on_failure: Callable[[str], None]) -> None:
        if folder.exists():
            raise BagError(f'{folder} exists already: name another folder, or remove it')
        self._on_failure = on_failure
        self._room = Reserve(folder.parent, _CLOSING_BYTES, 'the end of the bag')
        self._types = message_types()
        self._writer = Writer(folder, version=_VERSION, storage_plugin=StoragePlugin.MCAP)
        self._writer.set_compression(CompressionMode.STORAGE, CompressionFormat.ZSTD)
        self._writer.open()
        storage: Any = self._writer.storage
        # rosbags writes no checksum of a chunk; with zstd's own a damaged one is found out.
        storage.compressor = partial(storage.compressor, options={_CHECKSUM_FLAG: 1})
        self._storage = storage
        self._lock = Lock()
        self._connections: dict[str, Connection] = {}
        self._open = True

    def add_topic(self, topic: str, type_name: str, offer: Offer) -> None:
        """Announce a topic; `type_name` is like `sensor_msgs/msg/JointState`."""
        self._connections[topic] = self._writer.add_connection(
            topic, type_name, typestore=self._types, offered_qos_profiles=[offer.profile()]
        )

    @property
    def size(self) -> int:
        """Bytes in the file, and those of the chunk in memory before it is compressed."""
        with self._lock:
            if not self._open:
                return 0
            return int(self._storage.bio.tell() + self._storage.chunk.bio.tell())

    @property
    def written(self) -> int:
        with self._lock:
            return int(self._storage.bio.tell()) if self._open else 0

    def write(self, topic: str, stamp_ns: int, serialised: bytes) -> None:
        """Write one message as it came from the wire; a closed bag takes no more."""
        with self._lock:
            if not self._open:
                return
            connection = self._connections[topic]
            whole = self._storage.bio.tell()
            try:
                self._writer.write(connection, stamp_ns, serialised)
            except OSError as error:
                # Taken, and to be written with the last chunk.
                self._writer.counts[connection.id] += 1
                self._end_early(whole, error)

    def close(self) -> None:
        with self._lock:
            if self._open and (problem := self._close()):
                self._on_failure(f'{self._storage.path}: cannot be closed: {problem}')

    def _end_early(self, whole: int, error: OSError) -> None:
        """Close with what is whole: the bytes up to `whole`, and the chunk in memory."""
        self._room.release()
        path, problem = self._storage.path, ''
        try:
            self._storage.bio.seek(whole)
            self._storage.bio.truncate()
        except OSError as again:
            problem = again.strerror or str(again)
        problem = self._close() or problem
        state = f'it cannot be closed: {problem}' if problem else 'it is closed, with what fitted'
        self._on_failure(f'{path}: recording has ended: {error.strerror}; {state}')

    def _close(self) -> str:
        self._open = False
        self._room.release()
        try:
            self._writer.close()
        except OSError as error:
            # What is still buffered fails again.
            with suppress(OSError):
                self._writer.abort()
            return error.strerror or str(error)
        return ''
