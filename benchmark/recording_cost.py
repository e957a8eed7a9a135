"""Cost of recording for the motion: the demo with `--record` and without, by turns.

Both kinds drive the same scenes with the same instructions. Of every run: how late the executor's
ticks were, how evenly its commands came, how long inferences took, and how many instructions were
carried out. The demo runs in real time, so no two runs have equal commands, recorded or not; what
recording changes must be looked for between the kinds.

    python benchmark/recording_cost.py [--turns 6] [--seconds 30]

The target is a tick lateness (p99) within the spread of runs without recording.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measurement import median_interval, percentiles, write_result

from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.ros.messages.diagnostics import values_of

PACKAGES = ('rclpy', 'torch', 'numpy', 'mcap', 'zstandard')
KINDS = {'plain': (), 'recorded': ('--record',)}
TOPICS = ('/diagnostics', '/vla_policy/report', '/arm_controller/joint_trajectory')
_ANSWER_S = 120.0


def run_demo(folder: Path, seconds: float, seed: int, options: Sequence[str]) -> dict[str, float]:
    """Run the demo once; its figures."""
    command = [sys.executable, '-m', 'vla_runtime', 'demo', '--out', str(folder)]
    command += ['--seconds', str(seconds), '--seed', str(seed)]
    # The demo's bag is there either way; --record adds a recording in a folder of its own.
    if options:
        command += [*options, str(folder.with_suffix('.recording'))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + _ANSWER_S)
    if done.returncode:
        raise SystemExit(f'{" ".join(command)}:\n{done.stdout}\n{done.stderr}')
    return figures_of(folder / 'bag')


def figures_of(bag: Path) -> dict[str, float]:
    """Figures of one run, of its bag."""
    reader = BagReader(bag)
    late_ms: list[float] = []
    inference_ms: list[float] = []
    # When a command came to the bag: its stamp is zero, which means now.
    came_ns: list[int] = []
    for raw in reader.messages(lambda topic, _: topic in TOPICS):
        if raw.topic == TOPICS[2]:
            came_ns.append(raw.time_ns)
            continue
        for status in reader.read(raw).status:
            given = values_of(status)
            if status.name == '/vla_executor: tick':
                late_ms.append(float(given['late_p99_ms']))
            elif 'ms.total' in given:
                inference_ms.append(float(given['ms.total']))
    gaps_ms = np.diff(came_ns) * 1e-6
    return {
        # A status every second; that of the start is left out.
        'tick_late_p99_ms': float(np.median(late_ms[1:])),
        'tick_late_worst_p99_ms': float(np.max(late_ms[1:])),
        'command_gap_p99_ms': float(np.percentile(gaps_ms, 99)),
        'inference_ms': float(np.median(inference_ms)),
        'commands': float(len(came_ns)),
    }


def summary(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Per figure: the runs of each kind, and the ratio within a turn."""
    figures: dict[str, Any] = {}
    for name in found['plain'][0]:
        plain, recorded = (np.array([run[name] for run in found[kind]]) for kind in KINDS)
        ratio = recorded / plain
        figures[name] = {
            'plain': plain.tolist(),
            'recorded': recorded.tolist(),
            'recorded_over_plain': {**percentiles(ratio), 'median_95': median_interval(ratio)},
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--turns', type=int, default=6, help='runs of each kind (default: 6)')
    parser.add_argument('--seconds', type=float, default=30.0, help='of a run (default: 30)')
    parser.add_argument('--json', type=Path, help='write here instead of to benchmark/results/')
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix='vla_recording_cost_') as folder:
        for turn in range(arguments.turns):
            # Each kind is first equally often.
            for kind in list(KINDS)[:: 1 if turn % 2 == 0 else -1]:
                out = Path(folder) / f'{turn}_{kind}'
                found[kind].append(run_demo(out, arguments.seconds, turn, KINDS[kind]))
                print(turn, kind, {n: round(v, 2) for n, v in found[kind][-1].items()}, flush=True)
    figures = summary(found)
    for name, figure in figures.items():
        ratio = figure['recorded_over_plain']
        low, high = ratio['median_95']
        print(f'{name:24s} recorded / plain {ratio["median"]:.3f} [{low:.3f}, {high:.3f}]')
    figures = {'turns': arguments.turns, 'seconds': arguments.seconds, **figures}
    print(f'written: {write_result("recording_cost", figures, PACKAGES, arguments.json)}')


if __name__ == '__main__':
    main()
