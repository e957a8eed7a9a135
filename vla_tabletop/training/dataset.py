"""Demonstrations of the scripted expert, in numbers: seeded, parallel, resumable.

An episode is a function of (seed, episode number), whatever the number of processes. Shards get
their names once complete; an interrupted run resumes and ends with the same bytes.

A shard (`shard_00000.npz`) holds per frame:

| array | shape, type | meaning |
|---|---|---|
| `images` | (F, 2, 48, 64, 3) uint8 | `front` and `wrist`, RGB |
| `state` | (F, 6) float32 | measured joints, rad |
| `chunks` | (F, 9, 32, 6) float32 | the expert's setpoints, rad, for every goal of `GOALS` |
| `block_m` | (F, 3, 3) float32 | block centres |
| `tip_m` | (F, 3) float32 | tip of the tool |
| `pixel` | (F, 2, 3, 2) float32 | block centres in each image, as `Tabletop.project` gives them |
| `episode` | (F,) int32 | number of the episode |

and per episode `episode_number`, `goal` (index into `GOALS` of what was asked first), `success`,
`time_s` (to the outcome), `distance_m` (tip to block at the start), `variant` (index).
"""

from __future__ import annotations

import json
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from vla_runtime.files.atomic_write import atomic_write, write_text
from vla_runtime.files.json_file import read_json
from vla_runtime.processes.workers import workers
from vla_tabletop.sim.expert import HORIZON, Expert, sample_style
from vla_tabletop.sim.rollout import follow
from vla_tabletop.sim.scene import CAMERAS, COLOURS, VARIANTS, Scene, sample_scene
from vla_tabletop.sim.tasks import (
    SIDES,
    Goal,
    Judge,
    Outcome,
    make_task,
    push_path_is_clear,
)
from vla_tabletop.sim.world import Tabletop

IMAGE_WIDTH, IMAGE_HEIGHT = 64, 48

# What every frame is labelled for: a touch of each block, then each block to each side.
GOALS = (
    *(Goal(block) for block in range(len(COLOURS))),
    *(Goal(block, side) for side in SIDES for block in range(len(COLOURS))),
)

_FORMAT = 3
_VARIANT_SHARE = {
    'still': 0.45,
    'moving': 0.25,
    'pushed': 0.1,
    'lighting': 0.1,
    'camera_jitter': 0.1,
}
_PUSH_SHARE = 0.5
# Factor on the belt's speed: from as fast as the variant's to twice as fast.
_BELT_FACTOR = (1.0, 2.0)
_WIDE_START_SHARE = 0.5
_NOISE_RAD = (0.0, 0.01, 0.03)
_NOISE_MEMORY = 0.8


