"""Images stretched to a square: LeRobot's pixels of Evo-1, and PyTorch's of uint8 images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evo1_cases import load_evo1_case
from network_cases import each_entry

from vla_runtime.processing.normalization import Normalizer
from vla_runtime.processing.plain_images import normalised_table, stretched, to_plain_pixels

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def table() -> np.ndarray:
    statistics = {'mean': np.array(MEAN), 'std': np.array(STD)}
    return normalised_table(Normalizer('mean_std_lerobot', statistics, ('red', 'green', 'blue')))


@pytest.mark.cases
@each_entry('evo1')
def test_pixels_equal_the_reference(path, b):
    case = load_evo1_case(path, b)
    size = (case.network.dims.image_size,) * 2
    compared = 0
    for i in np.flatnonzero(case.image_mask.numpy()):
        name = f'raw_image_{i}'
        if name not in case.tensors:
            continue
        raw = (case.of(name).numpy() * np.float32(255)).astype(np.uint8).transpose(1, 2, 0)
        out = np.empty((3, *size), dtype=np.float32)
        to_plain_pixels(stretched(raw, size, 'bicubic'), table(), out)
        np.testing.assert_allclose(out, case.pixels[i].numpy(), rtol=0, atol=1e-5)
        compared += 1
    assert compared


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
def test_every_grey_level_equals_pytorch_s_of_uint8(size, target):
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (*size, 3), dtype=np.uint8)
    # Black and white beside each other: the cubic overshoots and is cut.
    image[: size[0] // 2] = np.where(image[: size[0] // 2] > 127, 255, 0)
    expected = torch_bicubic(image, *target)
    np.testing.assert_array_equal(stretched(image, target, 'bicubic_uint8'), expected)
    # Any strides, as a bgr8 message has.
    turned = stretched(image[..., ::-1], target, 'bicubic_uint8')
    np.testing.assert_array_equal(turned, expected[..., ::-1])


@pytest.mark.parametrize('resample', ['bicubic', 'bicubic_uint8'])
def test_an_image_of_the_size_is_left_alone_and_a_flat_one_stays_flat(resample):
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert stretched(image, (5, 7), resample) is image
    flat = np.full((480, 640, 3), 77, dtype=np.uint8)
    assert (stretched(flat, (448, 448), resample) == 77).all()
    assert (stretched(flat[:20, :20], (448, 448), resample) == 77).all()


def test_a_mirrored_image_gives_the_mirrored_result():
    image = np.random.default_rng(0).integers(0, 256, (33, 50, 3), dtype=np.uint8)
    for axis in (0, 1):
        turned = np.flip(stretched(np.flip(image, axis), (14, 28), 'bicubic'), axis)
        assert np.abs(turned.astype(int) - stretched(image, (14, 28), 'bicubic')).max() <= 1


def test_a_word_of_another_kind_is_refused():
    with pytest.raises(ValueError, match='bicubic_uint8'):
        stretched(np.zeros((4, 4, 3), np.uint8), (8, 8), 'bilinear')
