"""Damage of compressed images is found, and nothing is taken for damage that is none."""

from __future__ import annotations

import array
import struct
import zlib

import cv2
import numpy as np
import pytest
from sensor_msgs.msg import CompressedImage
from thorough import thorough_but

from vla_runtime.messages.images import ImageError, check_image, to_rgb

WIDTH, HEIGHT = 320, 240
NOISE = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
SCENE = cv2.resize(NOISE, (WIDTH, HEIGHT))
# Nothing to see in the last rows, as of a dark or a simulated scene.
FLAT = np.vstack([SCENE[:100], np.full((140, WIDTH, 3), 90, np.uint8)])


def jpeg(pixels: np.ndarray = SCENE, *options: int) -> bytes:
    return cv2.imencode('.jpg', pixels, list(options))[1].tobytes()


def message(data: bytes, text: str = 'jpeg') -> CompressedImage:
    return CompressedImage(format=text, data=array.array('B', data))


def is_whole(data: bytes) -> bool:
    try:
        to_rgb(message(data))
    except ImageError:
        return False
    return True


@pytest.mark.parametrize('pixels', [SCENE, FLAT, FLAT[:, :, 0], FLAT[:17, :9], FLAT * 0])
@pytest.mark.parametrize('quality', thorough_but([5, 95], [5, 50, 95]))
@pytest.mark.parametrize('restarts', thorough_but([0, 7], [0, 1, 7]))
@pytest.mark.parametrize('optimised', [0, 1])
@pytest.mark.parametrize('progressive', [0, 1])
@pytest.mark.parametrize('sampling', thorough_but([0x221111], [0x411111, 0x221111, 0x111111]))
def test_a_whole_jpeg_is_never_taken_for_damaged(
    pixels: np.ndarray, quality: int, restarts: int, optimised: int, progressive: int, sampling: int
) -> None:
    data = jpeg(
        pixels,
        *(cv2.IMWRITE_JPEG_QUALITY, quality),
        *(cv2.IMWRITE_JPEG_RST_INTERVAL, restarts),
        *(cv2.IMWRITE_JPEG_OPTIMIZE, optimised),
        *(cv2.IMWRITE_JPEG_PROGRESSIVE, progressive),
        *(cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling),
    )
    facts = check_image(message(data))
    assert facts[:3] == (pixels.shape[1], pixels.shape[0], pixels.ndim == 2)
    expected = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]
    np.testing.assert_array_equal(to_rgb(message(data)), expected)
    # Buffers of a fixed size have zeros behind it; and some cameras leave out the end.
    assert is_whole(data + bytes(5000))
    # With tables of its own a flat picture may end in zeros, as an empty buffer does.
    assert progressive or optimised or is_whole(data[:-2])


@pytest.mark.parametrize('pixels', [SCENE, FLAT])
@pytest.mark.parametrize('restarts', [0, 10])
@pytest.mark.parametrize('progressive', [0, 1])
@pytest.mark.parametrize('part', [0.02, 0.1, 0.5, 0.9, 0.98])
def test_a_jpeg_that_was_cut_is_refused(
    pixels: np.ndarray, restarts: int, progressive: int, part: float
) -> None:
    data = jpeg(
        pixels,
        *(cv2.IMWRITE_JPEG_RST_INTERVAL, restarts),
        *(cv2.IMWRITE_JPEG_PROGRESSIVE, progressive),
    )
    cut = data[: int(part * len(data))]
    assert not is_whole(cut)
    assert not is_whole(cut + bytes(5000))


@pytest.mark.parametrize('restarts', [0, 10])
@pytest.mark.parametrize('lost', [300, 512, 1024])
def test_a_jpeg_with_a_hole_is_refused(restarts: int, lost: int) -> None:
    data = jpeg(SCENE, cv2.IMWRITE_JPEG_RST_INTERVAL, restarts)
    found = 0
    begins = np.linspace(700, len(data) - lost - 200, 20).astype(int)
    for begin in begins:
        found += not is_whole(data[:begin] + data[begin + lost :])
    # What goes on by chance at the right block is not found out. With restart markers only a hole
    # that takes one along is, and what is short at the end.
    assert found >= (8 if restarts else 15)


def test_two_frames_in_one_are_refused() -> None:
    data = jpeg()
    assert not is_whole(data[: len(data) // 2] + data)


def test_damage_of_a_png_is_refused() -> None:
    data = cv2.imencode('.png', SCENE)[1].tobytes()
    np.testing.assert_array_equal(to_rgb(message(data, 'png')), SCENE[:, :, ::-1])
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 4
    for damaged in (data[: len(data) // 2], data[:-12], bytes(flipped)):
        with pytest.raises(ImageError, match='damaged'):
            to_rgb(message(damaged, 'png'))


def test_what_the_data_is_counts_not_what_the_format_says() -> None:
    for text in ('', 'mjpeg', 'image/jpeg', 'yuv422_yuy2; jpeg compressed bgr8', 'camera'):
        assert to_rgb(message(jpeg(), text)).shape == (HEIGHT, WIDTH, 3)


def test_a_png_of_16_bits_is_refused() -> None:
    data = cv2.imencode('.png', np.zeros((4, 6), np.uint16))[1].tobytes()
    with pytest.raises(ImageError):
        check_image(message(data, 'mono16; png compressed '))


def test_a_chunk_of_a_png_may_say_any_length() -> None:
    head = b'\x89PNG\r\n\x1a\n'
    body = b'IHDR' + struct.pack('>IIBBBBB', 4, 4, 8, 2, 0, 0, 0)
    header = struct.pack('>I', 13) + body + struct.pack('>I', zlib.crc32(body))
    for length in (0, 1, 0xFFFFFFFF):
        with pytest.raises(ImageError, match='damaged'):
            to_rgb(message(head + header + struct.pack('>I', length) + b'IDAT', 'png'))
