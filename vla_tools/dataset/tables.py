"""Tables of a data set: frames, episodes and tasks, as Arrow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from vla_tools.dataset.frames import DatasetFrame
from vla_tools.dataset.layout import ACTION, STATE, SUCCESS, Layout, image_key
from vla_tools.dataset.statistics import Statistics, vector_statistics


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
    # Of nothing but None it has no type by itself.
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

    Args:
        lengths: frames of the episodes.
        tasks: task number of each.
        first_index: index of its first frame in the data set.
        fps: frames a second.
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
