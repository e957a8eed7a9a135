"""Runs the conditions of a study: seeded, over processes, resumable.

A condition's episodes are written together, under a name of condition, seeds, bundle and source:
an interrupted study resumes, a shared condition runs once, and changed code runs again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vla_convert.export.onnx.bundle import bundle_with_onnx
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.success import spec_identity
from vla_runtime.files.atomic_write import write_text
from vla_runtime.files.json_file import LARGEST_RESULT, JsonError, JsonMapping, read_json
from vla_runtime.files.package_files import source_digest
from vla_runtime.processes.workers import Pool
from vla_tabletop.sim.scene import FIRST_UNSEEN_SEED
from vla_tabletop.study.calibration import observations_of
from vla_tabletop.study.chunk_sources import ChunkSource, ExpertSource, PolicySource
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.episode import EpisodeResult, run_episode
from vla_tabletop.study.smoothness import CacheUse, Jerk
from vla_tabletop.study.world import World
from vla_tabletop.study.worlds import make_world

# Beyond the scenes on which a demo policy is checked while it is made.
_FIRST_SEED = FIRST_UNSEEN_SEED + 1_000_000
_SEEDS_PER_STUDY_SEED = 100_000
_BATCH = 5


@dataclass(frozen=True)
class Run:
    """A condition, the bundle and the seeds that it is run on."""

    condition: Condition
    bundle: Path
    seeds: tuple[int, ...]


def episode_seeds(study_seed: int, episodes: int) -> tuple[int, ...]:
    """The seeds of a study, never of training or a bundle's check; ValueError: too many."""
    if not 0 < episodes <= _SEEDS_PER_STUDY_SEED or study_seed < 0:
        raise ValueError(
            f'{episodes} episodes from seed {study_seed}: expected 1 to {_SEEDS_PER_STUDY_SEED} '
            'episodes and a seed of 0 or more'
        )
    first = _FIRST_SEED + study_seed * _SEEDS_PER_STUDY_SEED
    return tuple(range(first, first + episodes))


def run_conditions(
    conditions: Sequence[Condition],
    bundle: Path | Mapping[str, Path],
    seeds: Sequence[int],
    work: Path,
    pool: Pool | None = None,
    progress: bool = True,
) -> dict[Condition, list[EpisodeResult]]:
    """Run what has not been run yet, all conditions on the same seeds; safe to interrupt.

    `bundle`: folder, or folders by family for conditions with a `policy_family`; `work`: folder of
    finished conditions; `pool`: single-threaded processes with a policy each, None: this process.
    Raises JsonError: a damaged file in `work`; ClusterError.
    """
    runs = [
        Run(condition, bundle_of(condition, bundle, work), tuple(seeds)) for condition in conditions
    ]
    source = source_digest()
    paths = {run: work / f'{_identity(run, source)}.json' for run in runs}
    done = {run: _read(path) for run, path in paths.items() if path.exists()}
    left = [run for run in runs if run not in done]
    work.mkdir(parents=True, exist_ok=True)
    with (
        tqdm(
            total=len(runs) * len(seeds),
            initial=len(done) * len(seeds),
            unit='episode',
            disable=not progress,
        ) as bar,
        closing(_run_all(left, pool, bar.update)) as finished,
    ):
        for run, episodes in finished:
            _write(paths[run], run, episodes)
            done[run] = episodes
            successes = sum(episode.success for episode in episodes)
            bar.set_postfix_str(f'last condition {successes}/{len(episodes)}')
    return {run.condition: done[run] for run in runs}


def bundle_of(condition: Condition, bundle: Path | Mapping[str, Path], work: Path) -> Path:
    """The bundle that a condition runs: for ONNX Runtime one with files, made here once."""
    if isinstance(bundle, Mapping):
        bundle = bundle[condition.policy_family]
    if condition.chunk_source != 'policy' or condition.backend != 'onnxruntime':
        return bundle
    source = bundle
    return bundle_with_onnx(
        bundle,
        work,
        condition.precision,
        tqdm.write,
        lambda: observations_of(source, condition),
    )


