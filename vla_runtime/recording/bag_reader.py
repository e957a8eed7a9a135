"""Bags on disk: which files belong to one, and their messages as far as they can be read.

Any rosbag2 bag is read, in MCAP or SQLite, with or without `metadata.yaml`, and without ROS 2. What
cannot be read is named in `problems`, and the rest is used.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vla_runtime.files.input_files import UnreadableFileError, read_text, regular_file
from vla_runtime.files.quotes import one_line
from vla_runtime.files.typed_yaml import LARGEST_FILE, loads
from vla_runtime.recording.mcap_file import McapFile
from vla_runtime.recording.recording import is_ring, parts_of
from vla_runtime.recording.storage_file import (
    RawMessage,
    SqliteFile,
    StorageFile,
    Wanted,
    message_types,
)
from vla_runtime.recording.topics import STRING

_KINDS: Mapping[str, type[StorageFile]] = {'.mcap': McapFile, '.db3': SqliteFile}
# Of a bag that was compressed file by file.
_PACKED = ('.mcap.zstd', '.db3.zstd', '.mcap.zst', '.db3.zst')
_LONGEST_REASON = 120


class BagReadError(ValueError):
    """There is no bag, or nothing of it can be read; the message names the path."""


class MessageError(ValueError):
    """A message that cannot be read."""


class BagReader:
    """One recording: a bag's folder, a ring of bags, or one of their files.

    `problems` has a line for each part that could not be read, and grows as messages are read. No
    bag is a BagReadError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self.files = _files_of(path)
        if not self.files:
            raise BagReadError(
                f'{path}: {_why_none(path)}; name a folder with a .mcap or .db3 file, or the file'
            )
        self._leave_out_unreadable()
        for folder in dict.fromkeys(file.parent for file in self.files if path.is_dir()):
            self.problems += _missing_parts(folder)
        self._damaged: Counter[str] = Counter()

    def _leave_out_unreadable(self) -> None:
        """Note files that are no files of a bag whatever is in them, such as a Git LFS pointer."""
        for file in self.files:
            try:
                regular_file(file)
            except UnreadableFileError as error:
                self.problems.append(f'{file}: {error}')
            # May not be looked at: said where it is read.
            except OSError:
                continue
            else:
                continue
            self.files = [one for one in self.files if one != file]
        if not self.files:
            raise BagReadError('; '.join(self.problems[:3]))

    def messages(self, wanted: Wanted) -> Iterator[RawMessage]:
        """Yield the wanted messages in file order, without what a ring's bags repeat."""
        newest: dict[str, bytes] = {}
        in_ring = is_ring(self.path)
        for file in self.files:
            begun: set[str] = set()
            for message in _KINDS[file.suffix](file, self.problems).messages(wanted):
                topic = message.topic
                if in_ring and message.type_name == STRING:
                    is_repeat = topic not in begun and newest.get(topic) == message.serialised
                    begun.add(topic)
                    newest[topic] = message.serialised
                    if is_repeat:
                        continue
                yield message

    def texts(self, wanted: Callable[[str], bool]) -> Iterator[tuple[int, str, str]]:
        """Yield time (ns), topic and text of the messages that are a text on a wanted topic."""
        for raw in self.messages(lambda topic, kind: kind == STRING and wanted(topic)):
            message = self.read(raw)
            if message is not None:
                yield raw.time_ns, raw.topic, message.data

    def note(self, problem: str) -> None:
        self.problems.append(f'{self.path}: {problem}')

    def read(self, message: RawMessage) -> Any | None:
        """Make the message; None, with the problem noted, where that is not possible."""
        try:
            return read_message(message)
        except MessageError as error:
            if not self._damaged[message.topic]:
                self.note(f'topic {message.topic}: {error}')
            self._damaged[message.topic] += 1
            return None


def read_message(message: RawMessage) -> Any:
    """Deserialise a message; MessageError where it is damaged, or of a type that is not known."""
    try:
        kind = message_types().get_msgdef(message.type_name)
    except Exception:
        raise MessageError(f'messages of type {message.type_name} are not known') from None
    data = message.serialised
    try:
        # What rclpy serialises has spare bytes at its end, which `deserialize_cdr` refuses.
        make = kind.deserialize_cdr_le if data[1] & 1 else kind.deserialize_cdr_be
        return make(memoryview(data)[4:], 0, kind.cls, message_types())[0]
    # A damaged length or text ends in whatever it runs into.
    except Exception as error:
        reason = one_line(f'{type(error).__name__}: {error}', _LONGEST_REASON)
        raise MessageError(f'a message cannot be read ({reason})') from None


