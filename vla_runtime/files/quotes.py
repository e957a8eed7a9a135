"""Shorten text from a file, a message or a command line, and lists of faults, for a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

# --------------------------------------------------------------------------------------------------
# Counted nouns: `1 episode`, `2 episodes`.


def counted(number: int, noun: str, plural: str = '') -> str:
    """Return a number with a noun, whose plural has an s where none is given."""
    return f'{number} {noun if number == 1 else plural or noun + "s"}'


# --------------------------------------------------------------------------------------------------
# Numbers of bytes, as people read them.

_UNITS = ((10**9, 'GB'), (10**6, 'MB'), (10**3, 'kB'))


def size_text(count: int) -> str:
    """Write a number of bytes in the largest unit of which there is one: `1.2 GB`, `56 MB`."""
    for unit, name in _UNITS:
        if count >= unit:
            number = count / unit
            return f'{number:.1f} {name}' if number < 10 else f'{number:,.0f} {name}'
    return f'{count} bytes'


# --------------------------------------------------------------------------------------------------

QUOTE_LENGTH = 60
_MOST_ITEMS = 10
# Largest whole number that is written out; Python refuses to print more than 4300 digits.
_PRINTED_BITS = 200


def quoted(value: Any, longest: int = QUOTE_LENGTH) -> str:
    """A scalar as Python writes it, escapes included; the middle of a long text is left out.

    A list or mapping is named and not shown.
    """
    if isinstance(value, dict):
        return 'a mapping'
    if isinstance(value, (list, tuple)):
        return 'a list'
    if isinstance(value, int) and value.bit_length() > _PRINTED_BITS:
        return f'a whole number of {value.bit_length()} bits'
    if isinstance(value, (str, bytes)) and len(value) > longest:
        half = longest // 2
        return f'{value[:half]!r} … {value[-half:]!r} ({len(value)} characters)'
    return repr(value)


def one_line(text: str, longest: int) -> str:
    """A message on one line without control characters; the middle of a long one is left out."""
    # Twice as much is more than enough to fill the line, however much of it is spaces.
    head, tail = text[: 2 * longest], text[-2 * longest :] if len(text) > 2 * longest else ''
    clean = _clean(head)
    if not tail and len(clean) <= longest:
        return clean
    half = longest // 2
    return f'{clean[:half]} … {_clean(tail or head)[-half:]}'


def join_truncated(items: Iterable[str], between: str = '\n  ', most: int = _MOST_ITEMS) -> str:
    """The first items of a list, and how many more there are."""
    items = list(items)
    more = [f'and {len(items) - most} more'] if len(items) > most else []
    return between.join([*items[:most], *more])


def named(names: Sequence[str]) -> str:
    """Name a few things in words: `'a'`, `'a' and 'b'`, `'a' and 14 more`."""
    if len(names) == 2:
        return f"'{names[0]}' and '{names[1]}'"
    more = f' and {len(names) - 1} more' if len(names) > 1 else ''
    return f"'{names[0]}'{more}" if names else 'none'


def _clean(text: str) -> str:
    return ' '.join(''.join(c if c.isprintable() else ' ' for c in text).split())