def _run_all(
    runs: Sequence[Run], pool: Pool | None, on_progress: Callable[[int], Any]
) -> Generator[tuple[Run, list[EpisodeResult]], None, None]:
    """Each run with its episodes, as it is finished; batches of all runs share the processes."""
    tasks = [
        (run, number, first)
        for number, run in enumerate(runs)
        for first in range(0, len(run.seeds), _BATCH)
    ]
    found: list[dict[int, list[EpisodeResult]]] = [{} for _ in runs]
    # Closed here, so that an interrupt ends the processes before it is reported.
    with closing(_batches(tasks, pool)) as batches:
        for number, first, episodes in batches:
            found[number][first] = episodes
            on_progress(len(episodes))
            if len(found[number]) == math.ceil(len(runs[number].seeds) / _BATCH):
                ordered = sorted(found[number].items())
                yield runs[number], [episode for _, batch in ordered for episode in batch]


def _batches(
    tasks: Sequence[tuple[Run, int, int]], pool: Pool | None
) -> Generator[tuple[int, int, list[EpisodeResult]], None, None]:
    """Every task's result: in order from this process, as they are finished from others."""
    if pool is None or not tasks:
        yield from map(_run_batch, tasks)
        return
    # Two one-thread processes finish before one two-thread process does.
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    with pool() as submit:
        for future in as_completed([submit(_run_batch, task) for task in tasks]):
            yield future.result()


_worlds: dict[str, World] = {}
_sources: dict[tuple[str, str, Path, str], ChunkSource] = {}


def _run_batch(task: tuple[Run, int, int]) -> tuple[int, int, list[EpisodeResult]]:
    """Some episodes of a run, in whatever process this is; world and sources are kept."""
    run, number, first = task
    condition = run.condition
    if condition.world not in _worlds:
        _worlds[condition.world] = make_world(condition.world)
    key = (condition.chunk_source, condition.backend, run.bundle, condition.precision)
    if key not in _sources and condition.chunk_source == 'expert':
        _sources[key] = ExpertSource()
    elif key not in _sources:
        _sources[key] = PolicySource(run.bundle, condition.precision, condition.backend)
    episodes = [
        run_episode(_worlds[condition.world], _sources[key], condition, seed, first + i)
        for i, seed in enumerate(run.seeds[first : first + _BATCH])
    ]
    return number, first, episodes


def bundle_identity(bundle: Path) -> str:
    """SHA-256 of all that a bundle does; see `bundle.success.spec_identity`."""
    return spec_identity(read_bundle(bundle, verify=False).spec)


def _identity(run: Run, source: str) -> str:
    """A name for everything that a run's episodes depend on."""
    by_policy = run.condition.chunk_source == 'policy'
    parts = {
        'source': source,
        'bundle': bundle_identity(run.bundle) if by_policy else None,
        'condition': asdict(run.condition),
        'seeds': run.seeds,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _write(path: Path, run: Run, episodes: Sequence[EpisodeResult]) -> None:
    content = {
        'condition': asdict(run.condition),
        'episodes': [asdict(episode) for episode in episodes],
    }
    write_text(path, json.dumps(content))


def _read(path: Path) -> list[EpisodeResult]:
    """A finished condition's episodes."""
    return [_episode(mapping) for mapping in read_json(path, LARGEST_RESULT).mappings('episodes')]


def _episode(said: JsonMapping) -> EpisodeResult:
    try:
        jerk = Jerk(**said.mapping('jerk').values)
        cache_use = CacheUse(**said.mapping('cache_use').values)
        return EpisodeResult(**{**said.values, 'jerk': jerk, 'cache_use': cache_use})
    except TypeError as error:
        raise JsonError(
            f'{said.path}: field {said.field}: is no episode ({error}); remove the file, and its '
            'condition is run again'
        ) from None
