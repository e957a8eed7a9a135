"""Modes by which a recording keeps frames of the cameras."""

from __future__ import annotations

from typing import Literal

# `used`: those that an inference used, bit for bit; `all`, likewise; `reduced`: a few a second.
ImageMode = Literal['used', 'all', 'reduced']

# How often a reduced image of a camera is kept, and how: raw ones of 20 Hz are 100 MB a minute.
IMAGE_RATE_HZ = 4
JPEG_QUALITY = 85
