"""Images of GR00T N1.7, cut in the three ways that its folders ask for.

PyTorch's own resizing stands for torchvision's transforms, which are a call of it.
"""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch

from vla_runtime.processing.plain_images import cropped, stretched


def resized(image: torch.Tensor, size: tuple[int, int], mode: str) -> torch.Tensor:
    """(3, h, w) uint8 to (3, height, width) uint8."""
    return torch.nn.functional.interpolate(
        image[None].contiguous(memory_format=torch.channels_last),
        size=size,
        mode=mode,
        antialias=True,
        align_corners=False,
    )[0]


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)


def as_channels(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image).permute(2, 0, 1)


@pytest.mark.parametrize('size', [(60, 84), (480, 640), (33, 20)])
@pytest.mark.parametrize('target', [(48, 64), (31, 90)])
def test_bilinear_levels_are_pytorch_s(size, target):
    image = picture(*size)
    expected = resized(as_channels(image), target, 'bilinear').permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(stretched(image, target, 'bilinear_uint8'), expected)


@pytest.mark.parametrize('size', [(60, 84), (84, 60), (121, 121)])
@pytest.mark.parametrize(('target', 'kept'), [((48, 64), (44, 40)), ((40, 72), (39, 53))])
@pytest.mark.parametrize('network', [None, (32, 64)])
def test_nvidia_s_images_are_cut_by_their_own_number_a_side(size, target, kept, network):
    image = picture(*size)
    whole = resized(as_channels(image), target, 'bilinear')
    # torchvision's CenterCrop rounds the offset, halves to even.
    top, left = (round((side - part) / 2) for side, part in zip(target, kept, strict=True))
    middle = whole[:, top : top + kept[0], left : left + kept[1]]
    expected = resized(middle, target, 'bilinear')
    if network is not None:
        expected = resized(expected, network, 'bicubic')
    found = cropped(
        image,
        network or target,
        edge=target[0],
        fraction=kept[0] / target[0],
        fraction_across=kept[1] / target[1],
        cut=target,
        resample='bilinear_uint8',
    )
    np.testing.assert_array_equal(found, expected.permute(1, 2, 0).numpy())


@pytest.mark.parametrize('size', [(60, 84), (84, 60)])
@pytest.mark.parametrize(('target', 'kept'), [((48, 64), 44), ((40, 72), 37)])
@pytest.mark.parametrize('network', [None, (32, 64)])
def test_lerobot_s_images_are_cut_out_of_a_square_of_the_height(size, target, kept, network):
    image = picture(*size)
    square = resized(as_channels(image), (target[0],) * 2, 'bicubic')
    start = (target[0] - kept) // 2
    middle = square[:, start : start + kept, start : start + kept]
    expected = resized(middle, target, 'bicubic')
    if network is not None:
        expected = resized(expected, network, 'bicubic')
    found = cropped(
        image,
        network or target,
        edge=target[0],
        fraction=kept / target[0],
        cut=target,
        resample='bicubic_uint8',
    )
    np.testing.assert_array_equal(found, expected.permute(1, 2, 0).numpy())


@pytest.mark.parametrize('resample', ['area', 'bicubic_uint8', 'bilinear_uint8'])
@pytest.mark.parametrize('size', [(60, 85), (85, 60), (61, 61), (7, 90)])
def test_a_letterboxed_image_is_a_square_with_black_bars_before_it_is_cut(resample, size):
    image = picture(*size)
    down, across = (max(size) - side for side in size)
    # The training projects' own: cv2.copyMakeBorder, halves rounded down above and on the left.
    square = cv2.copyMakeBorder(
        image,
        down // 2,
        down - down // 2,
        across // 2,
        across - across // 2,
        cv2.BORDER_CONSTANT,
        value=0,
    )
    given = {'edge': 48, 'fraction': 0.95, 'resample': resample}
    expected = cropped(square, (48, 48), **given)
    np.testing.assert_array_equal(cropped(image, (48, 48), letterbox=True, **given), expected)
    if down or across:
        assert (expected[0] == 0).all() or (expected[:, 0] == 0).all()
