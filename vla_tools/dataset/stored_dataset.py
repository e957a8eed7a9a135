"""A data set in LeRobot's format, v2 or v3, on disk: features, tables of frames, tasks, videos."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vla_runtime.files.input_files import UnreadableFileError, read_text, whole_file
from vla_runtime.files.json_file import LARGEST_JSON, JsonError, read_json
from vla_runtime.files.quotes import one_line
from vla_tools.dataset.layout import INFO, TASKS, DatasetError

ANEW = 'copy or make the data set anew'
_TASK_LINES = 'meta/tasks.jsonl'
_EPISODE_TABLES = 'meta/episodes/*/*.parquet'


class StoredDataset:
    """A data set's folder.

    Attributes:
        features: `features` of info.json.
        tables: files of frames, in order.

    Raises DatasetError: no data set of version 2 or 3; names what is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / INFO
        if folder.is_file():
            raise DatasetError(
                f"{folder}: is a '{folder.suffix}' file; expected the folder of a LeRobot data "
                "set. Convert the data set to LeRobot's form (v2 or v3)"
            )
        if not path.is_file():
            raise DatasetError(f'{path}: is missing; {folder} is no data set in LeRobot format')
        try:
            info = read_json(path)
            version = info.get('codebase_version', str)
            features = info.mapping('features')
            for name in features.values:
                features.mapping(name).get('names', (list, dict), [])
            self.fps = float(info.get('fps', (int, float)))
            self._video_path = info.get('video_path', str, None)
            self._chunk_size = info.count('chunks_size', 1000)
        except JsonError as error:
            raise DatasetError(f'{error}; {ANEW}') from None
        if not version.startswith(('v2', 'v3')) or not self.fps > 0.0:
            raise DatasetError(
                f'{path}: codebase_version: {version}, fps: {self.fps:g}; expected v2 or v3, to '
                'which scripts of LeRobot convert, and more than 0'
            )
        self._is_v3 = version.startswith('v3')
        self.features: Mapping[str, Mapping[str, Any]] = features.values
        self.tables = sorted(folder.glob('data/*/*.parquet'))
        if not self.tables:
            raise DatasetError(
                f'{folder}: has no data/*/*.parquet, the files of its frames: meta/ alone is not '
                'enough; download data/ too (and videos/, where it has any)'
            )
        self._videos = cache(self._episodes)

    @property
    def info_path(self) -> Path:
        """Path of info.json."""
        return self.folder / INFO

    @cached_property
    def tasks(self) -> dict[int, str]:
        """Number of a task to its words."""
        lines = self.folder / _TASK_LINES
        if not self._is_v3 and lines.is_file():
            with named(lines):
                written = read_text(lines, LARGEST_JSON).splitlines()
                rows = [json.loads(line) for line in written if line.strip()]
                return {row['task_index']: str(row['task']) for row in rows}
        # LeRobot's own files call the column of texts by what pandas calls an index.
        with named(self.folder / TASKS):
            return {
                row.pop('task_index'): str(next(iter(row.values())))
                for row in pq.read_table(whole_file(self.folder / TASKS)).to_pylist()
            }

    def counts(self) -> list[int]:
        """Return the number of frames of each table."""
        found = []
        for file in self.tables:
            with named(file):
                found.append(pq.read_metadata(whole_file(file)).num_rows)
        return found

    @staticmethod
    def rows(file: Path, columns: Sequence[str], chosen: np.ndarray) -> list[dict[str, Any]]:
        """Return some frames of a table."""
        with named(file):
            present = pq.read_schema(whole_file(file)).names
            for name in columns:
                if name not in present:
                    raise DatasetError(f'{file}: {name}: is missing; {ANEW}')
            table = pq.read_table(file, columns=list(columns))
            rows: list[dict[str, Any]] = table.take(chosen).to_pylist()
            return rows

    def video(self, key: str, episode: int) -> tuple[Path, float]:
        """Return the file of a camera's frames of an episode, and where in it they begin (s)."""
        template = self._video_path
        if template is None:
            raise DatasetError(f'{self.info_path}: video_path: is missing; {ANEW}')
        with named(self.info_path):
            if not self._is_v3:
                place = template.format(
                    episode_chunk=episode // self._chunk_size, video_key=key, episode_index=episode
                )
                return self.folder / place, 0.0
        episodes = self._videos(key)
        if episode not in episodes:
            raise DatasetError(
                f'{self.folder}: {_EPISODE_TABLES} lack episode {episode}, of which it has frames; '
                f'{ANEW}'
            )
        chunk, file, begin_s = episodes[episode]
        with named(self.info_path):
            place = template.format(video_key=key, chunk_index=chunk, file_index=file)
        return self.folder / place, begin_s

    def _episodes(self, key: str) -> dict[int, tuple[int, int, float]]:
        """Return chunk, file and begin of each episode's video of a camera."""
        fields = [
            f'videos/{key}/{name}' for name in ('chunk_index', 'file_index', 'from_timestamp')
        ]
        found: dict[int, tuple[int, int, float]] = {}
        for file in sorted(self.folder.glob(_EPISODE_TABLES)):
            with named(file):
                table = pq.read_table(whole_file(file), columns=['episode_index', *fields])
                for row in table.to_pylist():
                    chunk, number, begin_s = (row[name] for name in fields)
                    found[row['episode_index']] = int(chunk), int(number), float(begin_s)
        return found


@contextmanager
def named(file: Path) -> Iterator[None]:
    """Name the file in the errors of what is read from it."""
    try:
        yield
    except DatasetError:
        raise
    except UnreadableFileError as error:
        raise DatasetError(f'{file}: {error}') from None
    except FileNotFoundError:
        raise DatasetError(f'{file}: is missing; {ANEW}') from None
    except KeyError as error:
        raise DatasetError(f'{file}: {error.args[0]}: is missing; {ANEW}') from None
    except (
        OSError,
        ValueError,
        TypeError,
        IndexError,
        AttributeError,
        StopIteration,
        pa.ArrowException,
    ) as error:
        reason = one_line(str(error), 200)
        raise DatasetError(f'{file}: cannot be read: {reason}; {ANEW}') from None
