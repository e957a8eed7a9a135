"""Units of joints, of policies and of URDFs."""

from __future__ import annotations

import math

# Unit to (dimension, size in the dimension's first unit).
SIZE = {
    'rad': ('angle', 1.0),
    'deg': ('angle', math.pi / 180.0),
    'm': ('length', 1.0),
    'mm': ('length', 1e-3),
    '1': ('none', 1.0),
    'percent': ('none', 1e-2),
}
