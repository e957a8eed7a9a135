"""Images stretched to a square, against the pixels of LeRobot's Evo-1."""

from __future__ import annotations

import numpy as np
import pytest
from evo1_cases import evo1_entries, load_evo1_case

from vla_runtime.processing.normalization import Normalizer
from vla_runtime.processing.plain_images import normalised_table, to_plain_pixels
from vla_runtime.processing.stretched_images import stretched

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def table() -> np.ndarray:
    statistics = {'mean': np.array(MEAN), 'std': np.array(STD)}
    return normalised_table(Normalizer('mean_std_lerobot', statistics, ('red', 'green', 'blue')))


@pytest.mark.cases
@pytest.mark.parametrize(
    ('path', 'b'), list(evo1_entries()), ids=lambda value: getattr(value, 'stem', value)
)
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
        to_plain_pixels(stretched(raw, size), size, table(), out)
        np.testing.assert_allclose(out, case.pixels[i].numpy(), rtol=0, atol=1e-5)
        compared += 1
    assert compared


def test_an_image_of_the_size_is_left_alone_and_a_flat_one_stays_flat():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert stretched(image, (5, 7)) is image
    flat = np.full((480, 640, 3), 77, dtype=np.uint8)
    assert (stretched(flat, (448, 448)) == 77).all()
    assert (stretched(flat[:20, :20], (448, 448)) == 77).all()


def test_a_mirrored_image_gives_the_mirrored_result():
    image = np.random.default_rng(0).integers(0, 256, (33, 50, 3), dtype=np.uint8)
    for axis in (0, 1):
        turned = np.flip(stretched(np.flip(image, axis), (14, 28)), axis)
        assert np.abs(turned.astype(int) - stretched(image, (14, 28))).max() <= 1


def test_an_image_of_another_kind_is_refused():
    with pytest.raises(ValueError, match='must be uint8'):
        stretched(np.zeros((4, 4, 3), np.float32), (8, 8))
