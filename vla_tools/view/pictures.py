"""Small JPEGs of camera frames, for a page."""

from __future__ import annotations

from typing import Any

import cv2

from vla_runtime.messages.images import to_rgb
from vla_runtime.messages.jpeg import encode_jpeg

# Width, pixels, and quality: some 15 kB each.
_WIDTH, _QUALITY = 480, 75
# A JPEG of no more bytes goes as the driver made it.
_SMALL_BYTES = 60_000
_JPEG_BEGINS = b'\xff\xd8\xff'


def small_jpeg(message: Any, encoding: str | None = None) -> bytes:
    """Return a frame as a JPEG of at most 480 pixels' width.

    `message` is an `Image` or a `CompressedImage`, `encoding` that of the robot file's camera.

    Raises:
        ImageError: the frame cannot be used.
    """
    if hasattr(message, 'format') and len(message.data) <= _SMALL_BYTES:
        data = bytes(message.data)
        if data.startswith(_JPEG_BEGINS):
            return data
    pixels = to_rgb(message, encoding=None if hasattr(message, 'format') else encoding)
    height, width = pixels.shape[:2]
    if width > _WIDTH:
        size = _WIDTH, max(1, round(height * _WIDTH / width))
        pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    return encode_jpeg(pixels, _QUALITY)
