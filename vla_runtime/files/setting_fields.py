"""Settings as dataclass fields, which check values and make a node's parameter table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vla_runtime.files.quotes import quoted

_KEY = 'setting'
# By the type of a setting's default: types of its values (NumPy's too), and their name.
_KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, 'true or false'),
    int: (Integral, 'a whole number'),
    float: (Real, 'a number'),
    str: (str, 'a text'),
}


@dataclass(frozen=True)
class Setting:
    """One setting as a person sets it.

    Attributes:
        default: bool, int, float or str; 0 where the field's default is None.
        description: one line for `ros2 param describe` and the documentation.
        minimum: smallest number allowed, inclusive; None: no limit.
        maximum: largest number allowed, inclusive; None: no limit.
        words: allowed words of a text; empty: any text.
        optional: the field may be None, which a person sets as 0.
    """

    name: str
    default: Any
    description: str
    minimum: float | None = None
    maximum: float | None = None
    words: tuple[str, ...] = ()
    optional: bool = False

    @property
    def allowed(self) -> str:
        """Allowed values in words; empty when anything of the type is allowed."""
        if self.words:
            return ', '.join(self.words)
        if self.minimum is None or self.maximum is None:
            return ''
        return f'{self.minimum} to {self.maximum}'

    def problem(self, value: Any) -> str:
        """Return why a value of the setting's type is refused, or empty text."""
        if self.words and value not in self.words:
            return f'{self.name} is {quoted(value)}: it must be one of {self.allowed}'
        if self.minimum is None or self.maximum is None:
            return ''
        # Not-a-number is in no range.
        if not self.minimum <= value <= self.maximum:
            return f'{self.name} is {value}: it must be {self.allowed}'
        return ''


def setting(
    default: Any,
    description: str,
    minimum: float | None = None,
    maximum: float | None = None,
    *,
    name: str = '',
) -> Any:
    """Return a dataclass field that carries its own row of a parameter table.

    Allowed words are read from the field's type, a `Literal`. An empty `name` is the field's own.
    """
    facts = {
        'name': name,
        'description': description,
        'minimum': minimum,
        'maximum': maximum,
    }
    return field(default=default, metadata={_KEY: facts})


def settings_of(kind: type) -> tuple[Setting, ...]:
    """Return all settings of a dataclass, those of dataclasses inside it at their places."""
    rows: list[Setting] = []
    for member, hint in _members(kind):
        if is_dataclass(hint):
            rows.extend(settings_of(hint))  # type: ignore[arg-type]
        elif _KEY in member.metadata:
            rows.append(_row(member, hint))
    return tuple(rows)


def from_values(kind: type, values: Mapping[str, Any]) -> Any:
    """Make a dataclass from values by parameter name, else defaults (ValueError: unfit values)."""
    given: dict[str, Any] = {}
    for member, hint in _members(kind):
        if is_dataclass(hint):
            if settings_of(hint):  # type: ignore[arg-type]
                given[member.name] = from_values(hint, values)  # type: ignore[arg-type]
        elif _KEY in member.metadata:
            row = _row(member, hint)
            value = values[row.name]
            given[member.name] = None if row.optional and value == 0 else value
    return kind(**given)


def values_of(instance: Any) -> dict[str, Any]:
    """Return the value of every setting of a dataclass by its name: `from_values` inverted."""
    values: dict[str, Any] = {}
    for member, hint in _members(instance.__class__):
        value = getattr(instance, member.name)
        if is_dataclass(hint):
            values.update(values_of(value))
        elif _KEY in member.metadata:
            values[_row(member, hint).name] = _zero(hint) if value is None else value
    return values


def check_settings(instance: Any) -> None:
    """Refuse a value of another type than its setting's, outside its range, or none of its words.

    True is no number here, 2.5 is no count, and NaN is outside every range.

    Raises:
        ValueError: names the setting, the value, and what it must be.
    """
    for row, value in _own(instance):
        if row.optional and value is None:
            continue
        _check_type(row, value)
        if problem := row.problem(value):
            raise ValueError(problem)
        # As None is set as 0, 0 is none of the numbers.
        if row.optional and value == 0:
            raise ValueError(f'{row.name} is 0: it must be more, or None')


def _check_type(row: Setting, value: Any) -> None:
    kind, words = _KINDS[type(row.default)]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f'{row.name} is {value!r}: it must be {words}')


def _own(instance: Any) -> Iterator[tuple[Setting, Any]]:
    for member, hint in _members(instance.__class__):
        if _KEY in member.metadata:
            yield _row(member, hint), getattr(instance, member.name)


@cache
def _members(kind: type) -> tuple[tuple[Field[Any], Any], ...]:
    hints = get_type_hints(kind)
    return tuple((member, hints[member.name]) for member in fields(kind))


def _zero(hint: Any) -> Any:
    return next(kind() for kind in get_args(hint) if kind is not type(None))


def _row(member: Field[Any], hint: Any) -> Setting:
    facts = dict(member.metadata[_KEY])
    optional = type(None) in get_args(hint) and get_origin(hint) is not Literal
    return Setting(
        **{**facts, 'name': facts['name'] or member.name},
        default=_zero(hint) if optional and member.default is None else member.default,
        words=get_args(hint) if get_origin(hint) is Literal else (),
        optional=optional,
    )
