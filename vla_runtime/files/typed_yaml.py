"""Strict YAML: a file has exactly the fields of a dataclass, or the error names the field.

One dataclass mirrors one mapping; `parse` checks a loaded document against the type hints and
`to_plain` goes back. Types understood: str, FreeText, bool, int, float, Literal, X | None,
tuple[X, ...], tuples of fixed length, nested dataclasses and mappings of str to text. A field whose
metadata has `key` is written under that key. Integers are at least 1, or at least 0 where 0 is the
field's default. Floats must be finite, and may have any exponent (1e3). No number is above
2**31 - 1.

Only plain data is read: no tags, no merge keys. Documents have at most 20,000 values, with aliases
counted as what they stand for, nested at most 20 deep. Messages are one line.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from vla_runtime.files.field_error import FieldError
from vla_runtime.files.free_text import FreeText
from vla_runtime.files.quotes import QUOTE_LENGTH, join_truncated, one_line, quoted

T = TypeVar('T')

# No size, count or time of a policy comes near it; it keeps typing slips out of allocators.
_LARGEST = 2**31 - 1
# Bytes, values and levels: many times what any policy or robot file has; a second reads them all.
LARGEST_FILE = 1 << 19
_MOST_VALUES = 20_000
_MOST_LEVELS = 20
_LONGEST_NUMBER = 500
# YAML 1.1 reads 1:30 as 90 and 010 as 8.
_BASE_60 = re.compile(r'[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?')
_BASE_8 = re.compile(r'[-+]?0[0_]*[1-7][0-7_]*')
_LONGEST_PROBLEM = 160
# Known words that are listed where none is near.
_LISTED_WORDS = 30
# PyYAML wants a dot and a sign: 1.0e+3.
_EXPONENT = re.compile(r'[-+]?[0-9]{1,20}(\.[0-9]{0,20})?[eE][-+]?[0-9]{1,4}')
_MERGE = 'tag:yaml.org,2002:merge'


class _StrictLoader(yaml.SafeLoader):
    """Safe loading of plain data, within bounds.

    Refused with the line: a key given twice, merge keys, tags, and aliases that stand for
    themselves or for too much.
    """

    def __init__(self, text: str, *, as_rcl: bool) -> None:
        super().__init__(text)
        self._as_rcl = as_rcl
        self._values = 0
        self._levels = 0
        self._values_of: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        is_alias = isinstance(event, yaml.AliasEvent)
        if getattr(event, 'tag', None) is not None:
            raise _refused(
                f'tag {quoted(event.tag)}: write the value without a tag', event.start_mark
            )
        if is_alias and self._as_rcl:
            raise _refused(f'alias {quoted(event.anchor)}: write the value out', event.start_mark)
        before = self._values
        self._values += 1
        self._levels += 1
        if self._levels > _MOST_LEVELS:
            raise _refused(f'more than {_MOST_LEVELS} levels', event.start_mark)
        node = super().compose_node(parent, index)
        self._levels -= 1
        if not is_alias:
            self._values_of[node] = self._values - before
        elif node not in self._values_of:
            raise _refused(f'alias {quoted(event.anchor)} stands for itself', event.start_mark)
        else:
            self._values += self._values_of[node]
        if self._values > _MOST_VALUES:
            raise _refused(f'more than {_MOST_VALUES} values', event.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.tag == _MERGE:
                raise _refused("merge keys ('<<') are not read; write the keys out", key.start_mark)
            if key.value in seen:
                raise _refused(f'key {quoted(key.value)} is given twice', key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        is_number = node.tag in ('tag:yaml.org,2002:int', 'tag:yaml.org,2002:float')
        if is_number and len(node.value) > _LONGEST_NUMBER:
            raise _refused(f'a number of {len(node.value)} characters', node.start_mark)
        if is_number and _BASE_60.fullmatch(node.value):
            if self._as_rcl:
                return node.value
            problem = 'is base 60 in YAML: quote a text, write a number in decimal'
            raise _refused(f'{quoted(node.value)} {problem}', node.start_mark)
        if is_number and _BASE_8.fullmatch(node.value) and not self._as_rcl:
            problem = 'is base 8 in YAML: write it without the leading 0, or quote a text'
            raise _refused(f'{quoted(node.value)} {problem}', node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, ValueError, LookupError):
            # PyYAML takes 0x_ for a number and 2026-13-01 for a date, and fails to read them.
            raise _refused(f'{quoted(node.value)} cannot be read', node.start_mark) from None


def _refused(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


def loads(text: str, *, as_rcl: bool = False) -> Any:
    """Load one YAML document, nothing but plain data.

    Args:
        as_rcl: read it as ROS 2 reads parameter files: no aliases, 12:30 is a text, 010 is 8.

    Raises:
        FieldError: not YAML, a tag, a merge key, a key given twice, or too large; with the line.
    """
    try:
        return yaml.load(text, Loader=partial(_StrictLoader, as_rcl=as_rcl))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f'line {mark.line + 1}, column {mark.column + 1}: ' if mark else ''
        raise FieldError('', where + one_line(str(error.problem), _LONGEST_PROBLEM)) from None
    except yaml.reader.ReaderError as error:
        raise FieldError('', f'not a YAML document: {error.reason}') from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = one_line(str(error), _LONGEST_PROBLEM)
        raise FieldError('', f'not a YAML document: {reason}') from None


def dumps(value: Any) -> str:
    """Write a dataclass as YAML, one line for each innermost mapping or list."""
    return yaml.safe_dump(
        to_plain(value), sort_keys=False, allow_unicode=True, width=100, default_flow_style=None
    )


def key_of(field: dataclasses.Field[Any]) -> str:
    """The key under which a dataclass field is written."""
    return str(field.metadata.get('key', field.name))


def to_plain(value: Any) -> Any:
    """Dataclasses to mappings and tuples to lists; fields that are None or () are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            key_of(field): to_plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if getattr(value, field.name) not in (None, ())
        }
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


