"""Camera images to the networks' pixels: resize with the aspect kept, pad black, scale to [-1, 1].

Checkpoints were trained with either of two resamplers: bilinear in float (four taps, aliases when
shrinking) and Pillow's on uint8 (a triangle filter as wide as the shrinking needs).
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache, reduce
from operator import add
from typing import NamedTuple

import cv2
import numpy as np

from vla_runtime.processing.tiles import bilinear_taps
from vla_runtime.processing.words import check_word
from vla_runtime.types import ImagePadding, ImageResample

BLACK = -1.0
_ONE, _TWO, _WHITE = np.float32(1.0), np.float32(2.0), np.float32(255.0)
# Rows worked on at once: the intermediate arrays stay in the cache, and are small enough that
# freeing them does not hand their pages back to the system.
_BLOCK_ROWS = 32
# Pillow's fixed point: a weight of one.
_ONE_WEIGHT = 2**22
# Lines of a result that one matrix product makes: more waste products with zeros, fewer are more
# calls. Four of a 640x480 picture are also too little for a BLAS to wake other cores over.
_GROUP_LINES = 4


def black_pixels(height: int, width: int) -> np.ndarray:
    """The picture of an absent camera: (3, height, width) float32, all -1."""
    return np.full((3, height, width), BLACK, dtype=np.float32)


def to_pixels(
    image: np.ndarray,
    size: int | tuple[int, int],
    *,
    padding: ImagePadding,
    resample: ImageResample,
    bars: float = BLACK,
    table: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Resize one image into a black picture, keeping its aspect, and scale it to [-1, 1].

    The resized sides are `int(side / max(h / height, w / width))`, as in LeRobot and openpi.

    Args:
        image: (h, w, 3) uint8, RGB, any strides; never written to.
        size: height and width of the result in pixels; S, side of a square.
        padding: `centre` puts an odd pixel right or at the bottom; `left_top` pads on the left and
            at the top only.
        resample: `bilinear` interpolates x/255 in float32 without antialiasing, as LeRobot does
            with `torch.nn.functional.interpolate(align_corners=False)`; `antialias` resizes the
            uint8 image with Pillow's BILINEAR, as openpi's client does.
        bars: value of the padding, -1 for black.
        table: (3, 256) float32, each channel's grey levels in another scale than [-1, 1], in which
            `bars` is then too; a straight line (`plain_images.normalised_table`).
        out: (3, height, width) float32 to write into; a new array without it.

    Returns:
        (3, height, width) float32, channels first, in [-1, 1] or the table's scale inside the
        padding; `out` itself if given.

    Raises:
        ValueError: size or `out` of another type or shape, an unknown word for padding or
            resample, or an image so narrow that one side shrinks to nothing.
    """
    check_word('image resample', resample, ImageResample)
    if padding in ('none', 'stretch') or resample not in ('bilinear', 'antialias'):
        raise ValueError(
            f"padding '{padding}' with resample '{resample}': only padded images are resized here; "
            'see processing.plain_images and processing.stretched_images'
        )
    high, wide = (size, size) if isinstance(size, int) else size
    out = _picture(high, wide, out)
    height, width = _resized(image.shape[0], image.shape[1], high, wide)
    top, left = _offsets(high - height, wide - width, padding)

    if height < high or width < wide:
        out.fill(bars)
    inner = picture = out[:, top : top + height, left : left + width]
    if image.strides[2] < 0:
        # A bgr8 message seen as RGB: walk it in the order it lies in memory, three times faster.
        image, inner = image[..., ::-1], inner[::-1]
    if image.shape[:2] == (height, width):
        _scale(image, inner)
    elif resample == 'bilinear':
        _bilinear(image, inner)
    else:
        _scale(_triangle(image, height, width), inner)
    if table is not None:
        black, white = table[:, 0, None, None], table[:, -1, None, None]
        picture *= (white - black) / _TWO
        picture += (white + black) / _TWO
    return out