def is_recording(path: Path) -> bool:
    """Return whether a path is one recording: a bag, a ring of bags, or a file of one."""
    return bool(_files_of(path))


def find_recordings(paths: Iterable[Path]) -> list[Path]:
    """Return the recordings that paths name, each once, at any depth; BagReadError for none."""
    found: dict[Path, Path] = {}
    for path in paths:
        inside = sorted(_recordings_in(path, set())) if path.is_dir() else []
        if not inside and is_recording(path):
            inside = [path]
        if not inside:
            # Says why.
            BagReader(path)
        for recording in inside:
            found.setdefault(recording.resolve(), recording)
    return list(found.values())


def _recordings_in(folder: Path, visited: set[Path]) -> list[Path]:
    """Return the recordings below a folder, each folder looked into once: links may lead back."""
    if is_ring(folder):
        return []
    visited.add(folder.resolve())
    found: list[Path] = []
    for path in folder.iterdir():
        if path.is_dir() and path.resolve() not in visited:
            found += _recordings_in(path, visited) or ([path] if is_recording(path) else [])
    own = _own_files(folder)
    loose = [file for file in _bag_files(folder) if file not in own]
    if not found and not loose:
        return []
    # A file that lies beside recordings is one, and no part of them.
    return found + loose + ([folder] if len(own) > 1 else own)


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix in _KINDS else []
    if not path.is_dir():
        return []
    own = _own_files(path)
    if own:
        return own
    if not is_ring(path):
        return []
    return [file for part in parts_of(path) for file in _own_files(part)]


def _own_files(folder: Path) -> list[Path]:
    """Storage files of a folder's one recording, of its metadata or `NAME_0`, `NAME_1`; or none."""
    found, order = _bag_files(folder), _named_files(folder)
    named_here = [file for file in found if file.name in order]
    names = {_whole_name(file) for file in named_here or found}
    if len(names) > 1 and not named_here:
        return []
    own = [file for file in found if file.name in order or _whole_name(file) in names]
    return sorted(own, key=lambda file: order.get(file.name, len(order)))


def _named_files(folder: Path) -> dict[str, int]:
    """Return the names of the storage files in a folder's metadata, with their order."""
    try:
        text = read_text(folder / 'metadata.yaml', LARGEST_FILE)
        named = loads(text)['rosbag2_bagfile_information']['relative_file_paths']
        return {Path(str(name)).name: number for number, name in enumerate(named)}
    # Without its metadata, or with one that is damaged or too large, a bag still has its files.
    except (OSError, ValueError, TypeError, LookupError):
        return {}


def _missing_parts(folder: Path) -> list[str]:
    """Return a problem for each part that a bag's metadata names and its folder lacks."""
    there = {file.name for file in _own_files(folder)}
    # The metadata of a bag that was unpacked names its packed files.
    names = [re.sub(r'\.zstd?$', '', name) for name in _named_files(folder)]
    missing = [name for name in names if name not in there]
    if len(missing) == len(names) <= len(there):
        # Its files have new names.
        return []
    return [
        f'{folder / name}: is missing: metadata.yaml names it as a part of the bag, and its '
        'messages are not in what follows; copy or unpack it'
        for name in missing
    ]


def _bag_files(folder: Path) -> list[Path]:
    found = (file for file in folder.iterdir() if file.suffix in _KINDS and file.is_file())
    return sorted(found, key=_natural)


def _whole_name(file: Path) -> str:
    return re.sub(r'_\d+$', '', file.stem)


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), '') if part.isdigit() else (-1, part) for part in _pieces(path.name)]


def _pieces(name: str) -> list[str]:
    return re.split(r'(\d+)', name)


def _why_none(path: Path) -> str:
    if not path.exists():
        return 'does not exist'
    if path.is_dir() and _bag_files(path):
        return 'has several bag files, each a recording of its own'
    inside = path.iterdir() if path.is_dir() else [path]
    packed = next((file for file in inside if file.name.endswith(_PACKED)), None)
    if packed is not None:
        whole = packed.with_suffix('')
        return f'is compressed as a whole; unpack each file: zstd -d {packed} -o {whole}'
    return 'has no bag file' if path.is_dir() else f"is not a bag file ('{path.suffix}')"
