"""Encodings of `sensor_msgs/Image`: bytes of a row, and conversion to RGB, by NumPy and OpenCV.

Names: sensor_msgs/image_encodings.hpp. YUV is that of ITU-R BT.601 with 16 to 235. A Bayer mosaic
is interpolated bilinearly. Channels of 16 bits use all 65536 values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import cv2
import numpy as np

# 65535 becomes 255.
_TO_8_BITS = 1.0 / 257.0


@dataclass(frozen=True)
class RawEncoding:
    """One encoding.

    Attributes:
        pixel_bytes: bytes of a pixel in a row.
        channels: channels of a pixel in a row.
        order: red, green and blue among the channels; None where `convert` makes them.
        convert: makes (height, width, 3) RGB of (rows, width, channels).
        planes: rows of data over rows of pixels, as a fraction.
        even: `width`, `height` that must be even.
        generic: the encoding of the same bytes that does not say what they mean.
    """

    pixel_bytes: int
    channels: int
    order: slice | None = None
    convert: Callable[[np.ndarray], np.ndarray] | None = None
    planes: tuple[int, int] = (1, 1)
    even: tuple[str, ...] = ()
    grey: bool = False
    generic: str | None = None

    def data_rows(self, height: int) -> int:
        return height * self.planes[0] // self.planes[1]

    def to_rgb(self, data: Any, width: int, height: int, step: int, big_endian: bool) -> np.ndarray:
        """Return (height, width, 3) uint8, RGB.

        8-bit colour and grey are a read-only view of the data.

        Args:
            step: bytes from row to row.
            big_endian: order of the bytes of a channel.
        """
        size = self.pixel_bytes // self.channels
        dtype = np.dtype(np.uint8) if size == 1 else np.dtype('>u2' if big_endian else '<u2')
        rows: np.ndarray = np.ndarray(
            shape=(self.data_rows(height), width, self.channels),
            dtype=dtype,
            buffer=data,
            strides=(step, self.pixel_bytes, size),
        )
        if size == 2:
            # OpenCV takes the machine's own order, and whole rows.
            rows = np.ascontiguousarray(rows, dtype=np.uint16)
        rgb = rows[:, :, self.order] if self.order is not None else self._converted(rows)
        if size == 2:
            rgb = cv2.convertScaleAbs(np.ascontiguousarray(rgb), alpha=_TO_8_BITS)
        rgb = np.broadcast_to(rgb.reshape(height, width, -1), (height, width, 3))
        rgb.flags.writeable = False
        return rgb

    def _converted(self, rows: np.ndarray) -> np.ndarray:
        assert self.convert is not None
        return self.convert(np.ascontiguousarray(rows))


def _by_opencv(code: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda rows: cv2.cvtColor(rows, code)


def _order(channels: int, order: slice, bits: int) -> RawEncoding:
    generic = f'8UC{channels}' if bits == 8 else None
    grey = channels == 1
    return RawEncoding(channels * bits // 8, channels, order, grey=grey, generic=generic)


def _bayer(code: int, bits: int) -> RawEncoding:
    return RawEncoding(
        bits // 8,
        1,
        convert=_by_opencv(code),
        even=('width', 'height'),
        generic='8UC1' if bits == 8 else None,
    )


def _pairs(code: int) -> RawEncoding:
    """4:2:2: two pixels share their colour."""
    return RawEncoding(2, 2, convert=_by_opencv(code), even=('width',), generic='8UC2')


def _two_planes(code: int) -> RawEncoding:
    """4:2:0: a plane of brightness, and half as many rows of colour behind it."""
    return RawEncoding(
        1, 1, convert=_by_opencv(code), planes=(3, 2), even=('width', 'height'), generic=None
    )


_UYVY, _YUYV = _pairs(cv2.COLOR_YUV2RGB_UYVY), _pairs(cv2.COLOR_YUV2RGB_YUY2)
# OpenCV names a mosaic by the second and third pixel of its second row.
_BAYER = {
    'rggb': cv2.COLOR_BayerBG2RGB,
    'bggr': cv2.COLOR_BayerRG2RGB,
    'gbrg': cv2.COLOR_BayerGR2RGB,
    'grbg': cv2.COLOR_BayerGB2RGB,
}
_FORWARDS, _BACKWARDS, _FIRST = slice(0, 3), slice(2, None, -1), slice(0, 1)
RAW_ENCODINGS: Mapping[str, RawEncoding] = MappingProxyType(
    {
        'rgb8': _order(3, _FORWARDS, 8),
        'bgr8': _order(3, _BACKWARDS, 8),
        'rgba8': _order(4, _FORWARDS, 8),
        'bgra8': _order(4, _BACKWARDS, 8),
        'mono8': _order(1, _FIRST, 8),
        'rgb16': _order(3, _FORWARDS, 16),
        'bgr16': _order(3, _BACKWARDS, 16),
        'rgba16': _order(4, _FORWARDS, 16),
        'bgra16': _order(4, _BACKWARDS, 16),
        # Both names are in use, the shorter ones since ROS 2 Iron.
        'yuv422': _UYVY,
        'uyvy': _UYVY,
        'yuv422_yuy2': _YUYV,
        'yuyv': _YUYV,
        'nv12': _two_planes(cv2.COLOR_YUV2RGB_NV12),
        'nv21': _two_planes(cv2.COLOR_YUV2RGB_NV21),
        **{
            f'bayer_{mosaic}{bits}': _bayer(code, bits)
            for bits in (8, 16)
            for mosaic, code in _BAYER.items()
        },
    }
)
# Say how many bytes a pixel has, and not what they mean.
GENERIC_ENCODINGS = ('8uc1', '8uc2', '8uc3', '8uc4')
