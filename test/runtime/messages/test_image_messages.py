"""Raw and compressed image messages become RGB, or a reason why not."""

import array
import struct
import time

import cv2
import numpy as np
import pytest
from sensor_msgs.msg import CompressedImage, Image

from vla_runtime.messages.images import ImageError, check_image, to_rgb

RGB = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)


def raw(encoding: str, pixels: np.ndarray, padding: int = 0) -> Image:
    rows = pixels.reshape(len(pixels), -1)
    rows = np.pad(rows, ((0, 0), (0, padding)), constant_values=99)
    return Image(
        height=pixels.shape[0],
        width=pixels.shape[1],
        encoding=encoding,
        step=rows.shape[1],
        data=array.array('B', rows.tobytes()),
    )


def encoded(rgb: np.ndarray, suffix: str, text: str) -> CompressedImage:
    _, data = cv2.imencode(suffix, rgb[:, :, ::-1])
    return CompressedImage(format=text, data=array.array('B', data.tobytes()))


ALPHA = np.full((7, 5, 1), 7, dtype=np.uint8)


@pytest.mark.parametrize('padding', [0, 3])
@pytest.mark.parametrize(
    ('encoding', 'pixels'),
    [
        ('rgb8', RGB),
        ('bgr8', RGB[:, :, ::-1]),
        ('rgba8', np.concatenate([RGB, ALPHA], axis=2)),
        ('bgra8', np.concatenate([RGB[:, :, ::-1], ALPHA], axis=2)),
    ],
)
def test_colour_encodings_become_the_same_rgb(encoding, pixels, padding):
    image = to_rgb(raw(encoding, pixels, padding))
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image, RGB)


def test_mono_becomes_three_equal_channels():
    image = to_rgb(raw('mono8', RGB[:, :, :1], padding=2))
    np.testing.assert_array_equal(image, np.repeat(RGB[:, :, :1], 3, axis=2))


@pytest.mark.parametrize('encoding', ['rgb8', 'bgr8', 'mono8'])
def test_raw_pixels_are_a_read_only_view_of_the_message(encoding):
    message = raw(encoding, RGB if encoding != 'mono8' else RGB[:, :, :1])
    image = to_rgb(message)
    assert np.shares_memory(image, np.frombuffer(message.data, dtype=np.uint8))
    with pytest.raises(ValueError, match='read-only'):
        image[0, 0, 0] = 1


def test_last_row_may_lack_its_padding():
    message = raw('rgb8', RGB, padding=3)
    message.data = message.data[:-3]
    np.testing.assert_array_equal(to_rgb(message), RGB)


def test_byte_order_means_nothing_for_bytes():
    message = raw('bgr8', RGB[:, :, ::-1])
    message.is_bigendian = 1
    np.testing.assert_array_equal(to_rgb(message), RGB)


@pytest.mark.parametrize(
    ('change', 'reason'),
    [
        ({'encoding': '16UC1'}, 'encoding .16UC1. .* it is depth'),
        ({'encoding': 'mono16'}, 'encoding .mono16. .* it is depth'),
        ({'encoding': ''}, 'is not read; let the driver publish rgb8'),
        ({'encoding': '8UC3'}, r'this camera .encoding. in the robot file \(rgb8, bgr8\)'),
        ({'step': 14}, 'step is 14 bytes, but 5 pixels of .rgb8. take 15'),
        ({'width': 0}, 'it is empty'),
        ({'height': 8}, r'data has 105 bytes, but 8 rows of 15 take 120'),
        ({'height': 6}, r'data has 105 bytes'),
        ({'data': array.array('B')}, r'data has 0 bytes'),
    ],
)
def test_wrong_raw_image_is_refused_with_the_reason(change, reason):
    message = raw('rgb8', RGB)
    for field, value in change.items():
        setattr(message, field, value)
    with pytest.raises(ImageError, match=reason):
        check_image(message)
    with pytest.raises(ImageError, match=reason):
        to_rgb(message)


