"""Images to pixels: reference cases, torch as oracle, and the promises about memory and errors."""

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from reference_cases import find
from safetensors.numpy import load_file
from thorough import examples

from vla_runtime.processing.images import black_pixels, check_image, to_pixels


def _noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def _sides(height: int, width: int, size: int) -> tuple[int, int]:
    ratio = max(width / size, height / size)
    return int(height / ratio), int(width / ratio)


def _torch_bilinear(image: np.ndarray, size: int, padding: str) -> np.ndarray:
    planes = torch.from_numpy(image).permute(2, 0, 1)[None].contiguous().float() / 255
    height, width = _sides(*image.shape[:2], size)
    resized = torch.nn.functional.interpolate(
        planes, size=(height, width), mode='bilinear', align_corners=False
    ).clamp(0, 1)
    rows, columns = size - height, size - width
    if padding == 'centre':
        margins = (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)
    else:
        margins = (columns, 0, rows, 0)
    return (torch.nn.functional.pad(resized, margins)[0] * 2 - 1).numpy()


@pytest.mark.cases
@pytest.mark.parametrize('case', find('processing_*.safetensors'), ids=lambda path: path.stem)
def test_reference_images_are_reproduced(case):
    tensors = load_file(case)
    inputs = [name for name in tensors if re.fullmatch(r'in_\d+x\d+_\d+', name)]
    assert inputs
    for name in inputs:
        key, size = name.removeprefix('in_'), int(name.rsplit('_', 1)[1])
        centred = to_pixels(tensors[name], size, padding='centre', resample='bilinear')
        np.testing.assert_allclose(centred, tensors[f'centred_{key}'], rtol=0, atol=1e-5)
        left_top = to_pixels(tensors[name], size, padding='left_top', resample='bilinear')
        expected = tensors[f'lefttop_{key}'] * 2 - 1
        np.testing.assert_allclose(left_top, expected, rtol=0, atol=1e-5)


@given(
    height=st.integers(1, 200),
    width=st.integers(1, 200),
    size=st.integers(1, 96),
    padding=st.sampled_from(['centre', 'left_top']),
    seed=st.integers(0, 2**16),
)
@example(height=480, width=640, size=224, padding='centre', seed=0)
@example(height=1080, width=1920, size=224, padding='centre', seed=0)
@example(height=1920, width=1080, size=448, padding='left_top', seed=0)
@example(height=32, width=32, size=32, padding='centre', seed=0)
def test_bilinear_equals_torch_for_any_size(height, width, size, padding, seed):
    if min(_sides(height, width, size)) < 1:
        return
    image = _noise(height, width, seed)
    pixels = to_pixels(image, size, padding=padding, resample='bilinear')
    np.testing.assert_allclose(pixels, _torch_bilinear(image, size, padding), rtol=0, atol=1e-5)


@examples(60)
@given(
    height=st.integers(1, 400),
    width=st.integers(1, 400),
    size=st.integers(1, 160),
    seed=st.integers(0, 2**16),
)
@example(height=480, width=640, size=224, seed=0)
@example(height=720, width=1280, size=224, seed=0)
@example(height=1920, width=1080, size=448, seed=0)
@example(height=223, width=224, size=224, seed=0)
@example(height=30, width=41, size=384, seed=0)
@example(height=32, width=32, size=32, seed=0)
def test_antialias_equals_pillow_bit_for_bit(height, width, size, seed):
    sides = _sides(height, width, size)
    if min(sides) < 1:
        return
    image = _noise(height, width, seed)
    # Extremes too, where a rounding that went over would show.
    image[image > 200], image[image < 50] = 255, 0
    pixels = to_pixels(image, size, padding='left_top', resample='antialias')
    # One pass a call: which of two comes first depends on Pillow's version.
    narrow = Image.fromarray(image).resize((sides[1], height), resample=Image.BILINEAR)
    picture = narrow.resize(sides[::-1], resample=Image.BILINEAR)
    expected = np.asarray(picture).transpose(2, 0, 1).astype(np.float32) / np.float32(255) * 2 - 1
    np.testing.assert_array_equal(pixels[:, size - sides[0] :, size - sides[1] :], expected)


