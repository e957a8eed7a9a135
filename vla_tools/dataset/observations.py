"""Observations of a data set in LeRobot's format, as a policy sees them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from tqdm import tqdm

from vla_convert.checkpoints.feature_names import (
    camera_name,
    feature_names,
    plain_camera_name,
    plain_joint_name,
)
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.files.input_files import UnreadableFileError, whole_file
from vla_runtime.files.quotes import one_line
from vla_runtime.types import Observation
from vla_tools.dataset.layout import STATE, DatasetError, image_key
from vla_tools.dataset.stored_dataset import ANEW, StoredDataset, named

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer

# --- Frames of a video at given times


def read_frames(path: Path, times_s: Sequence[float], tolerance_s: float) -> Iterator[np.ndarray]:
    """Yield the frame (height, width, 3) uint8, RGB, nearest to each time (s, rising).

    Raises DatasetError: unreadable, or no frame within `tolerance_s` of a time.
    """
    import av

    if not path.is_file():
        raise DatasetError(f'{path}: is missing: download the data set with its videos')
    try:
        whole_file(path)
        with av.open(str(path)) as container:
            yield from _frames(path, container, times_s, tolerance_s)
    except UnreadableFileError as error:
        raise DatasetError(f'{path}: {error}') from None
    except (av.FFmpegError, IndexError) as error:
        reason = one_line(str(error), 200)
        raise DatasetError(f'{path}: cannot be decoded: {reason}; copy the data set anew') from None


def _frames(
    path: Path, container: InputContainer, times_s: Sequence[float], tolerance_s: float
) -> Iterator[np.ndarray]:
    stream = container.streams.video[0]
    stream.thread_type = 'AUTO'
    assert stream.time_base is not None
    tick_s = float(stream.time_base)
    first = stream.start_time or 0
    packets = container.demux(stream)
    keys = sorted(one.pts for one in packets if one.is_keyframe and one.pts is not None)
    decoded: Iterator[VideoFrame] = iter(())
    # The last two decoded frames.
    before: VideoFrame | None = None
    ahead: VideoFrame | None = None
    for time_s in times_s:
        wanted = first + time_s / tick_s
        key = keys[max(bisect_right(keys, wanted) - 1, 0)] if keys else first
        if ahead is None or _pts(ahead) < key:
            container.seek(key, stream=stream)
            decoded, before, ahead = container.decode(stream), None, None
        while ahead is None or _pts(ahead) < wanted:
            following = next(decoded, None)
            if following is None:
                break
            before, ahead = ahead, following
        near = [one for one in (before, ahead) if one is not None]
        nearest = min(near, key=lambda one: abs(_pts(one) - wanted), default=None)
        if nearest is None or abs(_pts(nearest) - wanted) * tick_s > tolerance_s:
            raise DatasetError(f'{path}: has no frame at {time_s:g} s; copy the data set anew')
        yield nearest.to_ndarray(format='rgb24')


def _pts(frame: VideoFrame) -> int:
    return frame.pts or 0


# openpi's converters have the second.
_STATES = (STATE, 'state')
_OF_VIDEOS = ('episode_index', 'timestamp')


@dataclass(frozen=True)
class StoredObservation:
    """An observation with PNG or JPEG images; state (state,) float32 in the bundle's order."""

    images: Mapping[str, bytes]
    state: np.ndarray
    task: str
    file: Path

    def decode(self) -> Observation:
        """Return it with its pixels."""
        return Observation(
            images={camera: self._pixels(camera) for camera in self.images},
            state=self.state,
            instruction=self.task,
        )

    def _pixels(self, camera: str) -> np.ndarray:
        data = np.frombuffer(self.images[camera], dtype=np.uint8)
        image = cv2.imdecode(data, cv2.IMREAD_COLOR) if len(data) else None
        if image is None:
            raise DatasetError(f'{self.file}: {image_key(camera)}: a frame is no image; {ANEW}')
        return np.ascontiguousarray(image[..., ::-1])


