"""Demonstrations of Meta-World's scripted experts as a data set in LeRobot's format.

An episode is a function of (seed, task, number). Shards are made in interruptible processes, and
the writer of `to-dataset` joins them. `labels.npz` has what no robot knows: object and goal, in
the room and in the images, for the first two stages of training, and positive tags.

As in DART (arXiv 1703.09327) executed commands carry noise that recorded actions do not, so the
policy learns to come back; half of the episodes have a shove. Good episodes are at full speed;
poor ones are slow and noisy, or fail.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import numpy as np
import pyarrow.parquet as pq
from tqdm import tqdm

from vla_runtime.files.atomic_write import atomic_write, write_text
from vla_runtime.files.json_file import read_json
from vla_runtime.processes.workers import workers
from vla_tabletop.metaworld.simulator import (
    ACTION_NAMES,
    CAMERAS,
    FULL_SPEED_M_S,
    IMAGE_SIZE,
    STATE_NAMES,
    STEP_TICKS,
    STEP_TIME_S,
    Expert,
    Simulator,
)
from vla_tabletop.metaworld.tasks import TASKS, TaskName, sample_instruction
from vla_tools.dataset.layout import (
    ACTION,
    DATA,
    STATE,
    DatasetFrame,
    EncodedImage,
    EpisodeFacts,
    Layout,
    image_key,
)
from vla_tools.dataset.writer import DatasetWriter, check_replaceable, dataset_folder

LABELS_FILE = 'labels.npz'
PLAN_FILE = 'plan.json'

_POOR_SHARE = 0.3
_POOR_PACE = (0.4, 0.7)
_NOISE = (0.0, 0.1, 0.25)  # of full speed
_POOR_NOISE = 0.3
_NOISE_MEMORY = 0.8
_ATTEMPTS = 5
_WIDE_START_SHARE = 0.5
_WIDE_START_TICKS = (4, 14)
# One shove within the first steps, at full speed in a random direction.
_SHOVE_SHARE = 0.5
_SHOVE_BEGINS = (4, 40)
_SHOVE_STEPS = (3, 8)
_MOST_STEPS = 110
# After success, so that the last chunks are not all padding.
_STEPS_BEYOND = 6
_NS = 1_000_000_000


@dataclass(frozen=True)
class DataPlan:
    """Settings of a data set; raise `format` when tasks, cameras or recording change."""

    seed: int = 0
    episodes_per_task: int = 200
    episodes_per_shard: int = 10
    format: int = 2

    def shards(self) -> list[tuple[TaskName, int]]:
        """Task and first episode of each shard; tasks take turns."""
        firsts = range(0, self.episodes_per_task, self.episodes_per_shard)
        return [(task, first) for first in firsts for task in TASKS]


@dataclass(frozen=True)
class Demonstrations:
    """A data set in memory.

    Attributes:
        images: (F, 2, 64, 64, 3) uint8, in the order of `CAMERAS`.
        state: (F, 4) float32; action (F, 4) float32, the expert's.
        points_m: (F, 2, 3) object and goal; pixel (F, 2, 2, 2) their image positions.
        episode: (F,) episode number; tasks and instruction are per episode.
        task: (E,) index into `TASKS`.
        positive: (E,) bool, the advantage tag.
    """

    images: np.ndarray
    state: np.ndarray
    action: np.ndarray
    points_m: np.ndarray
    pixel: np.ndarray
    episode: np.ndarray
    task: np.ndarray
    positive: np.ndarray
    success: np.ndarray


def generate(
    folder: Path, plan: DataPlan, processes: int, progress: bool = True, force: bool = False
) -> None:
    """Write the data set; its shards stay beside it until it is complete.

    Raises ValueError: the folder holds another plan's data set, or something else.
    """
    if not force:
        check_plan(folder, plan)
        if (folder / PLAN_FILE).exists():
            return
    check_replaceable(folder, force)
    shards = folder.with_name(folder.name + '.shards')
    shards.mkdir(parents=True, exist_ok=True)
    paths = {shard: _shard_path(shards, plan, shard) for shard in plan.shards()}
    missing = [shard for shard, path in paths.items() if not path.exists()]
    with tqdm(total=len(paths), initial=len(paths) - len(missing), unit='shard',
              disable=not progress) as bar, workers(processes) as submit:  # fmt: skip
        futures = [submit(_write_shard, paths[shard], plan, shard) for shard in missing]
        for future in as_completed(futures):
            future.result()
            bar.update()
    _merge(folder, plan, list(paths.values()), force)
    shutil.rmtree(shards)


def read_plan(folder: Path) -> DataPlan:
    """Read the settings of a finished data set."""
    return DataPlan(**dict(read_json(folder / PLAN_FILE).values))


def check_plan(folder: Path, plan: DataPlan) -> None:
    """Refuse a folder with a data set of another plan (ValueError names both)."""
    if (folder / PLAN_FILE).exists() and (found := read_plan(folder)) != plan:
        raise ValueError(
            f'{folder}: holds a data set of {found}, asked for {plan}; give the same arguments, or '
            'another folder'
        )


def read(folder: Path) -> Demonstrations:
    """Read a data set of `generate`; FileNotFoundError: none, or incomplete."""
    if not (folder / PLAN_FILE).exists():
        raise FileNotFoundError(
            f'{folder}: is no finished data set; make it: ./run metaworld vla_runtime '
            f'demonstrations --world metaworld --out {folder}'
        )
    files = sorted(folder.glob(DATA.split('{')[0] + '*/*.parquet'))
    columns: dict[str, list[np.ndarray]] = {'state': [], 'action': [], 'images': [], 'episode': []}
    for file in files:
        table = pq.read_table(file)
        columns['state'].append(np.stack(table[STATE].to_numpy()))
        columns['action'].append(np.stack(table[ACTION].to_numpy()))
        columns['episode'].append(table['episode_index'].to_numpy())
        views = [_decode(table[image_key(camera)].to_pylist()) for camera in CAMERAS]
        columns['images'].append(np.stack(views, axis=1))
    frames = {name: np.concatenate(parts) for name, parts in columns.items()}
    with np.load(folder / LABELS_FILE, allow_pickle=False) as labels:
        return Demonstrations(**frames, **dict(labels))


def _decode(cells: list[dict[str, bytes]]) -> np.ndarray:
    out = np.empty((len(cells), IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    for image, cell in zip(out, cells, strict=True):
        png = np.frombuffer(cell['bytes'], dtype=np.uint8)
        image[:] = np.asarray(cv2.imdecode(png, cv2.IMREAD_COLOR))[..., ::-1]
    return out


def _merge(folder: Path, plan: DataPlan, shards: list[Path], force: bool) -> None:
    layout = Layout(
        robot='metaworld_sawyer',
        fps=round(1 / STEP_TIME_S),
        cameras=dict.fromkeys(CAMERAS, (IMAGE_SIZE, IMAGE_SIZE)),
        state=STATE_NAMES,
        action=ACTION_NAMES,
        units={},
        judged=True,
    )
    labels: dict[str, list[np.ndarray]] = {
        name: [] for name in ('points_m', 'pixel', 'task', 'positive', 'success')
    }
    with dataset_folder(folder, force=force) as target:
        writer = DatasetWriter(target, layout)
        for path in shards:
            with np.load(path, allow_pickle=False) as file:
                shard = dict(file)
            for name, parts in labels.items():
                parts.append(shard[name])
            for row, number in enumerate(np.unique(shard['episode'])):
                mine = shard['episode'] == number
                facts = EpisodeFacts(
                    task=str(shard['instruction'][row]),
                    frames=int(mine.sum()),
                    success=bool(shard['success'][row]),
                    source=f'{TASKS[shard["task"][row]]}, seed {plan.seed}, episode {number}',
                    start_ns=_NS,
                )
                writer.write(facts, _frames({n: shard[n][mine] for n in _FRAME_ARRAYS}))
        writer.finish()
        with atomic_write(target / LABELS_FILE) as out:
            np.savez_compressed(
                out, allow_pickle=False, **{n: np.concatenate(p) for n, p in labels.items()}
            )
        write_text(target / PLAN_FILE, json.dumps(asdict(plan)) + '\n')


_FRAME_ARRAYS = ('images', 'state', 'action')


def _frames(episode: dict[str, np.ndarray]) -> Iterator[DatasetFrame]:
    for images, state, action in zip(*(episode[name] for name in _FRAME_ARRAYS), strict=True):
        encoded = {
            camera: EncodedImage(cv2.imencode('.png', image[..., ::-1])[1].tobytes(), image)
            for camera, image in zip(CAMERAS, images, strict=True)
        }
        yield DatasetFrame(encoded, state, action)


def _shard_path(folder: Path, plan: DataPlan, shard: tuple[TaskName, int]) -> Path:
    task, first = shard
    # The whole plan: the last shard of a task is shorter where the plan has fewer episodes.
    settings = '_'.join(map(str, asdict(plan).values()))
    return folder / f'{settings}_{task}_{first:05d}.npz'


def _write_shard(path: Path, plan: DataPlan, shard: tuple[TaskName, int]) -> None:
    task, first = shard
    simulator, expert = Simulator(), Expert(task)
    numbers = range(first, min(first + plan.episodes_per_shard, plan.episodes_per_task))
    episodes = [_record(simulator, expert, task, plan.seed, number) for number in numbers]
    simulator.close()
    arrays = {name: np.concatenate([one[name] for one in episodes]) for name in episodes[0]}
    with atomic_write(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _record(
    simulator: Simulator, expert: Expert, task: TaskName, seed: int, number: int
) -> dict[str, np.ndarray]:
    """One episode's frames, and facts of it in arrays of one."""
    key = [seed, TASKS.index(task), number]
    poor = np.random.default_rng(key).uniform() < _POOR_SHARE
    # From 1 on: NumPy takes a key that ends in 0 for the one without it.
    for attempt in range(1, _ATTEMPTS + 1):
        # Without images first: they are nearly all of an episode's cost.
        if poor or _run(simulator, expert, task, poor, [*key, attempt], False)['success'][0]:
            break
    return _run(simulator, expert, task, poor, [*key, attempt], True)


