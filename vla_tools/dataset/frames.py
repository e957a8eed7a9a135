"""Frames and episodes of a data set, on their way from a bag to its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class EncodedImage:
    """A camera's frame.

    Attributes:
        data: PNG or JPEG.
        pixels: (height, width, 3) uint8, RGB.
    """

    data: bytes
    pixels: np.ndarray


@dataclass(frozen=True)
class DatasetFrame:
    """One frame of an episode.

    Attributes:
        images: camera to its frame.
        state: (state,) float32.
        action: (action,) float32.
    """

    images: Mapping[str, EncodedImage]
    state: np.ndarray
    action: np.ndarray


@dataclass(frozen=True)
class EpisodeFacts:
    """Task, length and verdict of an episode.

    Attributes:
        task: task in plain words.
        frames: number of them.
        success: None where nobody judged.
        source: path of the recording.
        start_ns: ROS time of the first frame.
    """

    task: str
    frames: int
    success: bool | None
    source: str
    start_ns: int
