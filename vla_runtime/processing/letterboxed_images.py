"""Camera images padded to a square before they are resized, as OpenVLA's class does by default.

Its `letterbox_pad_transform` and torchvision's `Resize` and `CenterCrop` on Pillow images.
"""

from __future__ import annotations

import numpy as np

from vla_runtime.processing.stretched_images import stretched


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
        (S, S, 3) uint8
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
