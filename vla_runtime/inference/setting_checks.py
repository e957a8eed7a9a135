"""Checks that settings share; a refusal names the setting."""

from __future__ import annotations

from numbers import Integral, Real
from typing import SupportsFloat

import numpy as np

_WORDS: dict[type, str] = {
    bool: 'true or false',
    Integral: 'a whole number',
    Real: 'a number',
}


def check_type(name: str, value: object, kind: type) -> None:
    """Refuse a value of another kind: True is not a number here, and 2.5 is not a count.

    Args:
        name: name of the setting.
        value: value of the setting.
        kind: `bool`, `numbers.Integral` or `numbers.Real`, or a class of settings.

    Raises:
        ValueError: names the setting, the value and what it must be.
    """
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = _WORDS.get(kind, f'a {kind.__name__}')
        raise ValueError(f'{name} is {value!r}: it must be {words}')


def is_finite(value: SupportsFloat) -> bool:
    """Return whether a number is finite in float32, the type that the networks get."""
    try:
        with np.errstate(over='ignore'):
            return bool(np.isfinite(np.float32(float(value))))
    except OverflowError:
        # A whole number beyond float64.
        return False
