"""Warnings of frames that repeat, and of black frames, from stamps and bytes alone."""

from __future__ import annotations

import array
from types import SimpleNamespace

import numpy as np
import pytest

from vla_runtime.messages.images import ImageFacts
from vla_runtime.sensors.camera_buffer import CameraBuffer, Frame

S = 1_000_000_000
MS = 1_000_000
SHAPE = (240, 320, 3)


def noisy(seed: int, level: int = 90) -> np.ndarray:
    return np.random.default_rng(seed).integers(level, level + 20, SHAPE, dtype=np.uint8)


class Camera:
    """A buffer that takes frames at 20 Hz, is asked for its status every second, and infers."""

    def __init__(self) -> None:
        self.buffer = CameraBuffer('front', '/front/image')
        self.now_ns = 100 * S

    def show(self, seconds: float, pixels: np.ndarray | None = None, infers: bool = True) -> None:
        """Frames for so long: these pixels, or new ones each time."""
        for number in range(round(seconds * 20)):
            self.now_ns += 50 * MS
            image = noisy(self.now_ns // MS) if pixels is None else pixels
            message = SimpleNamespace(data=array.array('B', image.tobytes()))
            frame = Frame(self.now_ns, 0, message, ImageFacts(320, 240, grey=False))
            self.buffer.add(frame, self.now_ns, 500 * MS, 50 * MS)
            self.buffer.expire(self.now_ns, 500 * MS)
            if infers:
                self.buffer.content.note_pixels(frame.stamp_ns, image)
            if number % 20 == 19:
                self.buffer.compare()

    @property
    def warning(self) -> str:
        return self.buffer.warning or ''


def test_one_frame_under_new_stamps_is_a_warning_with_camera_and_topic_until_another_comes():
    camera = Camera()
    camera.show(8.0)
    assert camera.warning == ''
    still = noisy(1)
    camera.show(4.0, still)
    assert camera.warning == ''
    camera.show(3.0, still)
    assert "camera 'front' (/front/image)" in camera.warning and 'again and again' in camera.warning
    camera.show(1.0)
    assert camera.warning == ''


def test_a_scene_at_rest_in_front_of_a_real_sensor_is_no_warning():
    """Noise changes one pixel in a frame of thousands."""
    camera = Camera()
    image = noisy(1)
    for turn in range(12):
        image[turn, turn, 0] += 1
        camera.show(1.0, image)
        assert camera.warning == ''


@pytest.mark.parametrize('level', [0, 3])
def test_black_frames_after_a_start_of_the_camera_are_a_warning_for_a_while(level: int):
    camera = Camera()
    dark = np.full(SHAPE, level, dtype=np.uint8)
    # A hot pixel.
    dark[8, 8] = 255
    camera.show(0.5, dark)
    camera.show(1.0)
    assert 'black' in camera.warning and "camera 'front' (/front/image)" in camera.warning
    camera.show(12.0)
    assert camera.warning == ''


def test_a_dark_scene_with_something_in_it_is_no_warning():
    camera = Camera()
    image = np.zeros(SHAPE, dtype=np.uint8)
    image[:60, :60] = 200
    camera.show(1.0, image)
    assert camera.warning == ''


def test_black_frames_that_no_inference_uses_are_no_warning():
    camera = Camera()
    camera.show(0.5, np.zeros(SHAPE, dtype=np.uint8), infers=False)
    camera.show(1.0)
    assert camera.warning == ''


def test_a_reset_forgets_what_was_seen():
    camera = Camera()
    camera.show(7.0, np.zeros(SHAPE, dtype=np.uint8))
    assert camera.warning
    camera.buffer.clear()
    camera.show(1.0)
    assert camera.warning == ''
