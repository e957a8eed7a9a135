"""A data set of images made one of videos, as LeRobot's formats v2.1 and v3.0 have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import av
import cv2
import numpy as np
import pyarrow.parquet as pq

from vla_tools.dataset.layout import EPISODES, INFO, TASKS

V21, V30 = 'v2.1', 'v3.0'
_PATHS = {
    V21: 'videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4',
    V30: 'videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4',
}


def make_videos(folder: Path, version: Literal['v2.1', 'v3.0']) -> None:
    """Move the images of a data set of format v3.0, of one table, into lossless videos."""
    info = json.loads((folder / INFO).read_text())
    (table_path,) = folder.glob('data/*/*.parquet')
    table = pq.read_table(table_path)
    keys = [key for key, one in info['features'].items() if one['dtype'] == 'image']
    episodes = table['episode_index'].to_pylist()
    begins = {}
    for number in sorted(set(episodes)):
        at = episodes.index(number)
        begins[number] = at, at + episodes.count(number)
    for key in keys:
        info['features'][key]['dtype'] = 'video'
        images = [_pixels(cell) for cell in table[key].to_pylist()]
        if version == V30:
            path = folder / _PATHS[V30].format(video_key=key, chunk_index=0, file_index=0)
            write_video(path, images, info['fps'])
            continue
        for number, (first, end) in begins.items():
            place = _PATHS[V21].format(episode_chunk=0, video_key=key, episode_index=number)
            write_video(folder / place, images[first:end], info['fps'])
    plain = table.drop_columns(keys)
    if version == V30:
        pq.write_table(plain, table_path)
        _add_video_places(folder, keys, begins, info['fps'])
    else:
        table_path.unlink()
        for number, (first, end) in begins.items():
            path = folder / f'data/chunk-000/episode_{number:06d}.parquet'
            pq.write_table(plain.slice(first, end - first), path)
        tasks = pq.read_table(folder / TASKS).to_pylist()
        (folder / TASKS).unlink()
        lines = '\n'.join(json.dumps(task) for task in tasks)
        (folder / 'meta' / 'tasks.jsonl').write_text(lines + '\n')
    info.update(codebase_version=version, video_path=_PATHS[version])
    (folder / INFO).write_text(json.dumps(info))


def write_video(path: Path, images: Sequence[np.ndarray], fps: int) -> None:
    """Encode frames (height, width, 3) uint8, bit for bit, a key frame every third."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), 'w') as container:
        stream = container.add_stream('libx264rgb', rate=fps, options={'qp': '0', 'g': '3'})
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt = 'rgb24'
        stream.time_base = Fraction(1, fps)
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format='rgb24')))
        container.mux(stream.encode())


def _pixels(cell: dict[str, Any]) -> np.ndarray:
    data = np.frombuffer(cell['bytes'], dtype=np.uint8)
    return np.ascontiguousarray(cv2.imdecode(data, cv2.IMREAD_COLOR)[..., ::-1])


def _add_video_places(
    folder: Path, keys: Sequence[str], begins: dict[int, tuple[int, int]], fps: int
) -> None:
    """Say in the table of episodes where each begins in its video."""
    table = pq.read_table(folder / EPISODES)
    for key in keys:
        spans = [begins[number] for number in table['episode_index'].to_pylist()]
        for name, values in (
            ('chunk_index', [0] * len(spans)),
            ('file_index', [0] * len(spans)),
            ('from_timestamp', [first / fps for first, _ in spans]),
            ('to_timestamp', [end / fps for _, end in spans]),
        ):
            table = table.append_column(f'videos/{key}/{name}', [values])
    pq.write_table(table, folder / EPISODES)
