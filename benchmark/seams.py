"""Seams between recorded chunks: how far the command jumps, and how jerky it is, per hand-over.

The demo policy is run closed loop and its chunks are recorded. The same chunks are then handed over
by each of the executor's modes, and as LeRobot does by default (`weighted_average`: 0.3 of the old
action and 0.7 of the new one for every step that both have). That is open loop: what differs is the
hand-over alone. Real-time chunking changes the chunks themselves, so it hands over a recording of
its own, of the same scenes.

    python benchmark/seams.py [--bundle engines/demo] [--episodes 20] [--out FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measurement import RESULTS, write_result

from vla_runtime.execution.handover import HandoverParameters, LiveChunk, hand_over
from vla_runtime.tabletop.study.condition import Condition
from vla_runtime.tabletop.study.smoothness import jerk_of
from vla_runtime.tabletop.study.statistics import mean_of

DELAYS = (0, 2, 4, 6)
STEP_TIME_S = 0.05
LEROBOT_OLD_SHARE = 0.3
MEASURES = {
    'position_jump': 'position jump at seams, mrad',
    'velocity_jump': 'velocity jump at seams, rad/s',
    'jerk_seams': 'jerk at seams, rad/s³',
    'jerk_overall': 'jerk overall, rad/s³',
    'behind': 'distance from the newest chunk, mrad',
}

# (rows that the old plan has from the seam on, live chunks, step of the seam) to rows from there.
Merge = Callable[[np.ndarray, Sequence[LiveChunk], int], np.ndarray]


def executor_merge(parameters: HandoverParameters) -> Merge:
    """One of the executor's modes; the very function that it calls."""
    return lambda old, chunks, join: hand_over(parameters, old, chunks, join)


def weighted_average(old: np.ndarray, chunks: Sequence[LiveChunk], join: int) -> np.ndarray:
    """LeRobot's default for its asynchronous inference, as a function of rows.

    Its client merges a new chunk into the queue of actions as it arrives: actions already executed
    are skipped, those of a step that is in the queue too are averaged, the rest is appended, and
    nothing of the old queue beyond the new chunk is kept.
    """
    rows = chunks[-1].rows[join - chunks[-1].first_step :].copy()
    both = min(len(old), len(rows))
    rows[:both] = LEROBOT_OLD_SHARE * old[:both] + (1.0 - LEROBOT_OLD_SHARE) * rows[:both]
    return rows


# What is handed over how; `rtc` names the recording that was made with the plan given.
METHODS: dict[str, tuple[str, Merge]] = {
    'switch': ('switch', executor_merge(HandoverParameters('switch'))),
    'LeRobot weighted_average': ('switch', weighted_average),
    'blend': ('switch', executor_merge(HandoverParameters('blend'))),
    'ensemble': ('switch', executor_merge(HandoverParameters('ensemble'))),
    'rtc (own recording)': ('rtc', executor_merge(HandoverParameters('rtc'))),
}


@dataclass(frozen=True)
class Joined:
    """Chunks handed over one to the next.

    Attributes:
        rows: (steps, joints) what is commanded, a row a step.
        seams: steps at which a chunk takes over from another.
        jumps: at each seam, Euclidean distance from what would have been commanded in that step
            without the new chunk; NaN where the old plan was at its end.
        behind: mean distance between what is commanded and what the newest chunk says.
    """

    rows: np.ndarray
    seams: list[int]
    jumps: list[float]
    behind: float


def join_chunks(chunks: Sequence[LiveChunk], delay_steps: int, merge: Merge) -> Joined:
    """Hand over from chunk to chunk: each takes over `delay_steps` after its observation.

    The first one starts from standstill; the last one is executed up to where a next one would
    take over if it came after the same interval as the one before.
    """
    joins = [chunks[0].first_step, *(chunk.first_step + delay_steps for chunk in chunks[1:])]
    ends = [*joins[1:], joins[-1] + joins[-1] - joins[-2]]
    live: list[LiveChunk] = []
    old = np.empty((0, chunks[0].rows.shape[1]))
    executed, jumps, behind = [], [], []
    for chunk, join, end in zip(chunks, joins, ends, strict=True):
        live = [other for other in live if other.end_step > join] + [chunk]
        rows = merge(old, live, join)
        if executed:
            jumps.append(float(np.linalg.norm(rows[0] - old[0])) if len(old) else float('nan'))
        newest = chunk.rows[join - chunk.first_step :]
        behind.append(np.linalg.norm(rows[: end - join] - newest[: end - join], axis=1))
        executed.append(rows[: end - join])
        old = rows[end - join :]
    return Joined(np.concatenate(executed), joins[1:], jumps, float(np.concatenate(behind).mean()))