def _picture(height: int, width: int, out: np.ndarray | None) -> np.ndarray:
    if height < 1 or width < 1:
        raise ValueError(f'image size must be at least 1 pixel, got {height}x{width}')
    if out is None:
        return np.empty((3, height, width), dtype=np.float32)
    if out.shape != (3, height, width) or out.dtype != np.float32:
        raise ValueError(
            f'out must be float32 of shape (3, {height}, {width}), got {out.dtype} of shape '
            f'{out.shape}'
        )
    return out


def check_image(image: np.ndarray) -> None:
    """Refuse anything but a uint8 RGB image (ValueError): no other function here looks again."""
    if not isinstance(image, np.ndarray):
        raise ValueError(f'image must be a numpy array, got {type(image).__name__}')
    if image.dtype != np.uint8:
        raise ValueError(
            f'image must be uint8 with values 0 to 255, got {image.dtype} of shape {image.shape}'
        )
    if image.ndim != 3 or image.shape[2] != 3:
        hint = ''
        if image.ndim == 3 and image.shape[0] == 3:
            hint = '; channels come last here: transpose it with image.transpose(1, 2, 0)'
        elif image.ndim == 3 and image.shape[2] in (1, 4):
            hint = '; convert it to RGB first'
        raise ValueError(
            f'image must have shape (height, width, 3) in RGB, got {image.shape}{hint}'
        )
    if image.size == 0:
        raise ValueError(f'image is empty: its shape is {image.shape}')


def _resized(height: int, width: int, high: int, wide: int) -> tuple[int, int]:
    """Sides after resizing; truncated in float64, as the checkpoints saw them."""
    ratio = max(width / wide, height / high)
    resized = int(height / ratio), int(width / ratio)
    if min(resized) < 1:
        raise ValueError(
            f'image of {height}x{width} (height x width) is too narrow: resized to fit '
            f'{high}x{wide} it would be {resized[0]}x{resized[1]}'
        )
    return resized


def _offsets(spare_height: int, spare_width: int, padding: ImagePadding) -> tuple[int, int]:
    check_word('image padding', padding, ImagePadding)
    if padding == 'centre':
        return spare_height // 2, spare_width // 2
    return spare_height, spare_width


def _scale(image: np.ndarray, out: np.ndarray) -> None:
    """(h, w, 3) uint8 into (3, h, w) float32: x / 255 * 2 - 1."""
    np.divide(image.transpose(2, 0, 1), _WHITE, out=out)
    out *= _TWO
    out -= _ONE


