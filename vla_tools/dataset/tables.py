"""Tables of a data set: frames, episodes and tasks, as Arrow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from vla_tools.dataset.layout import (
    ACTION,
    INTERVENTION,
    STATE,
    SUCCESS,
    DatasetFrame,
    Layout,
    image_key,
)

# --- Statistics as LeRobot writes them: exact, over all frames of vectors; of pixels a histogram of
# about a hundred frames an episode.

QUANTILES = {'q01': 0.01, 'q10': 0.1, 'q50': 0.5, 'q90': 0.9, 'q99': 0.99}
_SAMPLED_FRAMES = 100
# Pixels that a camera's frame is thinned to in each direction.
_SAMPLED_PIXELS = 150
_LEVELS = np.arange(256) / 255.0

Statistics = dict[str, np.ndarray]


def vector_statistics(values: np.ndarray) -> Statistics:
    """Return statistics over the rows of (n, columns), n at least 1.

    `min`, `max`, `mean`, `std` and quantiles are (columns,) float64; `count` is (1,) int64.
    """
    values = np.asarray(values, dtype=np.float64)
    found = {
        'min': values.min(axis=0),
        'max': values.max(axis=0),
        'mean': values.mean(axis=0),
        'std': values.std(axis=0),
        'count': np.array([len(values)]),
    }
    return found | {name: np.quantile(values, q, axis=0) for name, q in QUANTILES.items()}


def is_sampled(index: int, frames: int) -> bool:
    """Return whether a frame of an episode counts for its cameras' statistics."""
    return index % max(1, frames // _SAMPLED_FRAMES) == 0


class PixelStatistics:
    """Levels of one camera's pixels, by channel."""

    def __init__(self) -> None:
        self.frames = 0
        self._histogram = np.zeros((3, 256), dtype=np.int64)

    def add(self, pixels: np.ndarray) -> None:
        """Count a frame, (height, width, 3) uint8."""
        rows, columns = (max(1, size // _SAMPLED_PIXELS) for size in pixels.shape[:2])
        for channel in range(3):
            thinned = np.ascontiguousarray(pixels[::rows, ::columns, channel])
            self._histogram[channel] += np.bincount(thinned.ravel(), minlength=256)
        self.frames += 1

    def merge(self, other: PixelStatistics) -> None:
        """Count all that another one has counted."""
        self.frames += other.frames
        self._histogram += other._histogram

    def statistics(self) -> Statistics:
        """Return the same as `vector_statistics`, each (3, 1, 1), of levels from 0 to 1."""
        shares = self._histogram / self._histogram.sum(axis=1, keepdims=True)
        mean = shares @ _LEVELS
        below = shares.cumsum(axis=1)
        found = {
            'min': np.array([_LEVELS[np.flatnonzero(row)[0]] for row in self._histogram]),
            'max': np.array([_LEVELS[np.flatnonzero(row)[-1]] for row in self._histogram]),
            'mean': mean,
            'std': np.sqrt(np.maximum(shares @ _LEVELS**2 - mean**2, 0.0)),
        }
        for name, q in QUANTILES.items():
            found[name] = _LEVELS[np.minimum((below < q - 1e-12).sum(axis=1), 255)]
        shaped = {name: values.reshape(3, 1, 1) for name, values in found.items()}
        return shaped | {'count': np.array([self.frames])}


def frame_schema(layout: Layout) -> pa.Schema:
    """Columns of the frames, with what the library `datasets` reads of them."""
    fields: list[tuple[str, Any]] = []
    described: dict[str, Any] = {}
    for name, feature in layout.features().items():
        kind, length = feature['dtype'], feature['shape'][0]
        if kind == 'image':
            fields.append((name, pa.struct([('bytes', pa.binary()), ('path', pa.string())])))
            described[name] = {'_type': 'Image'}
            continue
        value = {'dtype': kind, '_type': 'Value'}
        arrow = pa.bool_() if kind == 'bool' else pa.type_for_alias(kind)
        if name in (STATE, ACTION) and length > 1:
            fields.append((name, pa.list_(arrow, length)))
            described[name] = {'feature': value, 'length': length, '_type': 'Sequence'}
        else:
            fields.append((name, arrow))
            described[name] = value
    metadata = {'huggingface': json.dumps({'info': {'features': described}})}
    return pa.schema(fields, metadata=metadata)


class FrameGroup:
    """Frames that become one row group."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._columns: dict[str, list[Any]] = {name: [] for name in schema.names}
        self.size = 0

    def add(
        self, frame: DatasetFrame, success: bool | None, indices: tuple[float, int, int, int]
    ) -> None:
        """Add a frame; `indices` are its timestamp, frame, episode and task."""
        row: dict[str, Any] = {STATE: _cell(frame.state), ACTION: _cell(frame.action)}
        for camera, image in frame.images.items():
            row[image_key(camera)] = {'bytes': image.data, 'path': None}
            self.size += len(image.data)
        if success is not None:
            row[SUCCESS] = success
        if INTERVENTION in self._columns:
            row[INTERVENTION] = frame.intervention
        names = ('timestamp', 'frame_index', 'episode_index', 'task_index')
        row |= dict(zip(names, indices, strict=True))
        for name, value in row.items():
            self._columns[name].append(value)

    def take(self, end: int) -> pa.Table:
        """Return the frames; the next one in the data set has the index `end`."""
        count = len(self._columns['frame_index'])
        self._columns['index'] = list(range(end - count, end))
        table = pa.table(
            [pa.array(self._columns[f.name], f.type) for f in self._schema], schema=self._schema
        )
        self._columns = {name: [] for name in self._schema.names}
        self.size = 0
        return table


def _cell(values: np.ndarray) -> Any:
    """Return a single number as such, not as a list: LeRobot reads one-column features so."""
    return values.tolist() if len(values) > 1 else float(values[0])


def episode_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Make the table of episodes; `statistics` of a row becomes a column for each number."""
    flat = []
    for row in rows:
        named = {key: value for key, value in row.items() if key not in ('statistics', 'task')}
        for feature, found in row['statistics'].items():
            named |= {f'stats/{feature}/{name}': value for name, value in found.items()}
        flat.append(named)
    columns = {name: pa.array([row[name] for row in flat]) for name in flat[0]}
    # All None would have no type.
    columns['success'] = columns['success'].cast(pa.bool_())
    return pa.table(columns)


def task_table(tasks: Mapping[str, int]) -> pa.Table:
    """Make the table of tasks, whose texts are the index when pandas reads it."""
    table = pa.table(
        {
            'task_index': pa.array(list(tasks.values()), pa.int64()),
            'task': pa.array(list(tasks), pa.string()),
        }
    )

    def column(name: str, kind: str, numpy_type: str) -> dict[str, Any]:
        return {
            'name': name,
            'field_name': name,
            'pandas_type': kind,
            'numpy_type': numpy_type,
            'metadata': None,
        }

    described = {
        'index_columns': ['task'],
        'column_indexes': [],
        'columns': [column('task_index', 'int64', 'int64'), column('task', 'unicode', 'object')],
        'creator': {'library': 'pyarrow', 'version': pa.__version__},
        'pandas_version': '2.0.0',
    }
    return table.replace_schema_metadata({'pandas': json.dumps(described)})


def index_statistics(
    lengths: Sequence[int], tasks: Sequence[int], first_episode: int, first_index: int, fps: int
) -> dict[str, Statistics]:
    """Return statistics of the index columns.

    `lengths`: frames of the episodes; `first_index`: of the first frame in the data set.
    """
    within = np.concatenate([np.arange(length) for length in lengths])
    columns = {
        'timestamp': within / fps,
        'frame_index': within,
        'episode_index': np.repeat(np.arange(first_episode, first_episode + len(lengths)), lengths),
        'index': first_index + np.arange(len(within)),
        'task_index': np.repeat(tasks, lengths),
    }
    return {name: vector_statistics(values[:, None]) for name, values in columns.items()}


def plain(statistics: Mapping[str, Statistics]) -> dict[str, dict[str, Any]]:
    """Return statistics as lists, for JSON and Arrow."""
    return {
        feature: {name: values.tolist() for name, values in found.items()}
        for feature, found in statistics.items()
    }
