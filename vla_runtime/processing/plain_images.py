"""Camera images that go in at their own size: each grey level of a channel to the network's scale.

A table holds the training code's own formula on x / 255 in float32 for each of 256 grey levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial

import cv2
import numpy as np

from vla_runtime.processing.normalization import Normalizer
from vla_runtime.processing.words import check_word
from vla_runtime.types import CroppedResample, LastResample, StretchedResample

# Camera images stretched to the network's size, or padded to a square before as Prismatic's
# `letterbox_pad_transform` does by default, with torchvision's `Resize` and `CenterCrop` on Pillow.

# Keys' cubic kernel (1981) with the coefficient of Pillow and of antialiased PyTorch.
_SHARPNESS = -0.5
# Pixels to each side that a kernel reads of an image which does not shrink.
_REACH: Mapping[str, float] = {'bicubic': 2.0, 'bilinear': 1.0, 'lanczos': 3.0}
# Weights as whole numbers fit int16 after they are multiplied by at most this power of two.
_MOST_BITS = 22
_LARGEST = 1 << 15


def stretched(
    image: np.ndarray,
    size: tuple[int, int],
    resample: StretchedResample | CroppedResample | LastResample,
) -> np.ndarray:
    """Resize an image with an antialiased filter, columns first, then rows.

    Args:
        image: (h, w, 3) uint8, RGB, any strides; never written to.
        size: height and width of the result.
        resample: `bicubic` sums in float, and clamps and rounds to grey levels once, at the end, as
            torchvision's first transforms do. Sums are float64 here, so a level may differ where
            their float32 lies on the edge of two. `bicubic_uint8` has weights of 16 bits, and
            clamps and rounds after the columns and after the rows, as torchvision's transforms v2
            do with uint8 images on a CPU; no level differs. `bilinear_uint8` is the same with the
            two nearest lines. `bicubic_pillow` has weights of 22 bits, as Pillow; no level differs.
            `lanczos` is as `bicubic` with six lines, as TensorFlow's `lanczos3`.

    Returns:
        (height, width, 3) uint8; `image` itself where it has that size.

    Raises:
        ValueError: an unknown word for resample.
    """
    if resample not in _FILTERS:
        check_word('image resample', resample, StretchedResample)
    height, width = size
    if image.shape[:2] == size:
        return image
    filtered = _FILTERS[resample]
    across = filtered(image.transpose(1, 0, 2), width)
    return _levels(filtered(across.transpose(1, 0, 2), height))


def stretched_levels(
    image: np.ndarray, size: tuple[int, int], averaged: tuple[int, int] | None = None
) -> np.ndarray:
    """Resize an image as `bicubic` does, and neither clamp nor round.

    Args:
        image, size: as of `stretched`.
        averaged: height and width that areas are averaged to before, as PyTorch's `area` does;
            None: they are not.

    Returns:
        (height, width, 3) float64, grey levels.
    """
    levels: np.ndarray = image
    if averaged is not None:
        across = _averaged(levels.transpose(1, 0, 2), averaged[1])
        levels = _averaged(across.transpose(1, 0, 2), averaged[0])
    across = _filtered(levels.transpose(1, 0, 2), size[1])
    return _filtered(across.transpose(1, 0, 2), size[0])


def _averaged(lines: np.ndarray, target: int) -> np.ndarray:
    """(n, m, 3) to (target, m, 3) float64: each line the mean of those that it covers in part."""
    if len(lines) == target:
        return lines.astype(np.float64)
    places = np.arange(target)
    start, stop = places * len(lines) // target, -((places + 1) * -len(lines) // target)
    sums = np.cumsum(np.concatenate([np.zeros((1, *lines.shape[1:])), lines]), axis=0)
    means: np.ndarray = (sums[stop] - sums[start]) / (stop - start)[:, None, None]
    return means


def to_levels(levels: np.ndarray, table: np.ndarray, out: np.ndarray) -> None:
    """Write grey levels (height, width, 3) on the straight line of a table (3, 256) to `out`."""
    black, white = (table[:, end, None, None].astype(np.float64) for end in (0, -1))
    out[:] = black + levels.transpose(2, 0, 1) * ((white - black) / 255.0)


def _levels(values: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(values, 0.0, 255.0)).astype(np.uint8)


def _filtered(lines: np.ndarray, target: int, kernel: str = 'bicubic') -> np.ndarray:
    """(n, m, 3) to (target, m, 3) float64: each line a weighted mean of neighbours."""
    if len(lines) == target:
        return lines.astype(np.float64)
    return _sums(lines, *_taps(len(lines), target, kernel))


def _filtered_levels(
    lines: np.ndarray, target: int, kernel: str = 'bicubic', bits: int | None = None
) -> np.ndarray:
    """(n, m, 3) uint8 to (target, m, 3) uint8, with whole-number weights; halves round up."""
    if len(lines) == target:
        return lines
    places, weights, unit = _whole_taps(len(lines), target, kernel, bits)
    # Exact in float64: 22 bits of weight times 8 of pixel, a few hundred times.
    return _levels(np.floor(_sums(lines, places, weights) / unit + 0.5))


_FILTERS: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = {
    'bicubic': _filtered,
    'bicubic_uint8': _filtered_levels,
    'bicubic_pillow': partial(_filtered_levels, bits=_MOST_BITS),
    'bilinear_uint8': partial(_filtered_levels, kernel='bilinear'),
    'lanczos': partial(_filtered, kernel='lanczos'),
}


def _sums(lines: np.ndarray, places: np.ndarray, weights: np.ndarray) -> np.ndarray:
    out = np.zeros((len(places), *lines.shape[1:]))
    for place, weight in zip(places.T, weights.T, strict=True):
        out += weight[:, None, None] * lines[place]
    return out


@lru_cache(maxsize=32)
def _whole_taps(
    source: int, target: int, kernel: str, bits: int | None
) -> tuple[np.ndarray, np.ndarray, float]:
    """Neighbours, whole-number weights, and what stands for 1, of `bits` or what fits int16."""
    places, exact = _taps(source, target, kernel)
    unit = 2.0 ** (_bits(float(exact.max())) if bits is None else bits)
    return places, np.trunc(exact * unit + np.copysign(0.5, exact)), unit


def _bits(largest: float) -> int:
    """Largest shift with which the largest weight fits int16."""
    bits = 0
    while bits < _MOST_BITS and math.floor(0.5 + largest * 2 ** (bits + 1)) < _LARGEST:
        bits += 1
    return bits


@lru_cache(maxsize=32)
def _taps(source: int, target: int, kernel: str = 'bicubic') -> tuple[np.ndarray, np.ndarray]:
    """Neighbours of each line of the result and their weights, (target, taps) each."""
    scale = source / target
    stretch = max(scale, 1.0)
    reach = _REACH[kernel] * stretch
    centres = (np.arange(target) + 0.5) * scale
    first = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    stop = np.minimum((centres + reach + 0.5).astype(np.int64), source)
    places = first[:, None] + np.arange((stop - first).max())
    distances = (places + 0.5 - centres[:, None]) / stretch
    weights = _KERNELS[kernel](distances)
    weights = np.where(places < stop[:, None], weights, 0.0)
    return np.minimum(places, source - 1), weights / weights.sum(axis=1, keepdims=True)


def _cubic(x: np.ndarray) -> np.ndarray:
    x, a = np.abs(x), _SHARPNESS
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < _REACH['lanczos'], np.sinc(x) * np.sinc(x / _REACH['lanczos']), 0.0)


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1.0 - np.abs(x), 0.0)


_KERNELS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    'bicubic': _cubic,
    'bilinear': _triangle,
    'lanczos': _lanczos,
}


def letterboxed(image: np.ndarray, size: int, fill: tuple[int, int, int]) -> np.ndarray:
    """Pad an image to a square, resize it and cut out its middle.

    Half of the difference of the sides, rounded down, is put on both sides of the shorter one: an
    odd difference leaves the image a pixel off square. The shorter side then becomes `size`, and
    the longer one is cut.

    Args:
        image: (h, w, 3) uint8, RGB, any strides; never written to.
        size: S, side of the square in pixels.
        fill: grey levels of the border, by colour channel.

    Returns:
        (S, S, 3) uint8.
    """
    height, width = image.shape[:2]
    longer = max(height, width)
    above, left = (longer - height) // 2, (longer - width) // 2
    square = np.empty((height + 2 * above, width + 2 * left, 3), dtype=np.uint8)
    square[:] = fill
    square[above : above + height, left : left + width] = image
    shorter = min(square.shape[:2])
    high, wide = (
        size if side == shorter else int(size * side / shorter) for side in square.shape[:2]
    )
    resized = stretched(square, (high, wide), 'bicubic_pillow')
    # Python's own rounding, half to even, as torchvision's.
    top, start = round((high - size) / 2), round((wide - size) / 2)
    return resized[top : top + size, start : start + size]


# Camera images whose middle the policy sees: resized, cut, and resized again.

# A side of 3 tokens or more changes by less when it is rounded to whole tokens.
_ASPECT_SLACK = 0.2


def cropped(
    image: np.ndarray,
    size: tuple[int, int],
    *,
    edge: int,
    fraction: float,
    resample: CroppedResample,
    fraction_across: float | None = None,
    cut: tuple[int, int] | None = None,
    last: LastResample = 'bicubic_uint8',
    letterbox: bool = False,
) -> np.ndarray:
    """Cut the middle of an image and resize it to the network's size.

    Args:
        image: (h, w, 3) uint8, RGB, any strides; never written to.
        size: height and width of the result.
        edge: edge of the image before it is cut, in pixels.
        fraction: share of height and width that is kept.
        resample: `bicubic_uint8` stretches the image to a square of `edge` and what is cut to
            `size` (LeRobot's way); `bilinear_uint8` stretches the image to `cut` before and after
            (torchvision's transforms as NVIDIA puts them together); `area` keeps the aspect: the
            shorter edge becomes `edge` before and after, both with OpenCV's INTER_AREA, and the
            result is stretched to `size` (albumentations' way); `lanczos` stretches the image to a
            square of `edge`, and takes `size` points of its middle (OFT's way, arXiv 2502.19645).
        fraction_across: share of the width that is kept, where it is another one.
        cut: height and width after the cut, before it is stretched to `size`; None: `size`.
        last: filter of the last resize, to `size`.
        letterbox: black bars make the image a square first; of an odd number of lines the larger
            half is below or on the right.

    Returns:
        (height, width, 3) uint8.

    Raises:
        ValueError: with `area`, an image of an aspect that `size` was not made for.
    """
    if letterbox:
        image = _squared(image)
    if resample == 'lanczos':
        return _points_of_middle(stretched(image, (edge, edge), resample), size, fraction)
    if resample != 'area':
        cut = cut or size
        whole = (edge, edge) if resample == 'bicubic_uint8' else cut
        # Python's round, to even.
        shares = (fraction, fraction if fraction_across is None else fraction_across)
        height, width = (
            max(1, round(side * share)) for side, share in zip(whole, shares, strict=True)
        )
        place = round if resample == 'bilinear_uint8' else math.floor
        middle = _middle(stretched(image, whole, resample), (height, width), place)
        return stretched(stretched(middle, cut, resample), size, last)
    height, width = shortest_edge_size((image.shape[0], image.shape[1]), edge)
    # `size` is a multiple of the network's patches; half of one is the most that rounding takes.
    if abs(height / width - size[0] / size[1]) > _ASPECT_SLACK * height / width:
        raise ValueError(
            f'image of {image.shape[0]}x{image.shape[1]} (height x width) has another aspect than '
            f"the {size[0]}x{size[1]} of the network's, which keeps it; set the camera driver to "
            'the size of the training data'
        )
    resized = _area(image, edge)
    part = (max(1, int(height * fraction)), max(1, int(width * fraction)))
    return stretched(_area(_middle(resized, part), edge), size, last)


def shortest_edge_size(size: tuple[int, int], edge: int) -> tuple[int, int]:
    """Height and width after the shorter of both has become `edge`."""
    height, width = size
    if min(height, width) == edge:
        return size
    scale = edge / float(min(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def _squared(image: np.ndarray) -> np.ndarray:
    height, width = image.shape[:2]
    edge = max(height, width)
    top, left = (edge - height) // 2, (edge - width) // 2
    square = np.zeros((edge, edge, 3), dtype=np.uint8)
    square[top : top + height, left : left + width] = image
    return square


def _area(image: np.ndarray, edge: int) -> np.ndarray:
    size = shortest_edge_size((image.shape[0], image.shape[1]), edge)
    if size == image.shape[:2]:
        return image
    return cv2.resize(np.ascontiguousarray(image), (size[1], size[0]), interpolation=cv2.INTER_AREA)


def _middle(
    image: np.ndarray, size: tuple[int, int], place: Callable[[float], int] = math.floor
) -> np.ndarray:
    top, left = place((image.shape[0] - size[0]) / 2), place((image.shape[1] - size[1]) / 2)
    return image[top : top + size[0], left : left + size[1]]


def _points_of_middle(image: np.ndarray, size: tuple[int, int], fraction: float) -> np.ndarray:
    """Take points of the middle of an image, as TensorFlow's `crop_and_resize` does.

    The outer points lie on the edges of the cut; levels between two are rounded as its
    `convert_image_dtype` does: 255.5 times a share of 1, rounded down.
    """
    lines = _points(image.astype(np.float32) / np.float32(255.0), size[0], fraction)
    points = _points(lines.transpose(1, 0, 2), size[1], fraction).transpose(1, 0, 2)
    return np.clip(points * np.float32(255.5), 0.0, 255.0).astype(np.uint8)


def _points(lines: np.ndarray, count: int, fraction: float) -> np.ndarray:
    """(n, m, 3) to (count, m, 3): each a mean of the two nearest lines, by distance."""
    last = len(lines) - 1
    places = (0.5 - fraction / 2.0 + fraction * np.arange(count) / max(1, count - 1)) * last
    before = np.clip(np.floor(places), 0, last).astype(np.int64)
    share = (places - before).astype(np.float32)[:, None, None]
    return lines[before] * (1.0 - share) + lines[np.minimum(before + 1, last)] * share


def unit_levels() -> np.ndarray:
    """All grey levels as [0, 1], (256,) float32: x / 255."""
    return np.arange(256, dtype=np.float32) / np.float32(255.0)


def signed_table() -> np.ndarray:
    """Table of images in [-1, 1]: (3, 256) float32, x / 255 * 2 - 1."""
    return np.tile(unit_levels() * np.float32(2.0) - np.float32(1.0), (3, 1))


def normalised_table(normalizer: Normalizer) -> np.ndarray:
    """Table of a camera whose images are normalised from [0, 1], (3, 256) float32, by channel."""
    levels = np.repeat(unit_levels()[:, None], 3, axis=1)
    return np.ascontiguousarray(normalizer.normalise(levels).T)


def levels_per_unit(table: np.ndarray) -> np.ndarray:
    """Grey levels that one unit of the network's scale spans, (3,) float64, by channel."""
    span = np.abs(table[:, -1].astype(np.float64) - table[:, 0])
    # A channel without any range looks the same at every level.
    return np.where(span > 0, 255.0 / np.where(span > 0, span, 1.0), 0.0)


def check_size(image: np.ndarray, size: tuple[int, int]) -> None:
    """Refuse an image (height, width, 3) of another size: a ValueError names both."""
    if image.shape[:2] != size:
        raise ValueError(
            f'image of {image.shape[0]}x{image.shape[1]} (height x width) where '
            f'{size[0]}x{size[1]} is expected: the policy was trained on images of that size and '
            'nothing resizes them; set the camera driver to it'
        )


def to_plain_pixels(image: np.ndarray, table: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Look every pixel of an image up in a table; return `out`.

    Args:
        image: (height, width, 3) uint8, RGB, any strides; never written to.
        table: (3, 256) float32.
        out: (3, height, width) float32 to write into.
    """
    for channel in range(3):
        np.take(table[channel], image[..., channel], out=out[channel], mode='clip')
    return out