def _triangle(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize (h, w, 3) uint8 as Pillow's BILINEAR before release 13, bit for bit: rows first."""
    columns = _transposed(np.ascontiguousarray(image), 'columns')
    narrow = _filter(columns, width, 'narrow').reshape(width, image.shape[0], 3)
    rows = _transposed(narrow, 'rows')
    return _filter(rows, height, 'result').reshape(height, width, 3)


class _Scratch(threading.local):
    """Arrays that a thread keeps: new pages for each image cost more than the filter."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """Return the array of this name, not cleared; valid until the next `take` of the name."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = np.empty(size, dtype=np.uint8)
        return buffer[:size].view(dtype).reshape(shape)


_SCRATCH = _Scratch()


def _transposed(image: np.ndarray, name: str) -> np.ndarray:
    height, width, channels = image.shape
    out = _SCRATCH.take(name, (width, height, channels), np.uint8)
    return cv2.transpose(image, dst=out).reshape(width, -1)


def _filter(lines: np.ndarray, target: int, name: str) -> np.ndarray:
    """(n, m) uint8 to (target, m) uint8: each line of the result a weighted mean of neighbours."""
    if len(lines) == target:
        return lines
    out = _SCRATCH.take(name, (target, lines.shape[1]), np.uint8)
    groups = _triangle_groups(len(lines), target)
    longest = max(group.stop - group.start for group in groups)
    read = _SCRATCH.take('read', (longest, lines.shape[1]), np.float64)
    means = _SCRATCH.take('means', (_GROUP_LINES, lines.shape[1]), np.float64)
    for group in groups:
        part = read[: group.stop - group.start]
        np.copyto(part, lines[group.start : group.stop])
        # Exact, in whatever order the sums are made: 30 bits of the 53.
        mean = np.matmul(group.weights, part, out=means[: len(group.weights)])
        mean += 0.5
        np.copyto(out[group.first : group.first + len(mean)], mean, casting='unsafe')
    return out


class _Group(NamedTuple):
    """Neighbouring lines of a result, and the lines `start` to `stop` that they are means of."""

    first: int
    start: int
    stop: int
    weights: np.ndarray


@lru_cache(maxsize=32)
def _triangle_groups(source: int, target: int) -> tuple[_Group, ...]:
    """Weights of a triangle as wide as the shrinking needs, in whole 2**-22 as Pillow has them."""
    scale = source / target
    reach = max(scale, 1.0)
    taps = []
    for index in range(target):
        centre = (index + 0.5) * scale
        start = max(int(centre - reach + 0.5), 0)
        stop = min(int(centre + reach + 0.5), source)
        triangle = [
            max(1.0 - abs((place - centre + 0.5) * (1.0 / reach)), 0.0)
            for place in range(start, stop)
        ]
        # `sum` compensates from Python 3.12 on; Pillow adds one by one.
        total = reduce(add, triangle)
        taps.append((start, [int(0.5 + weight / total * _ONE_WEIGHT) for weight in triangle]))
    groups = []
    for first in range(0, target, _GROUP_LINES):
        part = taps[first : first + _GROUP_LINES]
        low = min(start for start, _ in part)
        high = max(start + len(weights) for start, weights in part)
        matrix = np.zeros((len(part), high - low))
        for row, (start, weights) in zip(matrix, part, strict=True):
            row[start - low : start - low + len(weights)] = weights
        groups.append(_Group(first, low, high, matrix / _ONE_WEIGHT))
    return tuple(groups)


def _bilinear(image: np.ndarray, out: np.ndarray) -> None:
    """Resize (h, w, 3) uint8 into (3, height, width) float32, four taps a pixel.

    Not cv2.resize: its sample positions differ from torch's in the last float32 bits, which on
    sharp edges is 1e-4 in the result.
    """
    _, height, width = out.shape
    above, below, weight_below = bilinear_taps(image.shape[0], height)
    before, after, weight_after = _planar_taps(image.shape[1], width)
    weight_below = weight_below[:, None]

    def between_columns(rows: np.ndarray) -> np.ndarray:
        pixels = image[rows].reshape(len(rows), -1)
        return _mix(
            np.take(pixels, before, axis=1, mode='clip') / _WHITE,
            np.take(pixels, after, axis=1, mode='clip') / _WHITE,
            weight_after,
        )

    for start in range(0, height, _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        mixed = _mix(
            between_columns(above[block]), between_columns(below[block]), weight_below[block]
        )
        np.clip(mixed, 0.0, 1.0, out=mixed)
        mixed *= _TWO
        mixed -= _ONE
        out[:, block] = mixed.reshape(-1, 3, width).transpose(1, 0, 2)


def _mix(first: np.ndarray, second: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """(1 - weight) * first + weight * second, overwriting both."""
    first *= _ONE - weight
    second *= weight
    first += second
    return first


@lru_cache(maxsize=32)
def _planar_taps(source: int, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`bilinear_taps` within a row of pixels, by channel first, so that the result is planar."""
    lower, upper, weight = bilinear_taps(source, target)
    channel = np.arange(3)[:, None]
    return (lower * 3 + channel).ravel(), (upper * 3 + channel).ravel(), np.tile(weight, 3)
