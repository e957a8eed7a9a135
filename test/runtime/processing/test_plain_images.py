"""Images at the size a network wants: every grey level as the training code computes it."""

import json

import cv2
import numpy as np
import pytest
import torch
from evo1_cases import load_evo1_case
from network_cases import each_entry, network_case_paths
from PIL import Image
from safetensors.numpy import load_file

from vla_runtime.processing.normalization import Normalizer
from vla_runtime.processing.plain_images import (
    check_size,
    cropped,
    letterboxed,
    levels_per_unit,
    normalised_table,
    signed_table,
    stretched,
    stretched_levels,
    to_levels,
    to_plain_pixels,
)
from vla_runtime.processing.tokenizer import Tokenizer

# ImageNet's, as every ACT folder of LeRobot has them.
STATISTICS = {
    'mean': np.array([0.485, 0.456, 0.406], np.float32),
    'std': np.array([0.229, 0.224, 0.225], np.float32),
}
TABLE = normalised_table(Normalizer('mean_std_lerobot', STATISTICS))


def picture(height: int = 5, width: int = 7) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)


def resized(image: torch.Tensor, size: tuple[int, int], mode: str) -> torch.Tensor:
    """(3, h, w) uint8 to (3, height, width) uint8."""
    return torch.nn.functional.interpolate(
        image[None].contiguous(memory_format=torch.channels_last),
        size=size,
        mode=mode,
        antialias=True,
        align_corners=False,
    )[0]


def as_channels(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image).permute(2, 0, 1)


def converted(image: np.ndarray, table: np.ndarray) -> np.ndarray:
    size = image.shape[:2]
    return to_plain_pixels(image, table, np.empty((3, *size), np.float32))


@pytest.mark.parametrize('strides', [slice(None), slice(None, None, -1)])
def test_normalised_pixels_equal_the_formula_to_the_bit(strides):
    image = picture()[..., strides]
    scaled = image.astype(np.float32) / np.float32(255)
    expected = (scaled - STATISTICS['mean']) / (STATISTICS['std'] + np.float32(1e-8))
    np.testing.assert_array_equal(converted(image, TABLE), expected.transpose(2, 0, 1))


def test_signed_pixels_span_minus_one_to_one():
    table = signed_table()
    assert (table[:, 0] == -1).all() and (table[:, 255] == 1).all()
    image = picture()
    expected = image.astype(np.float32) / np.float32(255) * np.float32(2) - np.float32(1)
    np.testing.assert_array_equal(converted(image, table), expected.transpose(2, 0, 1))


@pytest.mark.parametrize('averaged', [None, (30, 50), (7, 100), (48, 64)])
@pytest.mark.parametrize('size', [(32, 48), (64, 64), (60, 84)])
def test_images_that_are_not_rounded_equal_pytorchs(averaged, size):
    image = picture(60, 84)
    expected = as_channels(image)[None] / 255.0
    if averaged is not None:
        expected = torch.nn.functional.interpolate(expected, size=averaged, mode='area')
    if expected.shape[2:] != size:
        expected = torch.nn.functional.interpolate(
            expected, size=size, mode='bicubic', antialias=True, align_corners=False
        )
    out = np.empty((3, *size), np.float32)
    to_levels(stretched_levels(image, size, averaged), signed_table(), out)
    np.testing.assert_allclose(out, (expected[0].numpy() - 0.5) / 0.5, rtol=0, atol=3e-6)


def test_a_unit_is_as_many_grey_levels_as_the_statistics_say():
    np.testing.assert_allclose(levels_per_unit(TABLE), 255 * STATISTICS['std'], rtol=1e-5)
    np.testing.assert_allclose(levels_per_unit(signed_table()), 127.5, rtol=1e-6)


def test_a_channel_without_range_has_no_grey_levels():
    assert levels_per_unit(np.zeros((3, 256), np.float32)).tolist() == [0.0, 0.0, 0.0]


def test_an_image_of_another_size_is_refused():
    with pytest.raises(ValueError, match='5x7'):
        check_size(picture(4, 7), (5, 7))


# --- Images stretched to a square: LeRobot's pixels of Evo-1, and PyTorch's of uint8 images


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
        to_plain_pixels(stretched(raw, size, 'bicubic'), TABLE, out)
        np.testing.assert_allclose(out, case.pixels[i].numpy(), rtol=0, atol=1e-5)
        compared += 1
    assert compared


