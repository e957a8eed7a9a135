"""Features and file paths of a data set in LeRobot's format (`CODEBASE_VERSION` v3.0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# --- Errors


class DatasetError(ValueError):
    """A data set that cannot be made; the message names the bag or folder and what mends it."""


# --- Frames and episodes


@dataclass(frozen=True)
class EncodedImage:
    """A camera's frame: PNG or JPEG data, and pixels (height, width, 3) uint8, RGB."""

    data: bytes
    pixels: np.ndarray


@dataclass(frozen=True)
class DatasetFrame:
    """One frame of an episode; state (state,) and action (action,) are float32.

    `intervention`: a person led the robot, whose commands are the actions.
    """

    images: Mapping[str, EncodedImage]
    state: np.ndarray
    action: np.ndarray
    intervention: bool = False


@dataclass(frozen=True)
class EpisodeFacts:
    """Facts of an episode; `success` is None if unjudged; `start_ns`: ROS time of frame 0."""

    task: str
    frames: int
    success: bool | None
    source: str
    start_ns: int


VERSION = 'v3.0'
# Frames a second; a damaged chunk may ask for any number.
MOST_FPS = 1000
# Seconds: oldest camera frame that is used, shortest episode that is kept.
FRAME_AGE_S, SHORTEST_S = 0.5, 1.0
FILES_IN_A_CHUNK = 1000
FILE_MB = 100
INFO, STATISTICS, TASKS = 'meta/info.json', 'meta/stats.json', 'meta/tasks.parquet'
EPISODES = 'meta/episodes/chunk-000/file-000.parquet'
DATA = 'data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet'
STATE, ACTION, SUCCESS = 'observation.state', 'action', 'next.success'
# The name and type of LeRobot's DAgger sets (lerobot-rollout, `DAggerStrategyConfig`).
INTERVENTION = 'intervention'
# Index columns and their types.
INDICES = {
    'timestamp': 'float32',
    'frame_index': 'int64',
    'episode_index': 'int64',
    'index': 'int64',
    'task_index': 'int64',
}


def image_key(camera: str) -> str:
    """Return the column of a camera's frames."""
    return f'observation.images.{camera}'


@dataclass(frozen=True)
class Layout:
    """Content of every frame; all bags of a data set have the same.

    Attributes:
        cameras: camera to (height, width).
        units: joint to its unit, and whether it is continuous.
        judged: all episodes were, so each frame says whether it ends in success.
        corrected: a person led in some frame, so each says whether one did.
    """

    robot: str
    fps: int
    cameras: dict[str, tuple[int, int]]
    state: tuple[str, ...]
    action: tuple[str, ...]
    units: dict[str, str]
    judged: bool = False
    corrected: bool = False

    def features(self) -> dict[str, dict[str, Any]]:
        """Return `features` of info.json, in the order of the columns."""
        found: dict[str, dict[str, Any]] = {
            STATE: _feature('float32', [len(self.state)], list(self.state)),
            ACTION: _feature('float32', [len(self.action)], list(self.action)),
        }
        for camera, (height, width) in self.cameras.items():
            names = ['height', 'width', 'channels']
            found[image_key(camera)] = _feature('image', [height, width, 3], names)
        if self.judged:
            found[SUCCESS] = _feature('bool', [1], None)
        if self.corrected:
            found[INTERVENTION] = _feature('bool', [1], None)
        return found | {name: _feature(kind, [1], None) for name, kind in INDICES.items()}

    def info(self, episodes: int, frames: int, tasks: int) -> dict[str, Any]:
        """Return the contents of info.json."""
        return {
            'codebase_version': VERSION,
            'robot_type': self.robot,
            'total_episodes': episodes,
            'total_frames': frames,
            'total_tasks': tasks,
            'chunks_size': FILES_IN_A_CHUNK,
            'data_files_size_in_mb': FILE_MB,
            'video_files_size_in_mb': 200,
            'fps': self.fps,
            'splits': {'train': f'0:{episodes}'},
            'data_path': DATA,
            'video_path': None,
            'features': self.features(),
        }


def _feature(kind: str, shape: list[int], names: list[str] | None) -> dict[str, Any]:
    return {'dtype': kind, 'shape': shape, 'names': names}
