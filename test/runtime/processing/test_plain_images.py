"""Images at their own size: every grey level as the training code computes it."""

from __future__ import annotations

import numpy as np
import pytest

from vla_runtime.processing.normalization import Normalizer
from vla_runtime.processing.plain_images import (
    check_size,
    levels_per_unit,
    normalised_table,
    signed_table,
    to_plain_pixels,
)

# ImageNet's, as every ACT folder of LeRobot has them.
STATISTICS = {
    'mean': np.array([0.485, 0.456, 0.406], np.float32),
    'std': np.array([0.229, 0.224, 0.225], np.float32),
}


def an_image(height: int = 5, width: int = 7) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def converted(image: np.ndarray, table: np.ndarray) -> np.ndarray:
    size = image.shape[:2]
    return to_plain_pixels(image, table, np.empty((3, *size), np.float32))


@pytest.mark.parametrize('strides', [slice(None), slice(None, None, -1)])
def test_normalised_pixels_equal_the_formula_to_the_bit(strides: slice) -> None:
    image = an_image()[..., strides]
    table = normalised_table(Normalizer('mean_std_lerobot', STATISTICS))
    scaled = image.astype(np.float32) / np.float32(255)
    expected = (scaled - STATISTICS['mean']) / (STATISTICS['std'] + np.float32(1e-8))
    np.testing.assert_array_equal(converted(image, table), expected.transpose(2, 0, 1))


def test_signed_pixels_span_minus_one_to_one() -> None:
    table = signed_table()
    assert (table[:, 0] == -1).all() and (table[:, 255] == 1).all()
    image = an_image()
    expected = image.astype(np.float32) / np.float32(255) * np.float32(2) - np.float32(1)
    np.testing.assert_array_equal(converted(image, table), expected.transpose(2, 0, 1))


def test_a_unit_is_as_many_grey_levels_as_the_statistics_say() -> None:
    table = normalised_table(Normalizer('mean_std_lerobot', STATISTICS))
    np.testing.assert_allclose(levels_per_unit(table), 255 * STATISTICS['std'], rtol=1e-5)
    np.testing.assert_allclose(levels_per_unit(signed_table()), 127.5, rtol=1e-6)


def test_a_channel_without_range_has_no_grey_levels() -> None:
    assert levels_per_unit(np.zeros((3, 256), np.float32)).tolist() == [0.0, 0.0, 0.0]


def test_an_image_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match='5x7'):
        check_size(an_image(4, 7), (5, 7))
