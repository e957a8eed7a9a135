"""Camera images of a request: raw bytes, JPEG or PNG, to (height, width, 3) uint8 RGB."""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_runtime.messages.compressed_images import decode, read_header
from vla_runtime.remote.message_pack import MessageError

# Of a frame of 4096 by 4096: no camera of a robot has more, and a small file may claim any size.
MOST_PIXELS = 4096 * 4096


def read_image(key: str, value: Any) -> np.ndarray | None:
    """Return an image as observations have it; None for an absent camera.

    Args:
        value: uint8 array (height, width, 3) or (3, height, width), or the bytes of a JPEG or PNG.

    Raises:
        MessageError: anything else; names the key.
    """
    if value is None:
        return None
    if isinstance(value, bytes):
        return _decoded(key, value)
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
        found = f'an array of {value.dtype}' if isinstance(value, np.ndarray) else type(value)
        raise MessageError(
            f'{key}: expected an image as an array of uint8, or as the bytes of a JPEG or PNG, '
            f'got {getattr(found, "__name__", found)}'
        )
    if value.ndim == 3 and value.shape[2] != 3 and value.shape[0] == 3:
        value = value.transpose(1, 2, 0)
    if value.ndim != 3 or value.shape[2] != 3 or not value.size:
        raise MessageError(
            f'{key}: expected an image of shape (height, width, 3) or (3, height, width), got '
            f'{value.shape}'
        )
    _check_size(key, value.shape[1], value.shape[0])
    return np.ascontiguousarray(value)


def _check_size(key: str, width: int, height: int) -> None:
    if not 0 < width * height <= MOST_PIXELS:
        raise MessageError(
            f'{key}: an image of {width} x {height} pixels, of which at most {MOST_PIXELS:,} are '
            'taken'
        )


def _decoded(key: str, data: bytes) -> np.ndarray:
    view = memoryview(data)
    header = read_header(view)
    if header is None:
        raise MessageError(f'{key}: bytes that are neither a JPEG nor a PNG')
    _check_size(key, header.width, header.height)
    image = decode(view)
    if image is None:
        raise MessageError(f'{key}: a damaged image, or a part of one')
    return np.ascontiguousarray(image)
