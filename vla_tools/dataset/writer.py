"""Writes a data set of LeRobot's format v3, with the cameras' frames in the Parquet files.

Frames stay PNG, or a camera's JPEG: nothing is lost, and no video encoder is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from vla_runtime.files.atomic_write import whole_folder
from vla_tools.dataset.layout import (
    ACTION,
    DATA,
    EPISODES,
    FILE_MB,
    FILES_IN_A_CHUNK,
    INFO,
    STATE,
    STATISTICS,
    TASKS,
    DatasetError,
    DatasetFrame,
    EncodedImage,
    EpisodeFacts,
    Layout,
    image_key,
)
from vla_tools.dataset.tables import (
    FrameGroup,
    PixelStatistics,
    episode_table,
    frame_schema,
    index_statistics,
    is_sampled,
    plain,
    task_table,
    vector_statistics,
)

# Frames wait in memory for so many bytes; an episode that is smaller is one row group.
_GROUP_BYTES = 64 << 20


@contextmanager
def dataset_folder(path: Path, *, force: bool) -> Iterator[Path]:
    """Give a folder that replaces `path` when the block ends without an error.

    Raises DatasetError: not to be replaced, or no room.
    """
    path = path.resolve()
    check_replaceable(path, force)
    try:
        with whole_folder(path, lambda _: check_replaceable(path, force)) as folder:
            yield folder
    except OSError as error:
        raise DatasetError(f'{path}: cannot be written: {error.strerror or error}') from None


def check_replaceable(path: Path, force: bool) -> None:
    """Refuse to replace anything but a data set, and that only with `force` (DatasetError)."""
    if not path.exists() or not any(_inside(path)):
        return
    if not (path / INFO).is_file():
        raise DatasetError(f'{path} exists already, and is no data set: name another folder')
    if not force:
        raise DatasetError(f'{path} exists already: name another folder, or replace it (--force)')


def _inside(path: Path) -> Iterable[Path]:
    return path.iterdir() if path.is_dir() else (path,)


class DatasetWriter:
    """Writes a data set into an empty folder, one episode at a time."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.episodes = self.frames = 0
        self._folder, self._layout = folder, layout
        self._tasks: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []
        self._vectors: dict[str, list[np.ndarray]] = {STATE: [], ACTION: []}
        self._pixels = {camera: PixelStatistics() for camera in layout.cameras}
        self._schema = frame_schema(layout)
        self._file = -1
        self._parquet: pq.ParquetWriter | None = None

    def write(self, facts: EpisodeFacts, frames: Iterable[DatasetFrame]) -> None:
        """Write one episode; its actual frame count is kept where it is lower than `facts` says.

        Raises DatasetError: an image of another size than the layout's.
        """
        task = self._tasks.setdefault(facts.task, len(self._tasks))
        where = self._next_file()
        group = FrameGroup(self._schema)
        vectors: dict[str, list[np.ndarray]] = {STATE: [], ACTION: []}
        pixels = {camera: PixelStatistics() for camera in self._layout.cameras}
        count = 0
        for frame, is_last in _with_last(frames):
            for camera, image in frame.images.items():
                self._require_size(camera, image, facts)
                if is_sampled(count, facts.frames):
                    pixels[camera].add(image.pixels)
            vectors[STATE].append(frame.state)
            vectors[ACTION].append(frame.action)
            success = bool(facts.success and is_last) if self._layout.judged else None
            group.add(frame, success, (count / self._layout.fps, count, self.episodes, task))
            count += 1
            if group.size > _GROUP_BYTES:
                self._flush(group, count)
        if not count:
            return
        self._flush(group, count)
        self._remember(replace(facts, frames=count), where, vectors, pixels)

    def finish(self) -> None:
        """Write the files that need all episodes; DatasetError: there is none."""
        if self._parquet is not None:
            self._parquet.close()
        if not self.episodes:
            raise DatasetError('there is no episode to write')
        (self._folder / EPISODES).parent.mkdir(parents=True)
        pq.write_table(episode_table(self._rows), self._folder / EPISODES)
        pq.write_table(task_table(self._tasks), self._folder / TASKS)
        info = self._layout.info(self.episodes, self.frames, len(self._tasks))
        self._write_json(INFO, info)
        statistics = {name: vector_statistics(np.stack(v)) for name, v in self._vectors.items()}
        statistics |= {
            image_key(camera): found.statistics() for camera, found in self._pixels.items()
        }
        lengths, tasks = ([row[name] for row in self._rows] for name in ('length', 'task'))
        statistics |= index_statistics(lengths, tasks, 0, 0, self._layout.fps)
        self._write_json(STATISTICS, plain(statistics))

    def _require_size(self, camera: str, image: EncodedImage, facts: EpisodeFacts) -> None:
        height, width = image.pixels.shape[:2]
        wanted = self._layout.cameras[camera]
        if (height, width) != wanted:
            raise DatasetError(
                f"{facts.source}: camera '{camera}' has frames of {width}x{height} pixels, and of "
                f'{wanted[1]}x{wanted[0]} before; a data set has one size'
            )

    def _next_file(self) -> tuple[int, int]:
        """Return chunk and file of the next episode; a new file where the last one is full."""
        path = self._path(self._file)
        if self._parquet is not None and path.stat().st_size > FILE_MB << 20:
            self._parquet.close()
            self._parquet = None
        if self._parquet is None:
            self._file += 1
            path = self._path(self._file)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._parquet = pq.ParquetWriter(path, self._schema, compression='snappy')
        return divmod(self._file, FILES_IN_A_CHUNK)

    def _path(self, number: int) -> Path:
        chunk, file = divmod(max(number, 0), FILES_IN_A_CHUNK)
        return self._folder / DATA.format(chunk_index=chunk, file_index=file)

    def _flush(self, group: FrameGroup, count: int) -> None:
        assert self._parquet is not None
        rows = group.take(self.frames + count)
        if rows.num_rows:
            self._parquet.write_table(rows)

    def _remember(
        self,
        facts: EpisodeFacts,
        where: tuple[int, int],
        vectors: dict[str, list[np.ndarray]],
        pixels: dict[str, PixelStatistics],
    ) -> None:
        task = self._tasks[facts.task]
        statistics = {name: vector_statistics(np.stack(rows)) for name, rows in vectors.items()}
        statistics |= {image_key(camera): one.statistics() for camera, one in pixels.items()}
        statistics |= index_statistics(
            [facts.frames], [task], self.episodes, self.frames, self._layout.fps
        )
        self._rows.append(
            {
                'episode_index': self.episodes,
                'tasks': [facts.task],
                'length': facts.frames,
                'data/chunk_index': where[0],
                'data/file_index': where[1],
                'dataset_from_index': self.frames,
                'dataset_to_index': self.frames + facts.frames,
                'meta/episodes/chunk_index': 0,
                'meta/episodes/file_index': 0,
                'success': facts.success,
                'source': facts.source,
                'start_ns': facts.start_ns,
                'task': task,
                'statistics': plain(statistics),
            }
        )
        for name, rows in vectors.items():
            self._vectors[name] += rows
        for camera, found in pixels.items():
            self._pixels[camera].merge(found)
        self.episodes += 1
        self.frames += facts.frames

    def _write_json(self, name: str, document: Mapping[str, Any]) -> None:
        text = json.dumps(document, indent=4) + '\n'
        (self._folder / name).write_text(text, encoding='utf-8')


def _with_last(frames: Iterable[DatasetFrame]) -> Iterator[tuple[DatasetFrame, bool]]:
    """Yield each frame with whether it is the last one."""
    waiting: DatasetFrame | None = None
    for frame in frames:
        if waiting is not None:
            yield waiting, False
        waiting = frame
    if waiting is not None:
        yield waiting, True
