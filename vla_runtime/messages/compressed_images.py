"""JPEG and PNG data of `sensor_msgs/CompressedImage`: facts of their headers, pixels, damage.

Decoders make up pixels for damaged data and tell nobody. So a PNG is checked by its checksums, and
a JPEG, which has none, by whether its decoder is through with all blocks at the end of the data.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import NamedTuple

import cv2
import numpy as np

_PNG, _JPEG = b'\x89PNG\r\n\x1a\n', b'\xff\xd8'
# Colour types without colour (https://www.w3.org/TR/png, table 11.1).
_PNG_GREY = (0, 4)
# Start of frame, baseline to arithmetic; C4, C8 and CC mean other things (ITU-T T.81, table B.1).
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Frames in one scan that the decoder reads from front to end: Huffman, sequential.
_JPEG_SEQUENTIAL = frozenset((0xC0, 0xC1))
# Markers without a length: fill bytes aside, TEM and the restart markers (table B.1).
_JPEG_BARE = frozenset((0x01, *range(0xD0, 0xD8)))
_JPEG_SCAN, _JPEG_RESTART, _JPEG_END = 0xDA, 0xDD, 0xD9
_JPEG_TAIL = bytes((0xFF, _JPEG_END))
_JPEG_FILL = re.compile(rb'\xff+')
# In a scan: a marker, neither a stuffed byte nor a restart.
_JPEG_AFTER_SCAN = re.compile(rb'\xff+[^\x00\xd0-\xd7\xff]')
_JPEG_RESTARTS = re.compile(rb'\xff([\xd0-\xd7])')
# A camera's frame has some twenty segments in front of the pixels.
_MOST_SEGMENTS = 1000
# So many zeros at the end are no pixels.
_EMPTY_BYTES = 16
# A bit pattern that every Huffman table has codes for, unlike ones; more than a row of blocks.
_MORE_BLOCKS = b'\x55' * 4096


class ImageHeader(NamedTuple):
    """What the first bytes say: size in pixels, whether it has no colours, bits a channel."""

    width: int
    height: int
    grey: bool
    bits: int


class _JpegLayout(NamedTuple):
    """Offsets of what is in a JPEG.

    Attributes:
        blocks: size in pixels of the blocks that are coded together.
        restart_every: so many of those between two restart markers; 0 for none.
        scan: offset of the first scan's data; None where there is none.
    """

    header: ImageHeader
    marker: int
    blocks: tuple[int, int]
    restart_every: int
    scan: int | None
    scans_all: bool


def read_header(data: memoryview) -> ImageHeader | None:
    """What a PNG or JPEG says of itself; None where it is neither, or damaged."""
    if bytes(data[:8]) == _PNG:
        if len(data) < 26:
            return None
        width, height, bits, colours = struct.unpack('>IIBB', data[16:26])
        return ImageHeader(width, height, colours in _PNG_GREY, bits)
    layout = _read_jpeg(data)
    return None if layout is None else layout.header


def decode(data: memoryview) -> np.ndarray | None:
    """Return (height, width, 3) uint8, RGB; None where the data is damaged."""
    is_png = bytes(data[:8]) == _PNG
    if not (_is_whole_png(data) if is_png else _is_whole_jpeg(data)):
        return None
    image = _decoded(data, cv2.IMREAD_COLOR)
    if image is None and not is_png:
        # OpenCV refuses a JPEG without an end marker, which some cameras leave out.
        image = _decoded(bytes(data) + _JPEG_TAIL, cv2.IMREAD_COLOR)
    return None if image is None else image[:, :, ::-1]


def _read_jpeg(data: memoryview) -> _JpegLayout | None:
    """Walk from segment to segment, up to the first scan; None where there is no frame."""
    if bytes(data[:2]) != _JPEG:
        return None
    place, restart_every = len(_JPEG), 0
    header: ImageHeader | None = None
    kind, blocks, channels = 0, (8, 8), 0
    # Any number of fill bytes, a marker, and for most a length that counts itself.
    for _ in range(_MOST_SEGMENTS):
        fill = _JPEG_FILL.match(data, place)
        if fill is None or fill.end() + 8 > len(data):
            break
        place = fill.end()
        marker = data[place]
        if marker in _JPEG_FRAMES and header is None:
            bits, height, width, channels = struct.unpack('>BHHB', data[place + 3 : place + 9])
            header, kind = ImageHeader(width, height, channels == 1, bits), marker
            factors = data[place + 10 : place + 9 + 3 * channels : 3]
            # One channel alone is coded block by block.
            if channels > 1 and len(factors):
                blocks = 8 * max(f >> 4 for f in factors), 8 * max(f & 15 for f in factors)
        elif marker == _JPEG_RESTART:
            (restart_every,) = struct.unpack('>H', data[place + 3 : place + 5])
        elif marker == _JPEG_SCAN and header is not None:
            scan = place + 1 + int.from_bytes(data[place + 1 : place + 3], 'big')
            return _JpegLayout(
                header, kind, blocks, restart_every, scan, data[place + 3] == channels
            )
        elif marker == _JPEG_END:
            break
        bare = marker in _JPEG_BARE
        place += 1 if bare else 1 + int.from_bytes(data[place + 1 : place + 3], 'big')
    return None if header is None else _JpegLayout(header, kind, blocks, restart_every, None, False)


def _is_whole_jpeg(data: memoryview) -> bool:
    """Return whether nothing shows that a part of a JPEG is missing."""
    layout = _read_jpeg(data)
    if layout is None or layout.scan is None:
        return False
    found = _JPEG_AFTER_SCAN.search(data, layout.scan)
    if layout.marker not in _JPEG_SEQUENTIAL or not layout.scans_all:
        # In several scans, whose ends are not told by the blocks.
        return bytes(data).rfind(_JPEG_TAIL, layout.scan) >= 0
    # Some cameras leave out the end marker: what is in front of it decides, and no empty buffer.
    end = _used(data) if found is None else found.start()
    if found is not None and data[found.end() - 1] != _JPEG_END:
        return False
    if layout.restart_every and not _has_all_restarts(layout, data[layout.scan : end]):
        return False
    # A decoder that has had all blocks reads no further, whatever follows. One that has not makes
    # up the rest: of the end marker grey or the last colour, of more data something else.
    whole = bytes(data[:end])
    return _is_same(_small(whole + _JPEG_TAIL), _small(whole + _MORE_BLOCKS))


def _used(data: memoryview) -> int:
    used = len(bytes(data).rstrip(b'\0'))
    return used if len(data) - used >= _EMPTY_BYTES else len(data)


def _has_all_restarts(layout: _JpegLayout, scan: memoryview) -> bool:
    across, down = layout.blocks
    count = -(-layout.header.width // across) * -(-layout.header.height // down)
    expected = (count - 1) // layout.restart_every
    markers = _JPEG_RESTARTS.findall(scan)
    return len(markers) == expected and all(
        one[0] == 0xD0 + number % 8 for number, one in enumerate(markers)
    )


def _small(jpeg: bytes) -> np.ndarray | None:
    """Decode at an eighth of the size: all bits are read, and few pixels computed."""
    return _decoded(jpeg, cv2.IMREAD_REDUCED_COLOR_8)


def _decoded(data: bytes | memoryview, how: int) -> np.ndarray | None:
    try:
        return cv2.imdecode(np.frombuffer(data, dtype=np.uint8), how)
    except cv2.error:
        return None


def _is_same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is not None and other is not None and np.array_equal(one, other)


def _is_whole_png(data: memoryview) -> bool:
    """Return whether all chunks are there and have their checksums."""
    place = len(_PNG)
    while place + 12 <= len(data):
        (length,) = struct.unpack('>I', data[place : place + 4])
        end = place + 8 + length
        if end + 4 > len(data):
            return False
        (checksum,) = struct.unpack('>I', data[end : end + 4])
        if zlib.crc32(data[place + 4 : end]) != checksum:
            return False
        if bytes(data[place + 4 : place + 8]) == b'IEND':
            return True
        place = end + 4
    return False