def _run(
    simulator: Simulator, expert: Expert, task: TaskName, poor: bool, key: list[int], see: bool
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(key)
    pace = rng.uniform(*_POOR_PACE) if poor else 1.0
    noise_m_s = FULL_SPEED_M_S * (_POOR_NOISE if poor else rng.choice(_NOISE))
    simulator.reset(task, int(rng.integers(2**31)))
    if rng.uniform() < _WIDE_START_SHARE:
        _scatter(simulator, rng)
    shove = _draw_shove(rng)
    noise, left = np.zeros(3), None
    frames: list[dict[str, np.ndarray]] = []
    while len(frames) < _MOST_STEPS and left != 0:
        frame = _look(simulator) if see else {}
        fresh = rng.normal(0, noise_m_s, size=3)
        noise = _NOISE_MEMORY * noise + (1 - _NOISE_MEMORY**2) ** 0.5 * fresh
        commands = []
        for _ in range(STEP_TICKS):
            command = expert.command(simulator)
            command[:3] *= pace
            commands.append(command.copy())
            command[:3] = shove.get(len(frames), command[:3] + noise)
            simulator.step(command)
        frame['action'] = np.mean(commands, axis=0).astype(np.float32)
        frames.append(frame)
        if left is not None:
            left -= 1
        elif simulator.success:
            left = _STEPS_BEYOND
    return {
        **{name: np.stack([frame[name] for frame in frames]) for name in frames[0]},
        'episode': np.full(len(frames), key[2], dtype=np.int32),
        'task': np.array([TASKS.index(task)], dtype=np.int32),
        'instruction': np.array([sample_instruction(task, 'training', rng)]),
        'success': np.array([simulator.success]),
        'positive': np.array([simulator.success and not poor]),
    }


def _look(simulator: Simulator) -> dict[str, np.ndarray]:
    return {
        'images': np.stack([simulator.render(camera) for camera in CAMERAS]),
        'state': simulator.state.astype(np.float32),
        'points_m': simulator.points_m.astype(np.float32),
        'pixel': np.stack([simulator.project(c) for c in CAMERAS]).astype(np.float32),
    }


def _draw_shove(rng: np.random.Generator) -> dict[int, np.ndarray]:
    """Velocities (3,), m/s, of a shove by step, in place of the expert's; mostly none."""
    if rng.uniform() >= _SHOVE_SHARE:
        return {}
    way = rng.normal(size=3)
    way *= FULL_SPEED_M_S / np.linalg.norm(way)
    begins, steps = (int(rng.integers(*span)) for span in (_SHOVE_BEGINS, _SHOVE_STEPS))
    return dict.fromkeys(range(begins, begins + steps), way)


def _scatter(simulator: Simulator, rng: np.random.Generator) -> None:
    """Begin elsewhere: up, and to one side, before the first frame."""
    way = rng.uniform([-1.0, -1.0, 0.0], [1.0, 1.0, 1.0]) * FULL_SPEED_M_S
    for _ in range(int(rng.integers(*_WIDE_START_TICKS))):
        simulator.step(np.array([*way, -1.0]))
    simulator.success = False
