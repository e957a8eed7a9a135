"""OpenVLA-OFT's images: TensorFlow's Lanczos resize, and points of the middle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from vla_runtime.processing.plain_images import cropped, stretched


def image_of(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize('size', [(48, 64), (300, 400), (20, 17)])
def test_the_resize_is_pillows_lanczos_within_a_level(size: tuple[int, int]):
    """Pillow rounds and clips between the axes, TensorFlow at the end."""
    # Grey levels that no overshoot takes beyond 0 or 255.
    image = image_of(*size) // 4 + 96
    found = stretched(image, (32, 32), 'lanczos').astype(int)
    meant = np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.LANCZOS))
    assert np.abs(found - meant).max() <= 1


@pytest.mark.parametrize('edge', [8, 33, 224])
def test_points_of_the_middle_are_crop_and_resizes(edge: int):
    """Corners of the cut are points, as with PyTorch's `align_corners`."""
    image, fraction = image_of(edge, edge), 0.9**0.5
    found = cropped(image, (edge, edge), edge=edge, fraction=fraction, resample='lanczos')
    line = torch.linspace(-fraction, fraction, edge)
    grid = torch.stack(torch.meshgrid(line, line, indexing='xy'), dim=-1)[None]
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255.0
    meant = torch.nn.functional.grid_sample(pixels, grid, align_corners=True)[0]
    levels = (meant.permute(1, 2, 0) * 255.5).floor().numpy().astype(int)
    assert np.abs(found.astype(int) - levels).max() <= 1
    assert (found != levels).mean() <= 0.001
