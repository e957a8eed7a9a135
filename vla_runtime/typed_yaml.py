"""Strict YAML: a file says exactly what a dataclass says, or the error names the field.

One dataclass mirrors one mapping; `parse` checks a loaded document against the type hints and
`to_plain` goes back. Types understood: str, bool, int, float, Literal, X | None, tuple[X, ...],
tuples of fixed length, nested dataclasses and Mapping[str, str]. A field whose metadata has `key`
is written under that key. Integers are sizes and counts: at least 1, or at least 0 where 0 is the
field's default. Floats must be finite. No number is above 2**31 - 1.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar('T')

# No size, count or time of a policy comes near it; it keeps typing slips out of allocators.
_LARGEST = 2**31 - 1


class FieldError(ValueError):
    """A value that cannot be used.

    Attributes:
        field: dotted path of the value in its document, e.g. `cameras[1].name`; '' is the document.
        message: what came, what was expected, how to mend it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f'field {field}: {message}' if field else message)
        self.field = field
        self.message = message


class _StrictLoader(yaml.SafeLoader):
    """Safe loading that refuses a key given twice, where YAML would keep the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'key {key.value!r} is given twice', key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def loads(text: str) -> Any:
    """Load one YAML document, nothing but plain data.

    Raises:
        FieldError: not YAML, a Python or application tag, or a key given twice; with the line.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f'line {mark.line + 1}, column {mark.column + 1}: ' if mark else ''
        raise FieldError('', f'{where}{error.problem}') from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FieldError('', f'not a YAML document: {error}') from None


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


def parse(cls: type[T], value: Any, field: str = '') -> T:
    """Build a dataclass from a loaded mapping.

    Args:
        cls: the dataclass; its `__post_init__` may raise ValueError for what hints cannot say.
        value: what `loads` gave.
        field: path of `value` in its document, for messages.

    Raises:
        FieldError: unknown or missing key, wrong type, number out of range, word not in a Literal.
    """
    if not isinstance(value, Mapping):
        raise FieldError(field, f'{_said(value)} where a mapping is expected')
    fields = {key_of(item): item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in value:
        if key not in fields:
            raise FieldError(join(field, str(key)), f'unknown key{did_you_mean(str(key), fields)}')
    hints = get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for key, item in fields.items():
        if key in value:
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
    """Path of `key` inside `field`."""
    return f'{field}.{key}' if field else key


def did_you_mean(word: str, known: Any) -> str:
    """A hint at the nearest known word, or the list of them; to be appended to a message."""
    names = [str(name) for name in known]
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else f'; expected one of {", ".join(names)}'


def _value(hint: Any, value: Any, field: str, minimum: int) -> Any:
    """Check one value against one type hint."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = [item for item in get_args(hint) if item is not type(None)]
        return None if value is None else _value(inner[0], value, field, minimum)
    if origin is Literal:
        words = get_args(hint)
        if not isinstance(value, str):
            raise FieldError(field, f'{_said(value)} where one of {", ".join(words)} is expected')
        if value not in words:
            raise FieldError(field, f'{value!r} is unknown{did_you_mean(value, words)}')
        return value
    if origin is tuple:
        return _tuple(get_args(hint), value, field, minimum)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _text_mapping(value, field)
    if dataclasses.is_dataclass(hint):
        return parse(hint, value, field)  # type: ignore[arg-type]
    return _scalar(hint, value, field, minimum)


def _scalar(hint: Any, value: Any, field: str, minimum: int) -> Any:
    if hint is float:
        # bool is an int to Python, never to a person.
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise FieldError(field, f'{_said(value)} where a number is expected')
        if isinstance(value, float) and not math.isfinite(value):
            raise FieldError(field, f'{value} where a finite number is expected')
        if abs(value) > _LARGEST:
            raise FieldError(field, f'{value} where at most {_LARGEST} is expected')
        return float(value)
    if hint is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise FieldError(field, f'{_said(value)} where a whole number is expected')
        if value < minimum:
            raise FieldError(field, f'{value} where at least {minimum} is expected')
        if value > _LARGEST:
            raise FieldError(field, f'{value} where at most {_LARGEST} is expected')
        return value
    if hint is bool:
        if not isinstance(value, bool):
            raise FieldError(field, f'{_said(value)} where true or false is expected')
        return value
    if hint is str:
        return _text(value, field)
    raise TypeError(f'{field}: typed_yaml does not know the type {hint}')


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        hint = '' if isinstance(value, (Mapping, list)) else '; put it in quotes'
        raise FieldError(field, f'{_said(value)} where text is expected{hint}')
    if not value or value != value.strip() or not value.isprintable():
        raise FieldError(
            field,
            f'{value!r} is empty, has spaces around it or characters that cannot be printed',
        )
    return value


def _text_mapping(value: Any, field: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise FieldError(field, f'{_said(value)} where a mapping is expected')
    return {_text(key, field): _text(item, join(field, str(key))) for key, item in value.items()}


def _tuple(hints: tuple[Any, ...], value: Any, field: str, minimum: int) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise FieldError(field, f'{_said(value)} where a list is expected')
    if hints[-1] is Ellipsis:
        hints = (hints[0],) * len(value)
    elif len(value) != len(hints):
        raise FieldError(field, f'{len(value)} entries where {len(hints)} are expected')
    return tuple(
        _value(hint, item, f'{field}[{index}]', minimum)
        for index, (hint, item) in enumerate(zip(hints, value, strict=True))
    )


def _said(value: Any) -> str:
    """What came, with its kind in a person's words."""
    if value is None:
        return 'nothing'
    if isinstance(value, Mapping):
        return 'a mapping'
    if isinstance(value, (list, tuple)):
        return 'a list'
    if isinstance(value, bool):
        return 'true' if value else 'false'
    return f'{value!r} ({type(value).__name__})'
