"""Split a bag into episodes, and choose the bag's data for each of their frames.

An episode begins with an instruction or an executor's episode, and ends with the next of these, a
verdict or the bag. It is cut in two where a source is missing for too long, and where nobody drove
the robot. Frames lie on an even
grid; each takes the newest data of every source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vla_tools.dataset.bag_contents import BagContents, Event, JointSeries, newest

# Measured positions come far more often; commands too, once the robot is started.
_MOST_AGE_NS = 500_000_000


@dataclass(frozen=True)
class Grid:
    """Rate and limits of the frames taken from a bag, as in `DatasetOptions`.

    `task` is empty for a policy without language; None: as the bag says.
    """

    fps: int
    frame_age_ns: int
    shortest_s: float
    measured_actions: bool
    task: str | None


@dataclass(frozen=True)
class PlannedEpisode:
    """An episode of n frames before its pixels are read.

    `success` is None where nobody judged; `times_ns` (n,); `stamps_ns`: camera to (n,); `state`
    (n, joints) and `action` (n, columns) float32; `intervention` (n,) bool: a leader led.
    """

    task: str
    success: bool | None
    times_ns: np.ndarray
    stamps_ns: Mapping[str, np.ndarray]
    state: np.ndarray
    action: np.ndarray
    intervention: np.ndarray


def plan_episodes(contents: BagContents, grid: Grid) -> tuple[list[PlannedEpisode], int]:
    """Return a bag's episodes, and the number of those that are too short."""
    planned, short = [], 0
    for begin_ns, end_ns, task, success in _spans(contents, grid.task):
        runs = list(_runs(contents, grid, begin_ns, end_ns))
        for number, run in enumerate(runs):
            # The verdict is on the last run.
            verdict = success if number == len(runs) - 1 else None
            if len(run) / grid.fps < grid.shortest_s or len(run) < 2:
                short += 1
            else:
                planned.append(_episode(contents, grid, run, task, verdict))
    return planned, short


def _spans(
    contents: BagContents, given_task: str | None
) -> Iterator[tuple[int, int, str, bool | None]]:
    """Yield begin, end, task and verdict of each attempt at a task."""
    begin_ns, end_ns = _extent(contents)
    task = given_task
    open_since: int | None = begin_ns
    closing = Event(end_ns, 'end')
    for event in (*contents.events, closing):
        if open_since is not None and task is not None and event.time_ns > open_since:
            yield open_since, min(event.time_ns, end_ns), task, event.success
        if event.kind == 'instruction' and given_task is None:
            task = event.text or None
        # After a verdict no attempt is open until the next begins.
        open_since = None if event.kind == 'verdict' else max(event.time_ns, begin_ns)


def _extent(contents: BagContents) -> tuple[int, int]:
    """Return first and last time at which anything was measured."""
    times = [series.times_ns for series in contents.states]
    return min(one[0] for one in times), max(one[-1] for one in times)


def _runs(contents: BagContents, grid: Grid, begin_ns: int, end_ns: int) -> Iterator[np.ndarray]:
    """Yield times of frames between which no source is missing, and somebody drove."""
    # From the first frame that everything is there for, so that it is as fresh as it was.
    begin_ns = max(begin_ns, *(_first(series.times_ns) for series in _all_series(contents, grid)))
    for first_ns, last_ns in _stretches(contents.states[0].times_ns, begin_ns, end_ns):
        count = int((last_ns - first_ns) * grid.fps / 1e9) + 1
        times = first_ns + np.round(np.arange(count) * (1e9 / grid.fps)).astype(np.int64)
        usable = np.ones(count, dtype=bool)
        for series in _all_series(contents, grid):
            _, ages = newest(np.array(series.times_ns, dtype=np.int64), times)
            usable &= ages <= _MOST_AGE_NS
        for stamps in contents.frames.values():
            _, ages = newest(stamps, times)
            usable &= ages <= grid.frame_age_ns
        usable &= ~contents.drivers.nobody(times)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], usable.astype(np.int8), [0]))))
        for first, last in edges.reshape(-1, 2):
            yield times[first:last]


def _stretches(times_ns: Sequence[int], begin_ns: int, end_ns: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each stretch without a gap, within these bounds.

    One damaged stamp may be years away: no grid goes over such a gap.
    """
    times = np.array(times_ns, dtype=np.int64)
    after = np.flatnonzero(np.diff(times) > _MOST_AGE_NS) + 1
    for part in np.split(times, after):
        first_ns = max(begin_ns, int(part[0]))
        last_ns = min(end_ns, int(part[-1]) + _MOST_AGE_NS)
        if first_ns <= last_ns:
            yield first_ns, last_ns


def _first(times_ns: Sequence[int]) -> int:
    return times_ns[0] if times_ns else 0


def _all_series(contents: BagContents, grid: Grid) -> list[JointSeries]:
    return [*contents.states, *(() if grid.measured_actions else contents.actions)]


def _episode(
    contents: BagContents, grid: Grid, times: np.ndarray, task: str, success: bool | None
) -> PlannedEpisode:
    state = _columns(contents.states, times)
    if grid.measured_actions:
        # The next measured positions; the last frame has none.
        times, action, state = times[:-1], state[1:], state[:-1]
    else:
        action = _columns(contents.actions, times)
    stamps = {camera: known[newest(known, times)[0]] for camera, known in contents.frames.items()}
    led = contents.drivers.leads(times)
    return PlannedEpisode(task, success, times, stamps, state, action, led)


def _columns(series: Sequence[JointSeries], times: np.ndarray) -> np.ndarray:
    return np.concatenate([one.at(times)[0] for one in series], axis=1)
