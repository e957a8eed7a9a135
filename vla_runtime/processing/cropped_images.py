"""Camera images whose middle the policy sees: resized, cut, and resized again."""

from __future__ import annotations

import math
from collections.abc import Callable

import cv2
import numpy as np

from vla_runtime.processing.stretched_images import stretched
from vla_runtime.types import CroppedResample, LastResample

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
        cut: height and width after the cut; the result is stretched to `size` from there. None:
            those of `size`.
        last: filter of the last resize, to `size`.
        letterbox: black bars make the image a square first; of an odd number of lines the larger
            half is below or on the right.

    Returns:
        (height, width, 3) uint8

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

    The first and the last point of each axis lie on the edges of the cut, and levels between two
    are rounded as its `convert_image_dtype` does: 255.5 times a share of 1, rounded down.
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
