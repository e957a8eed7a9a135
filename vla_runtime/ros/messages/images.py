"""`sensor_msgs` images to RGB arrays.

A message is checked when it arrives (`check_image`, header fields only, microseconds) and converted
when it is used (`to_rgb`), so that frames which no inference looks at cost nothing.

rgb8, bgr8, rgba8, bgra8 and mono8 become views of the message's own bytes: nothing is copied.
`is_bigendian` says nothing about 8-bit channels and is not looked at there. Every other encoding is
left to `cv_bridge`, which ROS 2 installations have and Python package indexes do not.

A message is any object with the message's fields, such as one read from a bag; of the two kinds the
compressed one is that with a `format`.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from vla_runtime.files.quotes import quoted

if TYPE_CHECKING:
    from sensor_msgs.msg import CompressedImage, Image

# Encoding to bytes a pixel, and where red, green and blue stand among them.
_CHANNELS: dict[str, tuple[int, slice]] = {
    'rgb8': (3, slice(0, 3)),
    'bgr8': (3, slice(2, None, -1)),
    'rgba8': (4, slice(0, 3)),
    'bgra8': (4, slice(2, None, -1)),
    'mono8': (1, slice(0, 1)),
}
# Twice a 4K frame; a few bytes can say more than any memory holds.
_MOST_PIXELS = 1 << 24
_PNG, _JPEG = b'\x89PNG\r\n\x1a\n', b'\xff\xd8'
# Start of frame, baseline to arithmetic; C4, C8 and CC mean other things (ITU-T T.81, table B.1).
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Markers without a length: fill bytes aside, TEM and the restart markers (table B.1).
_JPEG_BARE = frozenset((0x01, *range(0xD0, 0xD8)))
_JPEG_FILL = re.compile(rb'\xff+')
# A camera's frame has some twenty segments in front of the pixels.
_MOST_SEGMENTS = 1000
_COMPRESSED_WORDS = ('jpeg', 'jpg', 'png')


class ImageError(ValueError):
    """An image message that cannot be used; the message says what it is and what would mend it."""


def check_image(
    message: Image | CompressedImage, *, width: int | None = None, height: int | None = None
) -> None:
    """Refuse a message that `to_rgb` could not convert, without touching its pixels.

    Args:
        message: message as it was received.
        width: the width that the camera must have; any, when None. Raw images only: the size of a
            compressed image is known once it is decoded.
        height: likewise.

    Raises:
        ImageError: encoding, size, row length or amount of data.
    """
    if hasattr(message, 'format'):
        _check_compressed(message)
        return
    _check_size(message.width, message.height, width, height)
    if message.encoding not in _CHANNELS:
        if _cv_bridge() is None:
            raise ImageError(
                f'encoding {quoted(message.encoding)} needs cv_bridge, which is not installed here '
                f'(without it: {", ".join(_CHANNELS)}); install ros-$ROS_DISTRO-cv-bridge, or let '
                'the driver publish one of those'
            )
        return
    row = message.width * _CHANNELS[message.encoding][0]
    if message.step < row:
        raise ImageError(
            f"step is {message.step} bytes, but {message.width} pixels of '{message.encoding}' "
            f'take {row}: the driver fills the message wrongly'
        )
    # The last row may come without the padding behind it.
    shortest, longest = message.step * (message.height - 1) + row, message.step * message.height
    if not shortest <= len(message.data) <= longest:
        raise ImageError(
            f'data has {len(message.data)} bytes, but {message.height} rows of {message.step} '
            f'take {longest}: the driver fills the message wrongly'
        )


def to_rgb(
    message: Image | CompressedImage, *, width: int | None = None, height: int | None = None
) -> np.ndarray:
    """An image message as pixels.

    Args:
        message: message as it was received; it must stay unchanged as long as the result is used.
        width: the width that the camera must have; any, when None.
        height: likewise.

    Returns:
        (height, width, 3) uint8, RGB. Of the raw 8-bit encodings a read-only view with whatever
        strides the message has.

    Raises:
        ImageError: see `check_image`; or data that cannot be decoded.
    """
    check_image(message, width=width, height=height)
    if hasattr(message, 'format'):
        image = _decode(message)
        _check_size(image.shape[1], image.shape[0], width, height)
        return image
    if message.encoding not in _CHANNELS:
        return _through_cv_bridge(message)
    size, channels = _CHANNELS[message.encoding]
    pixels: np.ndarray = np.ndarray(
        shape=(message.height, message.width, size),
        dtype=np.uint8,
        buffer=message.data,
        strides=(message.step, size, 1),
    )
    rgb = np.broadcast_to(pixels[:, :, channels], (message.height, message.width, 3))
    rgb.flags.writeable = False
    return rgb


def _check_size(width: int, height: int, expected_w: int | None, expected_h: int | None) -> None:
    if not width or not height:
        raise ImageError(f'the image is {width}x{height} pixels: it is empty')
    if (expected_w or width, expected_h or height) != (width, height):
        raise ImageError(
            f'the image is {width}x{height} pixels, but the robot file says '
            f'{expected_w or "any"}x{expected_h or "any"}; mend the driver or the robot file'
        )


def _check_compressed(message: CompressedImage) -> None:
    text = message.format.lower()
    # image_transport writes 'rgb8; jpeg compressed bgr8', cv_bridge and drivers just 'jpeg'.
    if 'compresseddepth' in text or not any(word in text for word in _COMPRESSED_WORDS):
        raise ImageError(
            f'compressed format {quoted(message.format)} is not known; expected jpeg or png colour '
            'images'
        )
    if text.startswith(('16', '32', '64')):
        raise ImageError(
            f'compressed format {quoted(message.format)} is not an 8-bit colour image; give the '
            "colour stream's topic in the robot file"
        )
    if not len(message.data):
        raise ImageError('the compressed image has no data')
    size = _declared_size(memoryview(message.data))
    if size is None:
        raise ImageError(_damaged(message))
    if size[0] * size[1] > _MOST_PIXELS:
        raise ImageError(
            f'the compressed image says {size[0]}x{size[1]} pixels; at most {_MOST_PIXELS} are '
            'decoded, in all'
        )


def _declared_size(data: memoryview) -> tuple[int, int] | None:
    """Width and height that a PNG or JPEG says; None where it is neither, or damaged."""
    if bytes(data[:8]) == _PNG and len(data) >= 24:
        width, height = struct.unpack('>II', data[16:24])
        return width, height
    if bytes(data[:2]) != _JPEG:
        return None
    place = len(_JPEG)
    # From segment to segment: any number of fill bytes, a marker, and for most a length that
    # counts itself.
    for _ in range(_MOST_SEGMENTS):
        fill = _JPEG_FILL.match(data, place)
        if fill is None or fill.end() + 8 > len(data):
            return None
        place = fill.end()
        marker = data[place]
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack('>HH', data[place + 4 : place + 8])
            return width, height
        bare = marker in _JPEG_BARE
        place += 1 if bare else 1 + int.from_bytes(data[place + 1 : place + 3], 'big')
    return None


def _damaged(message: CompressedImage) -> str:
    return (
        f'{len(message.data)} bytes of {quoted(message.format)} cannot be decoded: the data is '
        'damaged or of another format'
    )


def _decode(message: CompressedImage) -> np.ndarray:
    try:
        image = cv2.imdecode(np.frombuffer(message.data, dtype=np.uint8), cv2.IMREAD_COLOR)
    except cv2.error as error:
        raise ImageError(f'{quoted(message.format)} data cannot be decoded: {error}') from error
    if image is None:
        raise ImageError(_damaged(message))
    return image[:, :, ::-1]


@lru_cache(maxsize=1)
def _cv_bridge() -> Any | None:
    try:
        from cv_bridge import CvBridge

        return CvBridge()
    # A bridge built for another numpy or another ROS fails in many ways; all mean: not here.
    except Exception:
        return None


def _through_cv_bridge(message: Image) -> np.ndarray:
    try:
        return np.asarray(_cv_bridge().imgmsg_to_cv2(message, desired_encoding='rgb8'))  # type: ignore[union-attr]
    except Exception as error:
        raise ImageError(
            f'encoding {quoted(message.encoding)}: cv_bridge cannot make rgb8 of it: {error}'
        ) from error