def test_size_is_free_unless_the_robot_file_fixes_it():
    message = raw('rgb8', RGB)
    check_image(message)
    check_image(message, width=5, height=7)
    with pytest.raises(ImageError):
        check_image(message, width=640, height=480)


@pytest.mark.parametrize('text', ['png', 'rgb8; png compressed bgr8'])
def test_png_is_decoded_exactly(text):
    np.testing.assert_array_equal(to_rgb(encoded(RGB, '.png', text)), RGB)


@pytest.mark.parametrize('text', ['jpeg', 'jpg', 'rgb8; jpeg compressed bgr8'])
def test_jpeg_keeps_red_red(text):
    red = np.zeros((16, 16, 3), dtype=np.uint8)
    red[:, :, 0] = 200
    image = to_rgb(encoded(red, '.jpg', text))
    assert image.shape == (16, 16, 3)
    assert np.abs(image.astype(int) - red).max() < 8


@pytest.mark.parametrize(
    ('message', 'reason'),
    [
        (CompressedImage(format='h264', data=array.array('B', [1])), 'expected jpeg or png'),
        (CompressedImage(format='', data=array.array('B', [1])), 'expected jpeg or png'),
        (
            CompressedImage(format='16UC1; compressedDepth png', data=array.array('B', [1])),
            'is depth',
        ),
        (
            CompressedImage(format='16UC1; png compressed ', data=array.array('B', [1])),
            'not an 8-bit colour image',
        ),
        (CompressedImage(format='jpeg'), 'has no data'),
    ],
)
def test_wrong_compressed_image_is_refused_at_arrival(message, reason):
    with pytest.raises(ImageError, match=reason):
        check_image(message)


def test_size_of_a_compressed_image_is_checked_at_arrival():
    with pytest.raises(ImageError, match='5x7'):
        check_image(encoded(RGB, '.png', 'png'), width=640, height=480)


@pytest.mark.parametrize('suffix', ['.png', '.jpg'])
def test_an_image_that_says_more_pixels_than_any_camera_has_is_not_decoded(suffix):
    message = encoded(RGB, suffix, suffix[1:])
    check_image(message)
    data = bytes(message.data)
    # Width and height, in the header of a PNG and in a JPEG's start of frame.
    at = 16 if suffix == '.png' else data.index(b'\xff\xc0') + 5
    huge = b'\x00\x01\x00\x00' * 2 if suffix == '.png' else b'\xff\xff' * 2
    message.data = array.array('B', data[:at] + huge + data[at + len(huge) :])
    with pytest.raises(ImageError):
        check_image(message)


def frame_header(width: int, height: int) -> bytes:
    return b'\xff\xc0\x00\x11\x08' + struct.pack('>HH', height, width) + b'\x03' + bytes(9)


@pytest.mark.parametrize(
    'before',
    [
        # Markers without a length; two bytes that look like one lead over the true header.
        b'\xff\x01' + b'\x00\x19',
        b'\xff\xd0' + b'\x00\x19',
        b'\xff' * 7,
    ],
)
def test_the_size_of_a_jpeg_is_that_of_the_header_that_a_decoder_finds(before):
    # A decoder skips what stands between two segments.
    data = b'\xff\xd8' + before + frame_header(9000, 9000) + frame_header(16, 16)
    message = CompressedImage(format='jpeg', data=array.array('B', data))
    with pytest.raises(ImageError):
        check_image(message)


@pytest.mark.parametrize('filling', [b'\xff' * 4_000_000, b'\xff\xe0\x00\x02' * 1_000_000])
def test_an_endless_jpeg_header_is_refused_at_once(filling):
    message = CompressedImage(format='jpeg', data=array.array('B', b'\xff\xd8' + filling))
    start_s = time.process_time()
    with pytest.raises(ImageError):
        check_image(message)
    # A hundred times what it takes here, and a tenth of what it took.
    assert time.process_time() - start_s < 0.1


def test_compressed_data_that_is_neither_png_nor_jpeg_is_not_decoded():
    with pytest.raises(ImageError):
        check_image(encoded(RGB, '.bmp', 'jpeg'))
