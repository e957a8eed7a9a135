"""Camera images as JPEG."""

from __future__ import annotations

import cv2
import numpy as np

from vla_runtime.messages.compressed_images import decode


def encode_jpeg(pixels: np.ndarray, quality: int) -> bytes:
    """Return the bytes of a JPEG of (height, width, 3) uint8 RGB pixels; `quality` is 1 to 100."""
    done, data = cv2.imencode('.jpg', pixels[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not done:
        raise ValueError(f'an image of shape {pixels.shape} cannot be written as JPEG')
    return data.tobytes()


def through_jpeg(pixels: np.ndarray, quality: int) -> np.ndarray:
    """Return the pixels that the reader of `encode_jpeg`'s bytes has."""
    read = decode(memoryview(encode_jpeg(pixels, quality)))
    assert read is not None
    return read