@pytest.mark.parametrize('mode', ['bilinear', 'bicubic'])
@pytest.mark.parametrize(
    ('size', 'target'),
    [
        ((480, 640), (224, 224)),
        ((60, 84), (31, 90)),
        ((31, 200), (64, 64)),
        ((20, 20), (56, 56)),
        ((721, 333), (28, 28)),
        ((56, 84), (56, 56)),
        ((3, 5), (7, 2)),
    ],
)
def test_every_grey_level_equals_pytorch_s_of_uint8(size, target, mode):
    image = picture(*size)
    # Black and white beside each other: the cubic overshoots and is cut.
    image[: size[0] // 2] = np.where(image[: size[0] // 2] > 127, 255, 0)
    expected = resized(as_channels(image), target, mode).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(stretched(image, target, f'{mode}_uint8'), expected)
    # Any strides, as a bgr8 message has.
    turned = stretched(image[..., ::-1], target, f'{mode}_uint8')
    np.testing.assert_array_equal(turned, expected[..., ::-1])


@pytest.mark.parametrize('resample', ['bicubic', 'bicubic_uint8'])
def test_an_image_of_the_size_is_left_alone_and_a_flat_one_stays_flat(resample):
    image = picture(5, 7)
    assert stretched(image, (5, 7), resample) is image
    flat = np.full((480, 640, 3), 77, dtype=np.uint8)
    assert (stretched(flat, (448, 448), resample) == 77).all()
    assert (stretched(flat[:20, :20], (448, 448), resample) == 77).all()


def test_a_mirrored_image_gives_the_mirrored_result():
    image = picture(33, 50)
    for axis in (0, 1):
        turned = np.flip(stretched(np.flip(image, axis), (14, 28), 'bicubic'), axis)
        assert np.abs(turned.astype(int) - stretched(image, (14, 28), 'bicubic')).max() <= 1


def test_a_word_of_another_kind_is_refused():
    with pytest.raises(ValueError, match='bicubic_uint8'):
        stretched(np.zeros((4, 4, 3), np.uint8), (8, 8), 'bilinear')


# --- Images of GR00T N1.7, cut in the three ways that its folders ask for


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


# --- OpenVLA-OFT's images: TensorFlow's Lanczos resize, and points of the middle


@pytest.mark.parametrize('size', [(48, 64), (300, 400), (20, 17)])
def test_the_resize_is_pillows_lanczos_within_a_level(size):
    """Pillow rounds and clips between the axes, TensorFlow at the end."""
    # Grey levels that no overshoot takes beyond 0 or 255.
    image = picture(*size) // 4 + 96
    found = stretched(image, (32, 32), 'lanczos').astype(int)
    meant = np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.LANCZOS))
    assert np.abs(found - meant).max() <= 1


@pytest.mark.parametrize('edge', [8, 33, 224])
def test_points_of_the_middle_are_crop_and_resizes(edge):
    """Corners of the cut are points, as with PyTorch's `align_corners`."""
    image, fraction = picture(edge, edge), 0.9**0.5
    found = cropped(image, (edge, edge), edge=edge, fraction=fraction, resample='lanczos')
    line = torch.linspace(-fraction, fraction, edge)
    grid = torch.stack(torch.meshgrid(line, line, indexing='xy'), dim=-1)[None]
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255.0
    meant = torch.nn.functional.grid_sample(pixels, grid, align_corners=True)[0]
    levels = (meant.permute(1, 2, 0) * 255.5).floor().numpy().astype(int)
    assert np.abs(found.astype(int) - levels).max() <= 1
    assert (found != levels).mean() <= 0.001


# --- OpenVLA's processing: both resizes, prompts and the closing token, against the cases

SIZES = [(96, 128), (112, 112), (150, 90), (480, 640), (37, 224), (225, 224), (90, 91), (61, 60)]


def by_pillow(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


@pytest.mark.parametrize(('height', 'width'), SIZES)
@pytest.mark.parametrize('edge', [112, 224])
def test_stretched_images_are_pillows(height, width, edge):
    image = picture(height, width)
    found = stretched(image, (edge, edge), 'bicubic_pillow')
    assert np.array_equal(found, by_pillow(image, edge, edge))


@pytest.mark.parametrize(('height', 'width'), SIZES)
@pytest.mark.parametrize('edge', [112, 224])
def test_letterboxed_images_are_padded_before_they_are_resized(height, width, edge):
    """The class's transforms, written out on Pillow's own pictures."""
    image, fill = picture(height, width), (127, 3, 250)
    longer = max(height, width)
    down, right = int((longer - height) / 2), int((longer - width) / 2)
    square = Image.new('RGB', (width + 2 * right, height + 2 * down), fill)
    square.paste(Image.fromarray(image), (right, down))
    short = min(square.size)
    wide, high = (edge if side == short else int(edge * side / short) for side in square.size)
    square = square.resize((wide, high), Image.Resampling.BICUBIC)
    top, left = round((high - edge) / 2.0), round((wide - edge) / 2.0)
    expected = np.asarray(square)[top : top + edge, left : left + edge]
    found = letterboxed(image, edge, fill)
    assert found.shape == (edge, edge, 3)
    assert np.array_equal(found, expected)


@pytest.mark.cases
@pytest.mark.parametrize('path', network_case_paths('openvla_full'), ids=lambda path: path.stem)
def test_images_and_tokens_of_the_cases(path):
    d, tensors = json.loads(path.read_text()), load_file(path.with_suffix('.case.safetensors'))
    tokenizer = Tokenizer.load(path.with_suffix('.tokenizer.json'), closing='▁')
    mean, std = (
        np.array(d[name], dtype=np.float32).reshape(6, 1, 1)
        for name in ('image_means', 'image_stds')
    )
    for request in range(d['requests']):
        image, edge = tensors[f'raw_image_{request}'], d['image']
        if d['image_resize_strategy'] == 'resize-naive':
            resized = stretched(image, (edge, edge), 'bicubic_pillow')
        else:
            fill = tuple(int(255 * value) for value in d['image_means'][-1])
            resized = letterboxed(image, edge, fill)
        unit = np.tile(resized.transpose(2, 0, 1), (2, 1, 1)) / np.float32(255.0)
        expected = tensors[f'pixel_values_{request}']
        np.testing.assert_allclose((unit - mean) / std, expected, rtol=0, atol=2e-6)
        ids = tensors[f'input_ids_{request}']
        tokens, mask = tokenizer.encode(d['prompts'][request], 40)
        assert tokens[mask].tolist() == ids.tolist()
        assert ids[-1] == d['empty_token']
