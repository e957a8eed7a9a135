"""Observations of a data set in LeRobot's format v3, as a policy sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.dataset.errors import DatasetError
from vla_runtime.dataset.layout import INFO, STATE, TASKS, image_key
from vla_runtime.files.json_file import JsonError, read_json
from vla_runtime.files.quotes import one_line
from vla_runtime.types import Observation

_ANEW = 'copy or make the data set anew'


@dataclass(frozen=True)
class StoredObservation:
    """An observation whose images are still encoded.

    Attributes:
        images: camera to the PNG or JPEG.
        state: (state,) float32, in the bundle's order.
        task: the instruction.
        file: where it is stored, for messages.
    """

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
            raise DatasetError(f'{self.file}: {image_key(camera)}: a frame is no image; {_ANEW}')
        return np.ascontiguousarray(image[..., ::-1])


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
    counts = []
    for file in files:
        with _named(file):
            counts.append(pq.read_metadata(file).num_rows)
    rows = np.cumsum([0, *counts])
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
            for row in _rows(file, columns, mine):
                with _named(file):
                    found.append(
                        StoredObservation(
                            {camera: _bytes(row[image_key(camera)]) for camera in cameras},
                            np.asarray(row[STATE], dtype=np.float32)[order],
                            tasks[row['task_index']],
                            file,
                        )
                    )
    np.random.default_rng(seed).shuffle(found)
    return found


def _features(folder: Path) -> Mapping[str, Any]:
    path = folder / INFO
    if not path.is_file():
        raise DatasetError(f'{path}: is missing; {folder} is no data set in LeRobot format v3')
    try:
        info = read_json(path)
        version = info.get('codebase_version', str)
        features = info.mapping('features')
        for name in features.values:
            features.mapping(name).get('names', (list, dict), [])
    except JsonError as error:
        raise DatasetError(f'{error}; {_ANEW}') from None
    if not version.startswith('v3'):
        raise DatasetError(f'{path}: codebase_version: {version}, expected v3')
    return features.values


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
    with _named(folder / TASKS):
        return {
            row.pop('task_index'): str(next(iter(row.values())))
            for row in pq.read_table(folder / TASKS).to_pylist()
        }


def _rows(file: Path, columns: list[str], chosen: np.ndarray) -> list[dict[str, Any]]:
    with _named(file):
        present = pq.read_schema(file).names
        for name in columns:
            if name not in present:
                raise DatasetError(f'{file}: {name}: is missing; {_ANEW}')
        table = pq.read_table(file, columns=columns)
        rows: list[dict[str, Any]] = table.take(chosen).to_pylist()
        return rows


def _bytes(cell: Mapping[str, Any]) -> bytes:
    data = cell['bytes']
    if not isinstance(data, bytes):
        raise ValueError('an image is not stored in the file')
    return data


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Name the file in the errors of what is read from it."""
    try:
        yield
    except DatasetError:
        raise
    except KeyError as error:
        raise DatasetError(f'{file}: {error.args[0]}: is missing; {_ANEW}') from None
    except (OSError, ValueError, TypeError, IndexError, StopIteration, pa.ArrowException) as error:
        reason = one_line(str(error), 200)
        raise DatasetError(f'{file}: cannot be read: {reason}; {_ANEW}') from None
