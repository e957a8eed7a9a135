"""Arrays of numbers in messages that are made once and overwritten again and again."""

from __future__ import annotations

import array
from typing import Any

import numpy as np


def float_view(message: Any, field: str, count: int) -> np.ndarray:
    """Size a `float64[]` field and look at its memory: (count,) float64, writable.

    Taken from the message after the assignment, because assigning may copy.
    """
    setattr(message, field, array.array('d', bytes(8 * count)))
    return np.frombuffer(getattr(message, field), dtype=np.float64)
