"""Frames of a video at some times, each decoded from the key frame before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vla_runtime.files.input_files import UnreadableFileError, whole_file
from vla_runtime.files.quotes import one_line
from vla_tools.dataset.errors import DatasetError

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer


def read_frames(path: Path, times_s: Sequence[float], tolerance_s: float) -> Iterator[np.ndarray]:
    """Yield the frame (height, width, 3) uint8, RGB, that is nearest to each time.

    Args:
        path: the video.
        times_s: seconds from its first frame, rising.
        tolerance_s: largest distance of a frame from its time.

    Raises:
        DatasetError: the video cannot be read, or has no frame at one of the times.
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
    # The last two that were decoded.
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
