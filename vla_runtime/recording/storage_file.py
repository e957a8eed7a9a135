"""A storage file of a bag, in any format: its messages, and its unreadable parts."""

from __future__ import annotations

import sqlite3
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rosbags.rosbag2.storage_mcap import DECOMPRESSORS
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from vla_runtime.files.package_files import share_folder
from vla_runtime.recording.topics import JOINT_STATE

# Serialised messages (CDR): the stamp at their front, and joint states. No ROS 2 here.

_SECOND_NS = 1_000_000_000
# Two bytes of representation, two of options, then the message.
_HEADER_BYTES = 4


def with_header_stamp(serialised: bytes, stamp_ns: int) -> bytes:
    """Return a message that begins with a `std_msgs/Header` with another stamp."""
    order = '<' if serialised[1] & 1 else '>'
    stamp = struct.pack(f'{order}iI', *divmod(stamp_ns, _SECOND_NS))
    return serialised[:_HEADER_BYTES] + stamp + serialised[_HEADER_BYTES + len(stamp) :]


def header_stamp_ns(serialised: bytes) -> int | None:
    """Stamp of a message that begins with a `std_msgs/Header`; None where it is too short."""
    if len(serialised) < _HEADER_BYTES + 8:
        return None
    order = '<' if serialised[1] & 1 else '>'
    seconds, nanoseconds = struct.unpack_from(f'{order}iI', serialised, _HEADER_BYTES)
    return int(seconds) * _SECOND_NS + int(nanoseconds)


def joint_state(stamp_ns: int, names: Sequence[str], positions: Sequence[float]) -> bytes:
    types = get_typestore(Stores.ROS2_JAZZY)
    stamp = types.types['builtin_interfaces/msg/Time'](*divmod(stamp_ns, _SECOND_NS))
    message = types.types[JOINT_STATE](
        types.types['std_msgs/msg/Header'](stamp, ''),
        list(names),
        np.array(positions, dtype=np.float64),
        np.zeros(0),
        np.zeros(0),
    )
    return bytes(types.serialize_cdr(message, JOINT_STATE))


# Types of messages in bags: ROS 2 Jazzy's, this package's own, and those of drivers that it comes
# without.

# By what they carry, in the words of rosidl.
_OF_DRIVERS = {
    'interbotix_xs_msgs/msg/JointGroupCommand': 'string name\nfloat32[] cmd',
    'interbotix_xs_msgs/msg/JointSingleCommand': 'string name\nfloat32 cmd',
}


@cache
def message_types() -> Any:
    types = get_typestore(Stores.ROS2_JAZZY)
    for name, text in _OF_DRIVERS.items():
        types.register(get_types_from_msg(text, name))
    # Their definitions lie beside the package, whether they are built or not.
    own: dict[str, Any] = {}
    for file in sorted((share_folder() / 'interfaces' / 'vla_interfaces' / 'msg').glob('*.msg')):
        text = file.read_text(encoding='utf-8')
        own |= get_types_from_msg(text, f'vla_interfaces/msg/{file.stem}')
    types.register(own)
    return types


# The first bytes of what zstd wrote; no serialised message begins so.
_ZSTD = b'\x28\xb5\x2f\xfd'


@dataclass(frozen=True)
class RawMessage:
    """A message as it stands in a bag.

    Attributes:
        topic: full name.
        type_name: like `sensor_msgs/msg/Image`.
        time_ns: time at which it was recorded.
        serialised: CDR.
    """

    topic: str
    type_name: str
    time_ns: int
    serialised: bytes


# Whether messages of a topic and type are wanted.
Wanted = Callable[[str, str], bool]


class StorageFile(ABC):
    """One file; `problems` gets a line for each part that is unreadable."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self._path = path
        self._problems = problems

    @abstractmethod
    def messages(self, wanted: Wanted) -> Iterator[RawMessage]:
        """Yield the wanted messages in the order of the file."""

    def _message(self, data: bytes) -> bytes:
        """Return a message as it was serialised: rosbag2 may compress each (`message` mode)."""
        if data[:4] != _ZSTD:
            return data
        try:
            return DECOMPRESSORS['zstd'](data, 0)
        # zstd's error is of one module or another, by the version of Python.
        except Exception as error:
            self._say(f'a message cannot be unpacked: {error}')
            return b''

    def _say(self, text: str) -> None:
        line = f'{self._path}: {text}'
        if line not in self._problems:
            self._problems.append(line)


# Reads the messages of a rosbag2 file of SQLite as far as they can be read.


class SqliteFile(StorageFile):
    """One file; see `StorageFile`."""

    def messages(self, wanted: Wanted) -> Iterator[RawMessage]:
        try:
            # Immutable: a bag on a read-only disk has no place for a journal.
            address = f'{self._path.resolve().as_uri()}?mode=ro&immutable=1'
            with closing(sqlite3.connect(address, uri=True)) as connection:
                connection.text_factory = lambda text: text.decode('utf-8', 'replace')
                yield from self._rows(connection, wanted)
        # A damaged file ends in an error of SQLite, of a type, or of a size.
        except (sqlite3.Error, OverflowError, ValueError, TypeError) as error:
            self._say(f'is damaged: {error}; what follows is lost')

    def _rows(self, connection: sqlite3.Connection, wanted: Wanted) -> Iterator[RawMessage]:
        topics: dict[int, tuple[str, str]] = {}
        # A topic that nothing was recorded of is not in the bag.
        rows = connection.execute(
            'SELECT id, name, type, serialization_format FROM topics '
            'WHERE EXISTS (SELECT 1 FROM messages WHERE topic_id = topics.id)'
        )
        for number, name, type_name, encoding in rows:
            if encoding != 'cdr':
                self._say(f'topic {name} is encoded as {encoding!r}, not as cdr')
            elif wanted(str(name), str(type_name)):
                topics[number] = str(name), str(type_name)
        rows = connection.execute('SELECT topic_id, timestamp, data FROM messages ORDER BY id')
        for number, time_ns, data in rows:
            if number in topics:
                yield RawMessage(*topics[number], int(time_ns), self._message(bytes(data)))