@pytest.mark.parametrize(('height', 'width'), [(480, 640), (720, 1280), (240, 424)])
def test_antialias_of_a_camera_equals_pillows_own_call(height, width):
    image, sides = _noise(height, width), _sides(height, width, 224)
    pixels = to_pixels(image, 224, padding='left_top', resample='antialias')
    picture = Image.fromarray(image).resize(sides[::-1], resample=Image.BILINEAR)
    grey = np.rint((pixels[:, 224 - sides[0] :] + 1) * 127.5)
    np.testing.assert_array_equal(grey, np.asarray(picture).transpose(2, 0, 1))


@pytest.mark.parametrize('resample', ['bilinear', 'antialias'])
@pytest.mark.parametrize(
    ('height', 'width', 'padding', 'top', 'bottom', 'left', 'right'),
    [
        (10, 20, 'centre', 5, 5, 0, 0),
        (11, 20, 'centre', 4, 5, 0, 0),
        (20, 11, 'centre', 0, 0, 4, 5),
        (11, 20, 'left_top', 9, 0, 0, 0),
        (20, 11, 'left_top', 0, 0, 9, 0),
    ],
)
def test_padding_is_black_and_in_its_place(
    resample, height, width, padding, top, bottom, left, right
):
    white = np.full((height, width, 3), 255, dtype=np.uint8)
    pixels = to_pixels(white, 20, padding=padding, resample=resample)
    expected = np.full((3, 20, 20), -1.0, dtype=np.float32)
    expected[:, top : 20 - bottom, left : 20 - right] = 1.0
    np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize('resample', ['bilinear', 'antialias'])
@pytest.mark.parametrize(('height', 'width'), [(60, 90), (48, 48)])
def test_strided_and_read_only_views_give_the_same_pixels(resample, height, width):
    image = _noise(height, width)
    expected = to_pixels(image, 48, padding='centre', resample=resample)
    # A bgr8 message seen as RGB, and a message whose row step is wider than its width.
    bgr = np.ascontiguousarray(image[..., ::-1])[..., ::-1]
    padded_rows = np.zeros((height, width + 5, 3), dtype=np.uint8)
    padded_rows[:, :width] = image
    for view in (bgr, padded_rows[:, :width]):
        view.flags.writeable = False
        before = view.copy()
        np.testing.assert_array_equal(
            to_pixels(view, 48, padding='centre', resample=resample), expected
        )
        np.testing.assert_array_equal(view, before)


def test_out_is_filled_completely_and_returned_and_may_be_one_camera_of_a_buffer():
    buffer = np.full((2, 3, 56, 56), np.nan, dtype=np.float32)
    out = buffer[1]
    for seed, (height, width) in enumerate([(96, 128), (128, 96), (56, 56)]):
        image = _noise(height, width, seed)
        result = to_pixels(image, 56, padding='centre', resample='bilinear', out=out)
        assert result is out and np.isnan(buffer[0]).all()
        fresh = to_pixels(image, 56, padding='centre', resample='bilinear')
        np.testing.assert_array_equal(out, fresh)


@pytest.mark.parametrize(
    ('image', 'words'),
    [
        (np.zeros((4, 4, 3), np.float32), ['uint8', 'float32', '(4, 4, 3)']),
        (np.zeros((4, 4, 3), bool), ['uint8', 'bool']),
        (np.zeros((4, 4), np.uint8), ['(height, width, 3)', '(4, 4)']),
        (np.zeros((1, 4, 4, 3), np.uint8), ['(1, 4, 4, 3)']),
        (np.zeros((3, 4, 5), np.uint8), ['(3, 4, 5)', 'transpose']),
        (np.zeros((4, 4, 4), np.uint8), ['(4, 4, 4)', 'RGB']),
        (np.zeros((4, 4, 1), np.uint8), ['(4, 4, 1)', 'RGB']),
        (np.zeros((0, 4, 3), np.uint8), ['empty', '(0, 4, 3)']),
        ([[1, 2, 3]], ['numpy array', 'list']),
    ],
)
def test_bad_image_is_an_error_that_says_what_came(image, words):
    with pytest.raises(ValueError) as error:
        check_image(image)
    for word in words:
        assert word in str(error.value)


