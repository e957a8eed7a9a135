"""Compute capabilities of GPUs that multiply in few bits."""

from __future__ import annotations

# By precision: the first capability, and what its products are called.
_FIRST = {
    'fp8': ((8, 9), '8-bit floating point'),
    'nvfp4': ((10, 0), '4-bit floating point'),
}


def lacking_products(precision: str, capability: str) -> str:
    """Return which products a GPU (capability such as `8.9`) lacks for a precision, or ''."""
    if precision not in _FIRST:
        return ''
    first, name = _FIRST[precision]
    major, _, minor = capability.partition('.')
    if (int(major), int(minor)) >= first:
        return ''
    return f'has no products in {name} ({precision}), which come with {first[0]}.{first[1]}'
