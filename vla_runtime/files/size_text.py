"""Numbers of bytes, as people read them."""

from __future__ import annotations

_UNITS = ((10**9, 'GB'), (10**6, 'MB'), (10**3, 'kB'))


def size_text(count: int) -> str:
    """Write a number of bytes in the largest unit of which there is one: `1.2 GB`, `56 MB`."""
    for unit, name in _UNITS:
        if count >= unit:
            number = count / unit
            return f'{number:.1f} {name}' if number < 10 else f'{number:,.0f} {name}'
    return f'{count} bytes'