@dataclass(frozen=True)
class DatasetSettings:
    """Settings of a data set; equal settings give equal files."""

    seed: int = 0
    episodes: int = 3000
    episodes_per_shard: int = 30

    @property
    def shards(self) -> int:
        return -(-self.episodes // self.episodes_per_shard)

    def shard_episodes(self, shard: int) -> range:
        first = shard * self.episodes_per_shard
        return range(first, min(first + self.episodes_per_shard, self.episodes))


@dataclass(frozen=True)
class Dataset:
    """A data set in memory; arrays as the module's table says.

    `positive`: (episodes,) bool, the better half by outcome and time; `episode`: (F,) row of each
    frame's episode.
    """

    images: np.ndarray
    state: np.ndarray
    chunks: np.ndarray
    block_m: np.ndarray
    tip_m: np.ndarray
    pixel: np.ndarray
    episode: np.ndarray
    goal: np.ndarray
    success: np.ndarray
    time_s: np.ndarray
    distance_m: np.ndarray
    variant: np.ndarray
    positive: np.ndarray


def generate(folder: Path, plan: DatasetSettings, processes: int, progress: bool = True) -> None:
    """Write the missing shards; ValueError: the folder holds another plan's data set."""
    claim(folder, plan)
    missing = [shard for shard in range(plan.shards) if not _shard_path(folder, shard).exists()]
    done = sum(len(plan.shard_episodes(s)) for s in range(plan.shards) if s not in set(missing))
    bar = tqdm(total=plan.episodes, initial=done, unit='episode', desc='data', disable=not progress)
    with bar:
        if processes == 1:
            for shard in missing:
                write_shard(folder, plan, shard)
                bar.update(len(plan.shard_episodes(shard)))
            return
        with workers(processes) as submit:
            futures = {submit(write_shard, folder, plan, shard): shard for shard in missing}
            for future in as_completed(futures):
                future.result()
                bar.update(len(plan.shard_episodes(futures[future])))


def write_shard(folder: Path, plan: DatasetSettings, shard: int) -> None:
    """Generate one shard; its file appears complete or not at all."""
    world, expert = Tabletop(), Expert()
    episodes = [
        _Recorder(world, expert, plan.seed, number).run() for number in plan.shard_episodes(shard)
    ]
    world.close()
    arrays = {name: np.concatenate([episode[name] for episode in episodes]) for name in episodes[0]}
    with atomic_write(_shard_path(folder, shard)) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load(folder: Path) -> Dataset:
    """Read all shards of a finished data set and label its episodes.

    Raises FileNotFoundError: a shard is missing; run `generate` to its end.
    """
    plan = DatasetSettings(**_read_plan(folder))
    shards = []
    for shard in range(plan.shards):
        path = _shard_path(folder, shard)
        if not path.exists():
            raise FileNotFoundError(
                f'{folder}: shard {shard} of {plan.shards} is missing; the generation did not '
                'finish, run it again with the same arguments to go on'
            )
        with np.load(path, allow_pickle=False) as arrays:
            shards.append(dict(arrays))
    merged = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
    numbers = merged.pop('episode_number')
    merged['episode'] = np.searchsorted(numbers, merged['episode'])
    positive = better_half(
        merged['success'], merged['time_s'], merged['distance_m'], merged['goal'] >= len(COLOURS)
    )
    return Dataset(**merged, positive=positive)


def better_half(
    success: np.ndarray, time_s: np.ndarray, distance_m: np.ndarray, push: np.ndarray
) -> np.ndarray:
    """Choose the episodes that carry the positive advantage tag (RECAP, pi*0.6).

    Advantage: how much sooner it succeeded than a least-squares line in `distance_m`, fitted on
    the successes of its behaviour (touch or push). The better half of each behaviour is positive,
    but never a failure.

    Args:
        success, push: (E,) bool; time_s, distance_m: (E,).

    Returns (E,) bool.
    """
    positive = np.zeros(len(success), dtype=bool)
    for members in (np.flatnonzero(push), np.flatnonzero(~push)):
        good = members[success[members]]
        if len(good) == 0:
            continue
        basis = np.stack([np.ones(len(good)), distance_m[good]], axis=1)
        line, *_ = np.linalg.lstsq(basis, time_s[good], rcond=None)
        late_s = np.full(len(success), np.inf)
        late_s[good] = time_s[good] - basis @ line
        ranked = members[np.argsort(late_s[members], kind='stable')]
        best = ranked[: len(members) // 2]
        positive[best] = success[best]
    return positive


class _Recorder:
    """One episode of the expert, recorded at every replanning."""

    def __init__(self, world: Tabletop, expert: Expert, seed: int, number: int) -> None:
        self._world, self._expert = world, expert
        self._number = number
        self._rng = np.random.default_rng([seed, number])
        shares = [_VARIANT_SHARE[variant] for variant in VARIANTS]
        self._variant = int(self._rng.choice(len(VARIANTS), p=shares))
        self._style = sample_style(self._rng)
        self._noise_rad = float(self._rng.choice(_NOISE_RAD))
        self._frames: list[dict[str, np.ndarray]] = []

    def run(self) -> dict[str, np.ndarray]:
        """The shard's arrays for this episode."""
        rng, world = self._rng, self._world
        scene = sample_scene(int(rng.integers(2**31)), VARIANTS[self._variant])
        scene = replace(scene, belt_m_s=scene.belt_m_s * rng.uniform(*_BELT_FACTOR))
        start = world.load(self._scatter_start(scene))
        first = self._sample_goal()
        outcome = self._pursue(first)
        if outcome.success:
            # Stay a little, then go on to another goal: from block to block is a start, too.
            self._pursue(first, extra_steps=int(rng.integers(0, 9)))
            second = self._sample_goal()
            self._pursue(second, extra_steps=int(rng.integers(10, 50)))
        frames = {
            name: np.stack([frame[name] for frame in self._frames]) for name in self._frames[0]
        }
        distance_m = float(np.linalg.norm(start.tip_m - start.block_m[first.block]))
        return {
            **frames,
            'episode': np.full(len(self._frames), self._number, dtype=np.int32),
            'episode_number': np.array([self._number], dtype=np.int32),
            'goal': np.array([GOALS.index(first)], dtype=np.int32),
            'success': np.array([outcome.success]),
            'time_s': np.array([outcome.time_s], dtype=np.float32),
            'distance_m': np.array([distance_m], dtype=np.float32),
            'variant': np.array([self._variant], dtype=np.int32),
        }

    def _scatter_start(self, scene: Scene) -> Scene:
        """Half of the episodes start anywhere over the table, with the gripper open or closed."""
        rng, joints = self._rng, scene.start_rad.copy()
        if rng.uniform() < _WIDE_START_SHARE:
            tip = rng.uniform([0.18, -0.18, 0.06], [0.36, 0.18, 0.24])
            joints = self._expert.reach(tip, joints)
            joints[:5] += rng.normal(0, 0.1, size=5)
        if rng.uniform() < 0.5:
            joints[5] = rng.uniform(0, 0.6)
        return replace(scene, start_rad=joints)

    def _sample_goal(self) -> Goal:
        rng, block_m = self._rng, self._world.state().block_m
        # The belt would carry a block over the stripe without help.
        pushes = rng.uniform() < _PUSH_SHARE and VARIANTS[self._variant] != 'moving'
        while True:
            side = SIDES[rng.integers(2)] if pushes else None
            goal = Goal(int(rng.integers(len(COLOURS))), side)
            if push_path_is_clear(goal, block_m):
                return goal

    def _pursue(self, goal: Goal, extra_steps: int | None = None) -> Outcome:
        """Follow the expert to the outcome, or for `extra_steps` whatever the outcome."""
        world, rng = self._world, self._rng
        task = make_task('push' if goal.side else 'colour', goal, world.state().block_m)
        assert task is not None
        judge = Judge(task, world.sim_time_s)
        noise = np.zeros(world.lower_rad.size)
        left = extra_steps
        while left is None or left > 0:
            chunk = self._record()[GOALS.index(goal)]
            rows = chunk[: int(rng.integers(3, 9))].astype(np.float64)
            if left is not None:
                rows = rows[:left]
                left -= len(rows)
            for row in rows:
                fresh = rng.normal(0, self._noise_rad, size=5)
                noise[:5] = _NOISE_MEMORY * noise[:5] + (1 - _NOISE_MEMORY**2) ** 0.5 * fresh
                row += noise
            outcome = follow(world, rows, judge if extra_steps is None else None)
            if outcome is not None:
                return outcome
        return Outcome('timeout', 0.0, None)

    def _record(self) -> np.ndarray:
        """Keep a frame of the world as it stands; the chunks (9, 32, 6) of every goal."""
        world, state = self._world, self._world.state()
        chunks = np.stack(
            [
                self._expert.plan(state.joint_rad, state.block_m, goal, self._style, HORIZON)
                for goal in GOALS
            ]
        ).astype(np.float32)
        images = [world.render(camera, IMAGE_WIDTH, IMAGE_HEIGHT) for camera in CAMERAS]
        pixel = [world.project(camera, state.block_m) for camera in CAMERAS]
        self._frames.append(
            {
                'images': np.stack(images),
                'state': state.joint_rad.astype(np.float32),
                'chunks': chunks,
                'block_m': state.block_m.astype(np.float32),
                'tip_m': state.tip_m.astype(np.float32),
                'pixel': np.stack(pixel).astype(np.float32),
            }
        )
        return chunks


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f'shard_{shard:05d}.npz'


def _read_plan(folder: Path) -> dict[str, int]:
    path = folder / 'dataset.json'
    if not path.exists():
        raise FileNotFoundError(f'{path} is missing: {folder} holds no data set')
    facts = dict(read_json(path).values)
    if facts.pop('format', None) != _FORMAT:
        raise ValueError(f'{path}: format is not {_FORMAT}; generate the data set anew')
    return facts


def claim(folder: Path, plan: DatasetSettings) -> None:
    """Write the plan, or check the one there (ValueError: another plan)."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / 'dataset.json'
    if path.exists():
        found = _read_plan(folder)
        if found != asdict(plan):
            raise ValueError(
                f'{path}: holds a data set of {found}, asked for {asdict(plan)}; give the same '
                'arguments to go on with it, or another folder'
            )
        return
    write_text(path, json.dumps({'format': _FORMAT, **asdict(plan)}) + '\n')