def test_an_image_that_shrinks_to_nothing_is_refused():
    with pytest.raises(ValueError, match='1x900'):
        to_pixels(np.zeros((1, 900, 3), np.uint8), 28, padding='centre', resample='bilinear')


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        ({'padding': 'right'}, ['image padding', 'right', 'left_top']),
        ({'resample': 'cubic'}, ['image resample', 'cubic', 'antialias']),
        ({'size': 0}, ['at least 1', '0']),
        ({'out': np.zeros((3, 8, 8))}, ['float32', 'float64']),
        ({'out': np.zeros((3, 9, 8), np.float32)}, ['(3, 8, 8)', '(3, 9, 8)']),
    ],
)
def test_bad_argument_is_an_error_that_says_what_came(arguments, words):
    arguments = {'size': 8, 'padding': 'centre', 'resample': 'bilinear', **arguments}
    with pytest.raises(ValueError) as error:
        to_pixels(_noise(9, 9), **arguments)
    for word in words:
        assert word in str(error.value)


def test_absent_camera_is_black():
    pixels = black_pixels(28, 28)
    assert pixels.shape == (3, 28, 28) and pixels.dtype == np.float32
    assert (pixels == -1).all()
    dark = to_pixels(np.zeros((28, 28, 3), np.uint8), 28, padding='centre', resample='bilinear')
    np.testing.assert_array_equal(pixels, dark)


def test_threads_do_not_disturb_each_other():
    random = np.random.default_rng(3)
    images = [random.integers(0, 256, (90 + i, 120, 3), dtype=np.uint8) for i in range(8)]

    def pixels(image):
        return to_pixels(image, 56, padding='centre', resample='antialias')

    alone = [pixels(image) for image in images]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for one, other in zip(alone, pool.map(pixels, images), strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ('padding', 'rows'), [('centre', [*range(7), *range(21, 28)]), ('left_top', range(14))]
)
def test_bars_have_the_pixels_that_are_asked_for_and_the_picture_its_own(padding, rows):
    image = _noise(20, 40)
    black = to_pixels(image, 28, padding=padding, resample='bilinear')
    barred = to_pixels(image, 28, padding=padding, resample='bilinear', bars=-3.0)
    bars = np.zeros(28, bool)
    bars[list(rows)] = True
    assert (barred[:, bars] == -3.0).all() and (black[:, bars] == -1.0).all()
    np.testing.assert_array_equal(barred[:, ~bars], black[:, ~bars])


@pytest.mark.parametrize(('height', 'width'), [(48, 80), (90, 50), (40, 60), (33, 77)])
def test_normalised_images_are_padded_in_their_own_scale_to_any_shape(height, width):
    """As X-VLA's training: channels are normalised, then resized, then filled with zeros."""
    image = _noise(height, width)
    mean, std = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
    levels = np.arange(256, dtype=np.float32) / np.float32(255)
    table = (levels - mean[:, None]) / std[:, None]
    found = to_pixels(
        image, (40, 60), padding='left_top', resample='bilinear', bars=0.0, table=table
    )
    normalised = torch.from_numpy((image / np.float32(255) - mean) / std).permute(2, 0, 1)[None]
    ratio = max(width / 60, height / 40)
    sides = int(height / ratio), int(width / ratio)
    expected = torch.zeros(3, 40, 60)
    expected[:, 40 - sides[0] :, 60 - sides[1] :] = torch.nn.functional.interpolate(
        normalised, size=sides, mode='bilinear', align_corners=False
    )[0]
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=3e-6)
