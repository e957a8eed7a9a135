"""Reads the messages of an MCAP file as far as they can be read (https://mcap.dev/spec).

Records are walked from the front, so a file without its end gives all that was written. After a
damaged record's header the walk goes on at the next chunk of the file's index, if it has one. What
cannot be read is named, and never raises.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from rosbags.rosbag2.storage_mcap import decompress

from vla_runtime.recording.storage_file import RawMessage, StorageFile, Wanted

_MAGIC = b'\x89MCAP0\r\n'
_HEADER_BYTES = 9
_FOOTER_BYTES = _HEADER_BYTES + 20 + len(_MAGIC)
_FOOTER, _SCHEMA, _CHANNEL, _MESSAGE, _CHUNK, _CHUNK_INDEX, _DATA_END = 2, 3, 4, 5, 6, 8, 15
_LAST_OPCODE = 15
# Above what any recorder makes; a damaged number must not ask for all memory.
_MOST_CHUNK_BYTES = 1 << 30


class _DamagedError(Exception):
    """A record that cannot be read; never leaves this module."""


class McapFile(StorageFile):
    """One file; see `StorageFile`."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        super().__init__(path, problems)
        self._schemas: dict[int, str] = {}
        self._channels: dict[int, tuple[str, str]] = {}
        # Channels that are not CDR.
        self._foreign: set[int] = set()
        self._unknown = 0

    def messages(self, wanted: Wanted) -> Iterator[RawMessage]:
        try:
            with self._path.open('rb') as file:
                size = self._path.stat().st_size
                if size < len(_MAGIC):
                    self._say('is empty, or was never written')
                    return
                # Closed with the last view of it.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                yield from self._walk(memoryview(mapped), wanted)
        except (OSError, ValueError) as error:
            self._say(f'cannot be read: {error}')

    def _walk(self, data: memoryview, wanted: Wanted) -> Iterator[RawMessage]:
        if bytes(data[: len(_MAGIC)]) != _MAGIC:
            self._say('its first bytes are not those of an MCAP file')
        chunks = self._read_summary(data)
        place = len(_MAGIC)
        while place < len(data):
            try:
                code, content, end = _record(data, place)
            except _DamagedError as error:
                onwards = next((chunk for chunk in chunks if chunk > place), None)
                self._say(
                    f'at byte {place}: {error}; '
                    + ('what follows is lost' if onwards is None else f'read on at {onwards}')
                )
                if onwards is None:
                    break
                place = onwards
                continue
            if code in (_DATA_END, _FOOTER):
                break
            yield from self._content(code, content, wanted, place)
            place = end
        else:
            self._say('has no end: the recorder did not close it; all that is there was read')
        if self._unknown:
            self._say(f'{self._unknown} messages of topics whose announcement is damaged are lost')

    def _content(
        self, code: int, content: memoryview, wanted: Wanted, place: int
    ) -> Iterator[RawMessage]:
        """Yield the messages of a record; of a chunk those before its first damage."""
        try:
            if code == _CHUNK:
                inside = _unpacked(content)
                at = 0
                while at < len(inside):
                    inner, body, at = _record(inside, at)
                    if inner != _CHUNK:
                        yield from self._simple(inner, body, wanted)
            else:
                yield from self._simple(code, content, wanted)
        except _DamagedError as error:
            self._say(f'at byte {place}: {error}; its messages are lost')

    def _simple(self, code: int, content: memoryview, wanted: Wanted) -> Iterator[RawMessage]:
        if code == _MESSAGE:
            channel, _, time_ns, _ = _unpack('<HIQQ', content)
            topic = self._channels.get(channel)
            if topic is None:
                self._unknown += channel not in self._foreign
            elif wanted(*topic):
                # A time beyond int64 is none of ROS's.
                yield RawMessage(
                    *topic, min(time_ns, 2**63 - 1), self._message(bytes(content[22:]))
                )
        elif code == _SCHEMA:
            (number,) = _unpack('<H', content)
            self._schemas[number] = _text(content, 2)[0]
        elif code == _CHANNEL:
            number, schema = _unpack('<HH', content)
            topic_name, after = _text(content, 4)
            encoding, _ = _text(content, after)
            if encoding != 'cdr':
                self._say(f'topic {topic_name} is encoded as {encoding!r}, not as cdr')
                self._foreign.add(number)
            elif schema in self._schemas:
                self._channels[number] = topic_name, self._schemas[schema]

    def _read_summary(self, data: memoryview) -> list[int]:
        """Take schemas and channels from the file's index; return where its chunks begin."""
        chunks: list[int] = []
        if len(data) < _FOOTER_BYTES or bytes(data[-len(_MAGIC) :]) != _MAGIC:
            return chunks
        try:
            code, content, _ = _record(data, len(data) - _FOOTER_BYTES)
            place = _unpack('<Q', content)[0] if code == _FOOTER else 0
            while 0 < place < len(data) - _FOOTER_BYTES:
                code, content, place = _record(data, place)
                if code == _CHUNK_INDEX:
                    chunks.append(_unpack('<QQQ', content)[2])
                elif code in (_SCHEMA, _CHANNEL):
                    list(self._simple(code, content, lambda *_: False))
        except _DamagedError:
            self._say('its index is damaged, and was not used')
        return sorted(chunks)


def _record(data: memoryview, place: int) -> tuple[int, memoryview, int]:
    """Code and content of the record at an offset, and the offset behind it."""
    if place + _HEADER_BYTES > len(data):
        raise _DamagedError('the file ends within a record')
    code, length = struct.unpack_from('<BQ', data, place)
    if not 1 <= code <= _LAST_OPCODE:
        raise _DamagedError('no record begins here')
    end = place + _HEADER_BYTES + length
    if end > len(data):
        raise _DamagedError('the file ends within a record')
    return code, data[place + _HEADER_BYTES : end], end


def _unpacked(chunk: memoryview) -> memoryview:
    _, _, size, crc = _unpack('<QQQI', chunk)
    compression, after = _text(chunk, 28)
    (length,) = _unpack('<Q', chunk[after:])
    packed = chunk[after + 8 : after + 8 + length]
    if size > _MOST_CHUNK_BYTES or len(packed) != length:
        raise _DamagedError('the sizes of a chunk are damaged')
    try:
        return memoryview(decompress(bytes(packed), compression, size, crc))
    # Of two decompressors and rosbags, each with its own errors.
    except Exception as error:
        raise _DamagedError(f'a chunk cannot be unpacked: {error}') from None


def _unpack(layout: str, data: memoryview) -> tuple[int, ...]:
    if len(data) < struct.calcsize(layout):
        raise _DamagedError('a record is too short')
    return struct.unpack_from(layout, data)


def _text(data: memoryview, place: int) -> tuple[str, int]:
    """A text, and the offset behind it."""
    (length,) = _unpack('<I', data[place:])
    end = place + 4 + length
    if end > len(data):
        raise _DamagedError('a record is too short')
    try:
        return bytes(data[place + 4 : end]).decode('utf-8'), end
    except UnicodeDecodeError:
        raise _DamagedError('a text is damaged') from None
