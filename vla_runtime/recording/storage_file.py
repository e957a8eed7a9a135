"""A storage file of a bag, in any format: its messages, and its unreadable parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rosbags.rosbag2.storage_mcap import DECOMPRESSORS

# The first bytes of what zstd wrote; no serialised message begins so.
_ZSTD = b'\x28\xb5\x2f\xfd'


@dataclass(frozen=True)
class RawMessage:
    """A message as it stands in a bag.

    Attributes:
        topic: full name.
        type_name: type of the message, like `sensor_msgs/msg/Image`.
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
    """One file.

    Args:
        path: path of the file.
        problems: list that unreadable parts are added to, one line each.
    """

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
