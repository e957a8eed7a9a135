"""`sensor_msgs` images to RGB arrays.

A message is checked when it arrives (`check_image`, header fields only) and converted when it is
used (`to_rgb`). rgb8, bgr8, rgba8, bgra8 and mono8 become views of the message's own bytes, others
are converted by OpenCV (`raw_encodings`). `is_bigendian` is read for channels of 16 bits alone.

A message is any object with the message's fields, such as one read from a bag; the compressed kind
has a `format`.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vla_runtime.files.quotes import quoted
from vla_runtime.messages import compressed_images
from vla_runtime.messages.raw_encodings import GENERIC_ENCODINGS, RAW_ENCODINGS, RawEncoding

if TYPE_CHECKING:
    from sensor_msgs.msg import CompressedImage, Image

# Twice a 4K frame; a few bytes can say more than any memory holds.
_MOST_PIXELS = 1 << 24
_COMPRESSED_WORDS = ('jpeg', 'jpg', 'png')
# The first bytes of a camera's JPEG: SOI, then an APPn segment or a table of quantisation.
_JPEG_BEGINS = tuple(bytes((0xFF, 0xD8, 0xFF, marker)) for marker in (*range(0xE0, 0xF0), 0xDB))
_COLOUR_TOPIC = "give the colour stream's topic in the robot file"
_READABLE = (
    'rgb8, bgr8, rgba8, bgra8, mono8, their 16-bit forms but mono16, bayer_*, yuv422 (uyvy), '
    'yuv422_yuy2 (yuyv), nv12, nv21'
)


class ImageError(ValueError):
    """An image message that cannot be used; the message says what it is and what would mend it."""


class ImageFacts(NamedTuple):
    """What the header says; `encoding` is how raw bytes are read, '' for a compressed image."""

    width: int
    height: int
    grey: bool
    encoding: str = ''


def check_image(
    message: Image | CompressedImage,
    *,
    width: int | None = None,
    height: int | None = None,
    encoding: str | None = None,
) -> ImageFacts:
    """Refuse a message that `to_rgb` could not convert, without touching its pixels.

    Args:
        width, height: size that the camera must have; any, when None.
        encoding: meaning of the bytes of a raw image whose own encoding is 8UC1 to 8UC4.

    Raises:
        ImageError: encoding, size, row length or amount of data.
    """
    if hasattr(message, 'format'):
        facts = _check_compressed(message)
        _check_size(facts.width, facts.height, width, height)
        return facts
    _check_size(message.width, message.height, width, height)
    name, known = _encoding(message, encoding)
    if odd := [which for which in known.even if getattr(message, which) % 2]:
        raise ImageError(
            f"the image is {message.width}x{message.height} pixels, and in '{name}' "
            f'{" and ".join(odd)} must be even; let the driver send another size or encoding'
        )
    row = message.width * known.pixel_bytes
    if message.step < row:
        raise ImageError(
            f"step is {message.step} bytes, but {message.width} pixels of '{name}' "
            f'take {row}: the driver fills the message wrongly'
        )
    # The last row may come without the padding behind it.
    rows = known.data_rows(message.height)
    shortest, longest = message.step * (rows - 1) + row, message.step * rows
    if not shortest <= len(message.data) <= longest:
        raise ImageError(
            f'data has {len(message.data)} bytes, but {rows} rows of {message.step} '
            f'take {longest}: the driver fills the message wrongly'
        )
    if bytes(message.data[:4]) in _JPEG_BEGINS:
        raise ImageError(
            f"data is a JPEG, not pixels of '{name}': let the driver decode it (usb_cam: "
            'pixel_format mjpeg2rgb), or publish it as sensor_msgs/CompressedImage'
        )
    return ImageFacts(message.width, message.height, known.grey, name)


def to_rgb(
    message: Image | CompressedImage,
    *,
    width: int | None = None,
    height: int | None = None,
    encoding: str | None = None,
    facts: ImageFacts | None = None,
) -> np.ndarray:
    """Return a message's pixels, (height, width, 3) uint8, RGB.

    Of 8-bit colour and grey they are a read-only view with whatever strides the message has.

    Args:
        message: must stay unchanged as long as the result is used.
        width, height, encoding: see `check_image`.
        facts: what `check_image` found, where the message was checked already.

    Raises:
        ImageError: see `check_image`; or data that cannot be decoded, or is damaged.
    """
    if facts is None:
        facts = check_image(message, width=width, height=height, encoding=encoding)
    if hasattr(message, 'format'):
        image = compressed_images.decode(memoryview(message.data))
        if image is None:
            raise ImageError(_damaged(message))
        _check_size(image.shape[1], image.shape[0], width, height)
        return image
    return RAW_ENCODINGS[facts.encoding].to_rgb(
        message.data, message.width, message.height, message.step, bool(message.is_bigendian)
    )


def content_id(message: Image | CompressedImage) -> int:
    """Return a number of 56 bits that is the same for the same pixels, in any process."""
    digest = hashlib.blake2b(memoryview(message.data), digest_size=7).digest()
    return int.from_bytes(digest, 'big')


def describe_encoding(message: Image | CompressedImage) -> str:
    return quoted(message.format if hasattr(message, 'format') else message.encoding)


def _encoding(message: Image, given: str | None) -> tuple[str, RawEncoding]:
    # Drivers write RGB8 as well.
    named = message.encoding.lower()
    if named in GENERIC_ENCODINGS:
        return _meaning(message.encoding, given)
    if named not in RAW_ENCODINGS:
        raise ImageError(f'encoding {quoted(message.encoding)} {_why_not(named)}')
    known = RAW_ENCODINGS[named]
    if given is not None and RAW_ENCODINGS[given] != known:
        raise ImageError(
            f"encoding is '{named}', but the camera's 'encoding' in the robot file says '{given}': "
            'leave it out there, it is for drivers that say 8UC1 to 8UC4'
        )
    return named, known


def _meaning(named: str, given: str | None) -> tuple[str, RawEncoding]:
    """Return what the robot file says that bytes without a meaning are."""
    fitting = [name for name, one in RAW_ENCODINGS.items() if one.generic == named.upper()]
    if given is None:
        raise ImageError(
            f"encoding '{named}' does not say what the bytes mean: give this camera 'encoding' in "
            f'the robot file ({", ".join(fitting)}), or let the driver say it'
        )
    if given not in fitting:
        raise ImageError(
            f"encoding is '{named}', but the camera's 'encoding' in the robot file, '{given}', has "
            f'another number of bytes a pixel; fitting: {", ".join(fitting)}'
        )
    return given, RAW_ENCODINGS[given]


def _why_not(named: str) -> str:
    if named.startswith(('16', '32', '64')) or named == 'mono16':
        return (
            'is not an image in colours or 8-bit grey: it is depth, or numbers of unknown range; '
            + _COLOUR_TOPIC
        )
    return f'is not read; let the driver publish rgb8 or another of: {_READABLE}'


def _check_size(width: int, height: int, expected_w: int | None, expected_h: int | None) -> None:
    if not width or not height:
        raise ImageError(f'the image is {width}x{height} pixels: it is empty')
    if (expected_w or width, expected_h or height) != (width, height):
        raise ImageError(
            f'the image is {width}x{height} pixels, but the robot file says '
            f'{expected_w or "any"}x{expected_h or "any"}; mend the driver or the robot file'
        )


def _check_compressed(message: CompressedImage) -> ImageFacts:
    text = message.format.lower()
    if 'compresseddepth' in text:
        raise ImageError(f'format {quoted(message.format)} is depth; {_COLOUR_TOPIC}')
    if text.startswith(('16', '32', '64')):
        raise ImageError(
            f'compressed format {quoted(message.format)} is not an 8-bit colour image; '
            + _COLOUR_TOPIC
        )
    if not len(message.data):
        raise ImageError('the compressed image has no data')
    # image_transport writes 'rgb8; jpeg compressed bgr8', drivers jpeg, mjpeg or nothing: what
    # the data is decides.
    header = compressed_images.read_header(memoryview(message.data))
    if header is None and any(word in text for word in _COMPRESSED_WORDS):
        raise ImageError(_damaged(message))
    if header is None:
        raise ImageError(
            f'compressed format {quoted(message.format)} is not read; expected jpeg or png: let '
            'the driver send one of them, or raw images (a node decodes video such as h264)'
        )
    if header.bits > 8:
        raise ImageError(
            f'the compressed image has {header.bits} bits a channel, not 8: {_COLOUR_TOPIC}'
        )
    if header.width * header.height > _MOST_PIXELS:
        raise ImageError(
            f'the compressed image says {header.width}x{header.height} pixels; at most '
            f'{_MOST_PIXELS} are decoded, in all'
        )
    return ImageFacts(header.width, header.height, header.grey)


def _damaged(message: CompressedImage) -> str:
    return (
        f'{len(message.data)} bytes of {quoted(message.format)} cannot be decoded: the data is '
        'damaged or of another format'
    )
