"""JSON files: values are checked when read; errors name file and field.

Within `noting_keys` every mapping notes which of its keys were asked for, to name the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_runtime.files.input_files import DOWNLOAD_AGAIN, UnreadableFileError, read_text
from vla_runtime.files.quotes import one_line, quoted

_REQUIRED = object()
# Parsed text takes up to thirty times its size in memory. The largest files are the indexes of
# sharded checkpoints, below 1 MB.
LARGEST_JSON = 4 << 20
# Results that the package wrote itself: half a million episodes of a study.
LARGEST_RESULT = 256 << 20
_LONGEST_FIELD = 200


@dataclass
class NotedKeys:
    """Keys of one mapping, and those that were asked for."""

    values: Mapping[str, Any]
    asked: set[str] = field(default_factory=set)

    @property
    def unread(self) -> list[str]:
        """Keys that nobody asked for, in order; null says nothing."""
        return [
            key for key, value in self.values.items() if key not in self.asked and value is not None
        ]


# File and place of each mapping that was looked into.
NotedMappings = dict[tuple[Path, str], NotedKeys]
_NOTED: ContextVar[NotedMappings | None] = ContextVar('noted', default=None)


@contextmanager
def noting_keys() -> Iterator[NotedMappings]:
    """Note the mappings that are made meanwhile, of all files, and the keys that are asked for."""
    noted: NotedMappings = {}
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


class JsonError(ValueError):
    """A JSON file that cannot be used; the message names file and field."""


@dataclass(frozen=True)
class JsonMapping:
    """A mapping in a JSON file; `field` is its place there, '' the whole."""

    path: Path
    values: Mapping[str, Any]
    field: str = ''

    def __post_init__(self) -> None:
        self._note()

    def __contains__(self, key: str) -> bool:
        self._note(key)
        return key in self.values

    def _note(self, *asked: str) -> None:
        noted = _NOTED.get()
        if noted is not None:
            keys = noted.setdefault((self.path, self.field), NotedKeys(self.values))
            keys.asked.update(asked)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
        """Return one value, checked for its type.

        Args:
            kind: expected type or types; bool is no int here.
            default: value where the key is missing or null; without it that is an error.

        Raises:
            JsonError: missing or of another type.
        """
        value = self.value(key)
        if value is None:
            if default is _REQUIRED:
                raise self.error(key, 'is missing')
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = ' or '.join(item.__name__ for item in kinds)
            shown = quoted(value)
            if not isinstance(value, (list, dict)):
                shown += f' ({type(value).__name__})'
            raise self.error(key, f'{shown} where {expected} is expected')
        return value

    def value(self, key: str) -> Any:
        self._note(key)
        return self.values.get(key)

    def count(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a whole number of at least 1; `default` where it is missing or null.

        Raises:
            JsonError: missing, or another value.
        """
        value = self.get(key, int, default)
        if value is not default and value < 1:
            raise self.error(key, f'{value} where at least 1 is expected')
        return value

    def mapping(self, key: str, *, optional: bool = False) -> JsonMapping:
        """A mapping inside this one; an optional one that is missing is empty."""
        values = self.get(key, dict, {} if optional else _REQUIRED)
        return JsonMapping(self.path, values, self._where(key))

    def mappings(self, key: str) -> list[JsonMapping]:
        found = []
        for index, item in enumerate(self.get(key, list)):
            where = f'{key}[{index}]'
            if not isinstance(item, dict):
                raise self.error(where, f'{quoted(item)} where a mapping is expected')
            found.append(JsonMapping(self.path, item, self._where(where)))
        return found

    def words(self, key: str) -> tuple[str, ...] | None:
        """A list of texts; None where it is missing or null."""
        values = self.get(key, list, None)
        if values is None:
            return None
        for value in values:
            if not isinstance(value, str):
                raise self.error(key, f'{quoted(value)} in a list where names are expected')
        return tuple(values)

    def place(self, key: str) -> str:
        """Return file and field of a key, for people; a missing key is named as missing."""
        between = ', ' if key in self.values else ' without '
        return f'{self.path.name}{between}{self._where(key)}'

    def error(self, key: str, message: str) -> JsonError:
        field = one_line(self._where(key), _LONGEST_FIELD)
        return JsonError(f'{self.path}: field {field}: {message}')

    def _where(self, key: str) -> str:
        return f'{self.field}.{key}' if self.field else key


def read_json(path: Path, most_bytes: int = LARGEST_JSON) -> JsonMapping:
    """Read a JSON file whose top is a mapping (JsonError: it cannot be read, or another top)."""
    document = read_document(path, most_bytes)
    if not isinstance(document, dict):
        raise JsonError(f'{path}: is not a mapping')
    return JsonMapping(path, document)


def read_document(path: Path, most_bytes: int = LARGEST_JSON) -> Any:
    """Read a JSON file, whatever its top is (JsonError: missing, too large, or not JSON)."""
    try:
        text = read_text(path, most_bytes)
        if not text:
            raise UnreadableFileError(f'is empty: {DOWNLOAD_AGAIN}')
        return json.loads(text)
    except FileNotFoundError:
        raise JsonError(f'{path}: is missing') from None
    except UnreadableFileError as error:
        raise JsonError(f'{path}: {error}') from None
    except (OSError, ValueError, RecursionError) as error:
        raise JsonError(f'{path}: cannot be read: {one_line(str(error), _LONGEST_FIELD)}') from None
