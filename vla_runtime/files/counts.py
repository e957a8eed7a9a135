"""Counted nouns: `1 episode`, `2 episodes`."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with a noun that takes an s in the plural."""
    return f'{number} {noun}' if number == 1 else f'{number} {noun}s'
