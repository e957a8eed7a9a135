"""Reads the messages of a rosbag2 file of SQLite as far as they can be read."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing

from vla_runtime.recording.storage_file import RawMessage, StorageFile, Wanted


class SqliteFile(StorageFile):
    """One file; see `StorageFile`."""

    def messages(self, wanted: Wanted) -> Iterator[RawMessage]:
        """Yield the wanted messages in the order of the file."""
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