def measure(joined: Joined) -> dict[str, float]:
    """The measures of one episode."""
    # Row k is the command of step k: a seam at step k lies between rows k - 1 and k.
    places = [seam - 1 for seam in joined.seams]
    jerk = jerk_of(joined.rows, STEP_TIME_S, places)
    velocity = np.diff(joined.rows, axis=0) / STEP_TIME_S
    # velocity[k] leads to row k + 1.
    change = [float(np.linalg.norm(velocity[k] - velocity[k - 1])) for k in places if k >= 1]
    return {
        'position_jump': mean_of(joined.jumps).value,
        'velocity_jump': mean_of(change).value,
        'jerk_seams': jerk.seams,
        'jerk_overall': jerk.overall,
        'behind': joined.behind,
    }


def record(bundle: Path, episodes: int) -> dict[tuple[str, int], list[list[LiveChunk]]]:
    """Closed-loop episodes of the policy: (hand-over, delay) to the chunks of each episode."""
    import torch
    from tqdm import tqdm

    from vla_runtime.tabletop.study.chunk_sources import PolicySource
    from vla_runtime.tabletop.study.episode import CONTROL_RATE_HZ, Tabletop, run_episode
    from vla_runtime.tabletop.study.runner import episode_seeds

    torch.set_num_threads(1)
    world, source = Tabletop(CONTROL_RATE_HZ), PolicySource(bundle)
    recordings: dict[tuple[str, int], list[list[LiveChunk]]] = {}
    seeds = episode_seeds(0, episodes)
    with tqdm(total=2 * len(DELAYS) * episodes, unit='episode') as bar:
        for handover, rtc_mode in (('switch', 'off'), ('rtc', 'guided')):
            for delay in DELAYS:
                condition = Condition(
                    handover=handover, rtc_mode=rtc_mode, delay_steps=float(delay)
                )
                recordings[handover, delay] = []
                for index, seed in enumerate(seeds):
                    chunks: list[LiveChunk] = []

                    def keep(step: int, chunk: Any, chunks: list[LiveChunk] = chunks) -> None:
                        chunks.append(LiveChunk(len(chunks), step, chunk.actions))

                    run_episode(world, source, condition, seed, index, keep)
                    recordings[handover, delay].append(chunks)
                    bar.update()
    world.close()
    return recordings


def compare_methods(
    recordings: Mapping[tuple[str, int], Sequence[Sequence[LiveChunk]]],
) -> list[dict[str, Any]]:
    """A row a delay and method; each measure is a mean over episodes with its 95% interval."""
    rows = []
    for delay in DELAYS:
        for method, (recording, merge) in METHODS.items():
            episodes = [
                measure(join_chunks(chunks, delay, merge))
                for chunks in recordings[recording, delay]
                if len(chunks) >= 3
            ]
            means = {name: asdict(mean_of(e[name] for e in episodes)) for name in MEASURES}
            rows.append({'delay_steps': delay, 'method': method, **means})
    return rows


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Every measure over the delay, a curve a method."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    options: Any = {'svg.fonttype': 'none', 'svg.hashsalt': 'seams', 'font.size': 9}
    with pyplot.rc_context(options):
        figure, axes = pyplot.subplots(
            1, len(MEASURES), figsize=(4 * len(MEASURES), 3.8), layout='constrained'
        )
        for panel, (name, title) in zip(axes, MEASURES.items(), strict=True):
            factor = 1e3 if 'mrad' in title else 1.0
            for number, method in enumerate(METHODS):
                own = [row for row in rows if row['method'] == method]
                values = np.array([row[name]['value'] for row in own]) * factor
                low, high = (
                    np.array([row[name][part] for row in own]) * factor for part in ('low', 'high')
                )
                panel.errorbar(
                    np.array([row['delay_steps'] for row in own]) + 0.08 * (number - 2),
                    values,
                    yerr=[values - low, high - values],
                    marker='o',
                    markersize=4,
                    capsize=2,
                    label=method,
                )
            panel.set(title=title, xlabel='delay, steps of 50 ms', xticks=DELAYS)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
        figure.legend(
            *axes[0].get_legend_handles_labels(),
            title='hand-over',
            loc='outside lower center',
            ncols=5,
        )
        figure.savefig(path, metadata={'Date': None})
        pyplot.close(figure)


def main() -> None:
    """Record, hand over, write, show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--bundle', type=Path, default=Path('engines/demo'))
    parser.add_argument('--episodes', type=int, default=20, help='a delay and recording')
    parser.add_argument('--out', type=Path, default=RESULTS, metavar='FOLDER')
    arguments = parser.parse_args()
    rows = compare_methods(record(arguments.bundle, arguments.episodes))
    packages = ('numpy', 'mujoco', 'torch')
    written = write_result('seams', {'rows': rows}, packages, arguments.out / 'seams.json')
    plot(rows, arguments.out / 'seams.svg')
    print(f'{"delay":>5} {"method":26}' + ''.join(f'{name:>16}' for name in MEASURES))
    for row in rows:
        values = ''.join(f'{row[name]["value"]:16.4g}' for name in MEASURES)
        print(f'{row["delay_steps"]:5} {row["method"]:26}{values}')
    print(f'wrote {written} and {arguments.out / "seams.svg"}')


if __name__ == '__main__':
    main()
