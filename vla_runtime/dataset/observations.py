"""Observations of a data set in LeRobot's format v3, as a policy sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow.parquet as pq

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.dataset.errors import DatasetError
from vla_runtime.dataset.layout import INFO, STATE, TASKS, image_key
from vla_runtime.types import Observation


@dataclass(frozen=True)
class StoredObservation:
    """An observation whose images are still encoded.

    Attributes:
        images: camera to the PNG or JPEG.
        state: (state,) float32, in the bundle's order.
        task: the instruction.
    """

    images: Mapping[str, bytes]
    state: np.ndarray
    task: str

    def decode(self) -> Observation:
        """Return it with its pixels."""
        return Observation(
            images={camera: _pixels(data) for camera, data in self.images.items()},
            state=self.state,
            instruction=self.task,
        )


def read_observations(
    folder: Path, spec: BundleSpec, count: int, seed: int = 0
) -> list[StoredObservation]:
    """Draw frames of a data set, all of them where it has fewer.

    Args:
        folder: data set whose cameras and state have the bundle's names.
        spec: the bundle's.
        count: most frames.
        seed: of the draw.

    Raises:
        DatasetError: no data set of version 3, a camera or a state that is missing, or cameras
            that are stored as videos; names it.
    """
    features = _features(folder)
    order = _state_order(folder, features, spec)
    cameras = [camera.name for camera in spec.cameras if camera.present]
    for camera in cameras:
        kind = features.get(image_key(camera), {}).get('dtype')
        if kind != 'image':
            raise DatasetError(
                f"{folder / INFO}: features: camera '{camera}' of the policy is "
                + ('missing' if kind is None else f"stored as '{kind}', and is read as images only")
            )
    files = sorted(folder.glob('data/*/*.parquet'))
    rows = np.cumsum([0, *(pq.read_metadata(file).num_rows for file in files)])
    total = int(rows[-1])
    if not total:
        raise DatasetError(f'{folder}: has no frames')
    drawn = np.sort(np.random.default_rng(seed).permutation(total)[:count])
    tasks = _tasks(folder)
    found: list[StoredObservation] = []
    for number, file in enumerate(files):
        mine = drawn[(drawn >= rows[number]) & (drawn < rows[number + 1])] - rows[number]
        if len(mine):
            columns = [STATE, 'task_index', *(image_key(camera) for camera in cameras)]
            for row in pq.read_table(file, columns=columns).take(mine).to_pylist():
                found.append(
                    StoredObservation(
                        {camera: row[image_key(camera)]['bytes'] for camera in cameras},
                        np.asarray(row[STATE], dtype=np.float32)[order],
                        tasks[row['task_index']],
                    )
                )
    np.random.default_rng(seed).shuffle(found)
    return found


def _features(folder: Path) -> dict[str, Any]:
    path = folder / INFO
    if not path.is_file():
        raise DatasetError(f'{path}: is missing; {folder} is no data set in LeRobot format v3')
    info = json.loads(path.read_text(encoding='utf-8'))
    if not str(info.get('codebase_version', '')).startswith('v3'):
        raise DatasetError(f'{path}: codebase_version: {info.get("codebase_version")}, expected v3')
    features: dict[str, Any] = info['features']
    return features


def _state_order(folder: Path, features: Mapping[str, Any], spec: BundleSpec) -> list[int]:
    names = list(features.get(STATE, {}).get('names') or ())
    missing = [name for name in spec.state_names if name not in names]
    if missing:
        raise DatasetError(
            f'{folder / INFO}: features.{STATE}.names: {names} lack {missing} of the policy'
        )
    return [names.index(name) for name in spec.state_names]


def _tasks(folder: Path) -> dict[int, str]:
    # LeRobot's own files call the column of texts by what pandas calls an index.
    return {
        row.pop('task_index'): str(next(iter(row.values())))
        for row in pq.read_table(folder / TASKS).to_pylist()
    }


def _pixels(data: bytes) -> np.ndarray:
    image = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise DatasetError('a frame of the data set is no image')
    return np.ascontiguousarray(image[..., ::-1])