@cache
def _hints_of(cls: type) -> Mapping[str, Any]:
    return get_type_hints(cls)


def parse(cls: type[T], value: Any, field: str = '') -> T:
    """Build a dataclass from a loaded mapping; `field` is the path of `value` in its document.

    Raises:
        FieldError: unknown or missing key, wrong type, number out of range, word not in a Literal,
            or what the dataclass's `__post_init__` refuses.
    """
    if not isinstance(value, Mapping):
        raise FieldError(field, f'{_shown(value)} where a mapping is expected')
    fields = {key_of(item): item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in value:
        if key not in fields:
            raise FieldError(join(field, str(key)), f'unknown key{did_you_mean(str(key), fields)}')
    hints = _hints_of(cls)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for key, item in fields.items():
        if key in value and dataclasses.is_dataclass(value[key]):
            # Parsed already: its type depends on other fields.
            arguments[item.name] = value[key]
        elif key in value:
            minimum = 0 if item.default == 0 and item.default is not False else 1
            arguments[item.name] = _value(hints[item.name], value[key], join(field, key), minimum)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise FieldError(join(field, key), 'is missing')
    try:
        return cls(**arguments)
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(field, str(error)) from None


def join(field: str, key: str) -> str:
    """Path of `key` inside `field`; a long key is shortened."""
    key = one_line(key, QUOTE_LENGTH)
    return f'{field}.{key}' if field else key


def did_you_mean(word: str, known: Iterable[object]) -> str:
    """A hint at the nearest known word, or else the list of them; to be appended to a message."""
    names = [one_line(str(name), QUOTE_LENGTH) for name in known]
    if not names:
        return '; there is none'
    if close := difflib.get_close_matches(one_line(word, QUOTE_LENGTH), names, n=1):
        return f"; did you mean '{close[0]}'?"
    return f'; expected one of {join_truncated(names, ", ", _LISTED_WORDS)}'


def number_or_same(value: Any) -> Any:
    """Return the number that `1e3` stands for, which YAML 1.1 reads as text; else the value."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _value(hint: Any, value: Any, field: str, minimum: int) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = [item for item in get_args(hint) if item is not type(None)]
        return None if value is None else _value(inner[0], value, field, minimum)
    if origin is Literal:
        words = get_args(hint)
        if not isinstance(value, str):
            raise FieldError(field, f'{_shown(value)} where one of {", ".join(words)} is expected')
        if value not in words:
            raise FieldError(field, f'{quoted(value)} is unknown{did_you_mean(value, words)}')
        return value
    if origin is tuple:
        return _tuple(get_args(hint), value, field, minimum)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(get_args(hint)[1], value, field)
    if dataclasses.is_dataclass(hint):
        return parse(hint, value, field)  # type: ignore[arg-type]
    return _scalar(hint, value, field, minimum)


def _scalar(hint: Any, value: Any, field: str, minimum: int) -> Any:
    if hint is float:
        value = number_or_same(value)
        # bool is an int to Python, never to a person.
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise FieldError(field, f'{_shown(value)} where a number is expected')
        if isinstance(value, float) and not math.isfinite(value):
            raise FieldError(field, f'{value} where a finite number is expected')
        if abs(value) > _LARGEST:
            bound = f'at most {_LARGEST}' if value > 0 else f'at least {-_LARGEST}'
            raise FieldError(field, f'{quoted(value)} where {bound} is expected')
        return float(value)
    if hint is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise FieldError(field, f'{_shown(value)} where a whole number is expected')
        if value < minimum:
            raise FieldError(field, f'{quoted(value)} where at least {minimum} is expected')
        if value > _LARGEST:
            raise FieldError(field, f'{quoted(value)} where at most {_LARGEST} is expected')
        return value
    if hint is bool:
        if not isinstance(value, bool):
            raise FieldError(field, f'{_shown(value)} where true or false is expected')
        return value
    if hint is str:
        return _text(value, field)
    if hint is FreeText:
        return _free_text(value, field)
    raise TypeError(f'{field}: typed_yaml does not know the type {hint}')


def _free_text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        hint = '' if isinstance(value, (Mapping, list)) else '; put it in quotes'
        raise FieldError(field, f'{_shown(value)} where text is expected{hint}')
    if not ''.join(value.split()).isprintable():
        raise FieldError(field, f'{quoted(value)} has characters that cannot be printed')
    return value


def _text(value: Any, field: str) -> str:
    value = _free_text(value, field)
    if not value or value != value.strip() or not value.isprintable():
        raise FieldError(
            field,
            f'{quoted(value)} is empty, has spaces around it or characters that cannot be printed',
        )
    return value


def _mapping(hint: Any, value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise FieldError(field, f'{_shown(value)} where a mapping is expected')
    return {
        _text(key, field): _scalar(hint, item, join(field, str(key)), 1)
        for key, item in value.items()
    }


def _tuple(hints: tuple[Any, ...], value: Any, field: str, minimum: int) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise FieldError(field, f'{_shown(value)} where a list is expected')
    if hints[-1] is Ellipsis:
        hints = (hints[0],) * len(value)
    elif len(value) != len(hints):
        raise FieldError(field, f'{len(value)} entries where {len(hints)} are expected')
    return tuple(
        _value(hint, item, f'{field}[{index}]', minimum)
        for index, (hint, item) in enumerate(zip(hints, value, strict=True))
    )


def _shown(value: Any) -> str:
    if value is None:
        return 'nothing'
    if isinstance(value, (Mapping, list, tuple)):
        return quoted(value)
    if isinstance(value, bool):
        return 'true' if value else 'false'
    return f'{quoted(value)} ({type(value).__name__})'
