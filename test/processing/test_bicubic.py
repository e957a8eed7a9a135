"""Bicubic resizing with antialiasing: equal to PyTorch's on uint8, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vla_runtime.processing.bicubic import bicubic
from vla_runtime.processing.images import to_pixels


def torch_bicubic(image: np.ndarray, height: int, width: int) -> np.ndarray:
    channels = torch.from_numpy(image).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(
        channels.contiguous(memory_format=torch.channels_last),
        size=(height, width),
        mode='bicubic',
        antialias=True,
        align_corners=False,
    )
    return resized[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize(
    ('size', 'target'),
    [
        ((480, 640), (224, 224)),
        ((60, 84), (56, 56)),
        ((31, 200), (64, 64)),
        ((20, 20), (56, 56)),
        ((721, 333), (28, 28)),
        ((56, 84), (56, 56)),
        ((3, 5), (7, 2)),
    ],
)
def test_every_pixel_equals_pytorch_s(size, target):
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (*size, 3), dtype=np.uint8)
    # Black and white beside each other: the cubic overshoots and is cut.
    image[: size[0] // 2] = np.where(image[: size[0] // 2] > 127, 255, 0)
    np.testing.assert_array_equal(bicubic(image, *target), torch_bicubic(image, *target))


def test_a_stretched_image_fills_the_square():
    image = np.full((40, 80, 3), 255, dtype=np.uint8)
    pixels = to_pixels(image, 28, padding='stretch', resample='bicubic')
    assert pixels.shape == (3, 28, 28)
    np.testing.assert_array_equal(pixels, 1.0)
    reversed_channels = to_pixels(image[..., ::-1], 28, padding='stretch', resample='bicubic')
    np.testing.assert_array_equal(reversed_channels, pixels)
