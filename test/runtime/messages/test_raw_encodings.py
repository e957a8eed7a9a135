"""Encodings of raw images against formulas of their own, in floats, to one level."""

from __future__ import annotations

import array

import cv2
import numpy as np
import pytest
from sensor_msgs.msg import Image

from vla_runtime.messages.images import ImageError, check_image, to_rgb
from vla_runtime.messages.raw_encodings import RAW_ENCODINGS

WIDTH, HEIGHT = 20, 12
RANDOM = np.random.default_rng(0)
MOSAICS = ('rggb', 'bggr', 'gbrg', 'grbg')


def image(encoding: str, rows: np.ndarray, *, height: int = HEIGHT, padding: int = 0, big: int = 0):
    """Return a message of (rows, bytes) uint8, each row followed by other bytes."""
    padded = np.pad(rows, ((0, 0), (0, padding)), constant_values=77)
    return Image(
        height=height,
        width=WIDTH,
        encoding=encoding,
        step=padded.shape[1],
        is_bigendian=big,
        data=array.array('B', padded.tobytes()),
    )


def yuv_to_rgb(y: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """ITU-R BT.601, 16 to 235 and 16 to 240, as floats."""
    light, blue, red = 255 / 219 * (y - 16.0), 255 / 224 * (u - 128.0), 255 / 224 * (v - 128.0)
    rgb = [
        light + 1.402 * red,
        light - 1.772 * 0.114 / 0.587 * blue - 1.402 * 0.299 / 0.587 * red,
        light + 1.772 * blue,
    ]
    return np.clip(np.stack(rgb, axis=-1), 0, 255)


def assert_near(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == np.uint8 and found.shape == (HEIGHT, WIDTH, 3)
    assert np.abs(found - expected).max() <= 1.0


@pytest.mark.parametrize('padding', [0, 12])
@pytest.mark.parametrize(
    ('encoding', 'places'),
    [
        ('yuv422', (1, 0, 2)),
        ('uyvy', (1, 0, 2)),
        ('yuv422_yuy2', (0, 1, 3)),
        ('yuyv', (0, 1, 3)),
    ],
)
def test_two_pixels_share_their_colour(encoding: str, places: tuple, padding: int) -> None:
    # Levels that a camera sends: within the colours that RGB can show nothing is clipped.
    data = RANDOM.integers(16, 236, (HEIGHT, WIDTH // 2, 4), dtype=np.uint8)
    first, u, v = (data[:, :, place].astype(float) for place in places)
    y = np.stack([first, data[:, :, places[0] + 2]], axis=2).reshape(HEIGHT, WIDTH)
    expected = yuv_to_rgb(y, u.repeat(2, axis=1), v.repeat(2, axis=1))
    found = to_rgb(image(encoding, data.reshape(HEIGHT, -1), padding=padding))
    assert_near(found, expected)


@pytest.mark.parametrize('padding', [0, 12])
@pytest.mark.parametrize(('encoding', 'u_first'), [('nv12', True), ('nv21', False)])
def test_four_pixels_share_their_colour(encoding: str, u_first: bool, padding: int) -> None:
    data = RANDOM.integers(16, 236, (HEIGHT * 3 // 2, WIDTH), dtype=np.uint8)
    colours = data[HEIGHT:].reshape(HEIGHT // 2, WIDTH // 2, 2).astype(float)
    colours = colours.repeat(2, axis=0).repeat(2, axis=1)
    u, v = (colours[:, :, place] for place in ((0, 1) if u_first else (1, 0)))
    found = to_rgb(image(encoding, data, padding=padding))
    assert_near(found, yuv_to_rgb(data[:HEIGHT].astype(float), u, v))


def mosaic_of(rgb: np.ndarray, pattern: str) -> np.ndarray:
    """Sample (height, width, 3) as a sensor with this pattern does."""
    mosaic = np.empty(rgb.shape[:2], rgb.dtype)
    for place, colour in enumerate(pattern):
        down, across = divmod(place, 2)
        mosaic[down::2, across::2] = rgb[down::2, across::2, 'rgb'.index(colour)]
    return mosaic


def bilinear(mosaic: np.ndarray, pattern: str) -> np.ndarray:
    """Mean of the nearest samples of each colour; right within the border."""
    height, width = mosaic.shape
    rgb = np.zeros((height, width, 3))
    for colour in range(3):
        known = np.zeros((height, width))
        for place, one in enumerate(pattern):
            if 'rgb'.index(one) == colour:
                down, across = divmod(place, 2)
                known[down::2, across::2] = 1.0
        # A green sample's own neighbours of its colour lie on the diagonals, and do not count.
        weights = {(0, 1): 1, (1, 0): 1, (0, -1): 1, (-1, 0): 1}
        corners = {(1, 1): 1, (1, -1): 1, (-1, 1): 1, (-1, -1): 1}
        for y in range(1, height - 1):
            for x in range(1, width - 1):
                if known[y, x]:
                    rgb[y, x, colour] = mosaic[y, x]
                    continue
                near = [(y + dy, x + dx) for dy, dx in weights if known[y + dy, x + dx]]
                near = near or [(y + dy, x + dx) for dy, dx in corners if known[y + dy, x + dx]]
                rgb[y, x, colour] = np.mean([mosaic[at] for at in near])
    return rgb


@pytest.mark.parametrize('padding', [0, 12])
@pytest.mark.parametrize('pattern', MOSAICS)
def test_a_mosaic_is_interpolated(pattern: str, padding: int) -> None:
    mosaic = RANDOM.integers(0, 256, (HEIGHT, WIDTH), dtype=np.uint8)
    found = to_rgb(image(f'bayer_{pattern}8', mosaic, padding=padding))
    inside = (slice(1, -1), slice(1, -1))
    assert found.shape == (HEIGHT, WIDTH, 3)
    assert np.abs(found[inside] - bilinear(mosaic.astype(float), pattern)[inside]).max() <= 1.0


@pytest.mark.parametrize('pattern', MOSAICS)
def test_a_mosaic_of_one_colour_is_that_colour(pattern: str) -> None:
    colour = np.tile(np.array([200, 120, 30], np.uint8), (HEIGHT, WIDTH, 1))
    found = to_rgb(image(f'bayer_{pattern}8', mosaic_of(colour, pattern)))
    np.testing.assert_array_equal(found, colour)


@pytest.mark.parametrize('big', [0, 1])
@pytest.mark.parametrize('encoding', ['rgb16', 'bgr16', 'rgba16', 'bgra16'])
def test_of_16_bits_the_upper_ones_count(encoding: str, big: int) -> None:
    channels = 4 if 'a' in encoding else 3
    numbers = RANDOM.integers(0, 65536, (HEIGHT, WIDTH, channels), dtype=np.uint16)
    rows = numbers.astype('>u2' if big else '<u2').view(np.uint8).reshape(HEIGHT, -1)
    colours = numbers[:, :, :3] if encoding.startswith('rgb') else numbers[:, :, 2::-1]
    assert_near(to_rgb(image(encoding, rows, padding=12, big=big)), colours / 257.0)


@pytest.mark.parametrize('big', [0, 1])
@pytest.mark.parametrize('pattern', MOSAICS)
def test_a_mosaic_of_16_bits(pattern: str, big: int) -> None:
    colour = np.tile(np.array([60000, 30000, 257], np.uint16), (HEIGHT, WIDTH, 1))
    rows = mosaic_of(colour, pattern).astype('>u2' if big else '<u2').view(np.uint8)
    found = to_rgb(image(f'bayer_{pattern}16', rows.reshape(HEIGHT, -1), big=big))
    assert_near(found, colour / 257.0)


@pytest.mark.parametrize(
    ('said', 'given', 'channels'),
    [
        ('8UC1', 'mono8', 1),
        ('8UC1', 'bayer_grbg8', 1),
        ('8UC2', 'yuyv', 2),
        ('8UC2', 'uyvy', 2),
        ('8UC3', 'rgb8', 3),
        ('8UC3', 'bgr8', 3),
        ('8UC4', 'rgba8', 4),
        ('8UC4', 'bgra8', 4),
        ('RGB8', None, 3),
    ],
)
def test_the_robot_file_says_what_bytes_mean(said: str, given: str | None, channels: int) -> None:
    rows = RANDOM.integers(0, 256, (HEIGHT, WIDTH * channels), dtype=np.uint8)
    plain = image(given or said.lower(), rows, padding=4)
    found = to_rgb(image(said, rows, padding=4), encoding=given)
    np.testing.assert_array_equal(found, to_rgb(plain))


def test_the_robot_file_and_the_message_must_not_differ() -> None:
    rows = np.zeros((HEIGHT, WIDTH * 3), np.uint8)
    with pytest.raises(ImageError, match="'bgr8'"):
        check_image(image('rgb8', rows), encoding='bgr8')
    with pytest.raises(ImageError):
        check_image(image('8UC4', rows), encoding='bgr8')
    check_image(image('bgr8', rows), encoding='bgr8')
    # Two names of one encoding.
    check_image(image('yuv422_yuy2', rows[:, : WIDTH * 2]), encoding='yuyv')


@pytest.mark.parametrize('encoding', [name for name, one in RAW_ENCODINGS.items() if one.even])
@pytest.mark.parametrize(('width', 'height'), [(21, 12), (20, 13), (21, 13), (1, 1)])
def test_an_odd_size_is_named(encoding: str, width: int, height: int) -> None:
    known = RAW_ENCODINGS[encoding]
    message = Image(height=height, width=width, encoding=encoding, step=width * known.pixel_bytes)
    message.data = array.array('B', bytes(message.step * (height * 3 // 2 + 1)))
    message.data = message.data[: message.step * known.data_rows(height)]
    odd = [name for name in known.even if getattr(message, name) % 2]
    if odd:
        with pytest.raises(ImageError, match=f'{" and ".join(odd)} must be even'):
            check_image(message)
    else:
        assert to_rgb(message).shape == (height, width, 3)


@pytest.mark.parametrize('encoding', RAW_ENCODINGS)
def test_wrong_amounts_of_data_are_refused_in_every_encoding(encoding: str) -> None:
    known = RAW_ENCODINGS[encoding]
    rows = np.zeros((known.data_rows(HEIGHT), WIDTH * known.pixel_bytes), np.uint8)
    assert to_rgb(image(encoding, rows, padding=4)).shape == (HEIGHT, WIDTH, 3)
    for wrong in (rows[:-1], np.vstack([rows, rows])):
        with pytest.raises(ImageError):
            check_image(image(encoding, wrong))
    with pytest.raises(ImageError):
        check_image(image(encoding, rows[:, :-1]))


def test_a_jpeg_in_a_raw_image_is_said() -> None:
    data = cv2.imencode('.jpg', np.zeros((HEIGHT, WIDTH, 3), np.uint8))[1].tobytes()
    whole = (data + bytes(WIDTH * HEIGHT * 3))[: WIDTH * HEIGHT * 3]
    message = image('rgb8', np.frombuffer(whole, np.uint8).reshape(HEIGHT, -1))
    with pytest.raises(ImageError):
        check_image(message)


@pytest.mark.parametrize(('encoding', 'grey'), [('mono8', True), ('rgb8', False), ('yuyv', False)])
def test_grey_is_told_from_colour(encoding: str, grey: bool) -> None:
    rows = np.zeros((HEIGHT, WIDTH * RAW_ENCODINGS[encoding].pixel_bytes), np.uint8)
    assert check_image(image(encoding, rows))[:3] == (WIDTH, HEIGHT, grey)