def read_observations(
    folder: Path, spec: BundleSpec, count: int, seed: int = 0
) -> list[StoredObservation]:
    """Draw up to `count` frames of a data set, with a progress bar.

    The data set has the bundle's camera and state names, or those that `rename_map` maps. Raises
    DatasetError: no version 2 or 3, or a camera or state is missing.
    """
    data = StoredDataset(folder)
    state, order = _state_order(data, spec)
    cameras = _camera_features(data, spec)
    counts = data.counts()
    rows = np.cumsum([0, *counts])
    total = int(rows[-1])
    if not total:
        raise DatasetError(f'{folder}: has no frames')
    drawn = np.sort(np.random.default_rng(seed).permutation(total)[:count])
    images = [key for key in cameras.values() if data.features[key]['dtype'] == 'image']
    videos = [key for key in cameras.values() if key not in images]
    columns = [state, 'task_index', *images, *(_OF_VIDEOS if videos else ())]
    frames: list[tuple[Path, dict[str, Any]]] = []
    with tqdm(total=len(drawn) * len(cameras), desc='read', unit='image', disable=None) as bar:
        for number, file in enumerate(data.tables):
            mine = drawn[(drawn >= rows[number]) & (drawn < rows[number + 1])] - rows[number]
            if len(mine):
                frames += [(file, row) for row in data.rows(file, columns, mine)]
                bar.update(len(mine) * len(images))
        tasks = [_task(data, spec, file, row) for file, row in frames]
        for key in videos:
            _fill_from_videos(data, key, frames, bar)
    found = []
    for (file, row), task in zip(frames, tasks, strict=True):
        with named(file):
            found.append(
                StoredObservation(
                    {camera: _bytes(row[key]) for camera, key in cameras.items()},
                    np.asarray(row[state], dtype=np.float32)[order],
                    task,
                    file,
                )
            )
    return [found[place] for place in np.random.default_rng(seed).permutation(len(found))]


def _state_order(data: StoredDataset, spec: BundleSpec) -> tuple[str, list[int]]:
    """Return the feature of the state, and the column of each of the bundle's numbers."""
    key = next((name for name in data.features if _ours(name, spec) in _STATES), None)
    if key is None:
        raise DatasetError(f'{data.info_path}: features: {STATE} is missing; {ANEW}')
    feature = data.features[key]
    shape = feature.get('shape')
    length = shape[0] if isinstance(shape, list) and len(shape) == 1 else None
    names = feature_names(feature.get('names'), length if type(length) is int else None)
    if names is None:
        raise DatasetError(
            f'{data.info_path}: features.{key}.names: name no numbers of the state; write them '
            f'there in their order, or {ANEW}'
        )
    plain = [plain_joint_name(name) for name in names]
    missing = [name for name in spec.state_names if plain_joint_name(name) not in plain]
    if missing:
        raise DatasetError(
            f'{data.info_path}: features.{key}.names: {", ".join(names)} lack '
            f'{", ".join(missing)} of the policy'
        )
    return key, [plain.index(plain_joint_name(name)) for name in spec.state_names]


def _camera_features(data: StoredDataset, spec: BundleSpec) -> dict[str, str]:
    """Return the feature of each camera of the policy."""
    # As in training, a renamed feature replaces one that has the name already.
    keys = sorted(data.features, key=lambda key: key in spec.rename_map)
    known = {plain_camera_name(camera_name(_ours(key, spec))): key for key in keys}
    found = {}
    for camera in (camera.name for camera in spec.cameras if camera.present):
        key = known.get(plain_camera_name(camera))
        kind = None if key is None else data.features[key].get('dtype')
        if key is None or kind not in ('image', 'video'):
            cameras = [
                key for key, one in data.features.items() if one.get('dtype') in ('image', 'video')
            ]
            raise DatasetError(
                f"{data.info_path}: features: camera '{camera}' of the policy is missing; the data "
                f'set has {", ".join(map(camera_name, cameras)) or "none"}'
            )
        found[camera] = key
    return found


def _ours(key: str, spec: BundleSpec) -> str:
    """Return the policy's name of a feature of the training's data."""
    return spec.rename_map.get(key, key)


def _task(data: StoredDataset, spec: BundleSpec, file: Path, row: Mapping[str, Any]) -> str:
    with named(file):
        task = data.tasks[row['task_index']]
    if spec.prompt is not None and not task.strip():
        raise DatasetError(
            f'{file}: task_index: task {row["task_index"]} has no words, which the policy reads; '
            'name the tasks of the data set'
        )
    return task


def _fill_from_videos(
    data: StoredDataset, key: str, frames: Sequence[tuple[Path, dict[str, Any]]], bar: tqdm[Any]
) -> None:
    """Put a camera's frames into their rows, as PNG: they are read many times."""
    wanted: dict[Path, list[tuple[float, dict[str, Any]]]] = defaultdict(list)
    for file, row in frames:
        with named(file):
            video, begin_s = data.video(key, row['episode_index'])
            wanted[video].append((begin_s + row['timestamp'], row))
    for video, moments in wanted.items():
        moments.sort(key=lambda moment: moment[0])
        times_s = [time_s for time_s, _ in moments]
        decoded = read_frames(video, times_s, 0.5 / data.fps)
        for (_, row), pixels in zip(moments, decoded, strict=True):
            png = cv2.imencode('.png', pixels[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 1])[1]
            row[key] = {'bytes': png.tobytes()}
            bar.update()


def _bytes(cell: Mapping[str, Any]) -> bytes:
    data = cell['bytes']
    if not isinstance(data, bytes):
        raise ValueError('an image is not stored in the file')
    return data
