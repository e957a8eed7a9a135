"""Counted nouns: `1 episode`, `2 episodes`."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = '') -> str:
    """Return a number with a noun, whose plural has an s where none is given."""
    return f'{number} {noun if number == 1 else plural or noun + "s"}'
