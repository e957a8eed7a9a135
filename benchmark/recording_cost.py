"""Cost of recording for the motion, and whether it changes it: the demo recorded and not, by turns.

Four runs a turn drive the same scenes with the same instructions: the demo as it is, the same
again, with `--record`, and with a `recorder_node` beside it, as on a robot. Of every run: processor
time of the executor's process, how late its ticks were, how evenly its commands came, how long
inferences took, and how far its commands are from those of the first run of the turn.

The demo runs in real time, so no two runs have equal commands, recorded or not. A recorded run must
be no further from an unrecorded one than another unrecorded run is. Its chunks can be compared
exactly: `vla_runtime replay` makes each again, where nothing records. Processor time hardly depends
on what else the machine does.

    python benchmark/recording_cost.py [--turns 6] [--seconds 30]

The target is a tick lateness (p99) within the spread of runs without recording.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from parts.measurement import in_turn, median_interval, percentiles, write_result

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.recording.bag_reader import BagReader

PACKAGES = ('rclpy', 'torch', 'numpy', 'mcap', 'zstandard')
PLAIN, AGAIN = 'plain', 'plain again'
KINDS = (PLAIN, AGAIN, '--record', 'recorder_node')
TOPICS = ('/diagnostics', '/vla_policy/report', '/arm_controller/joint_trajectory')
_ANSWER_S = 120.0
# Scenes and instructions part later, when one run has carried an instruction out before another.
_ALIKE_S = 4.0
_GRID_S = 0.02
_LOOK_S = 0.25
_RECORDER = ('-m', 'vla_runtime.nodes.recorder.node', '--ros-args', '-p', 'robot:=tabletop')
_EXECUTOR = b'vla_runtime.nodes.executor.node'


def run_demo(
    folder: Path, seconds: float, seed: int, kind: str
) -> tuple[dict[str, float], np.ndarray]:
    """Run the demo once; its figures, and its commands on an even grid."""
    command = [sys.executable, '-m', 'vla_runtime', 'demo', '--out', str(folder)]
    command += ['--seconds', str(seconds), '--seed', str(seed)]
    command += ['--record'] if kind == '--record' else []
    bag = folder.with_suffix('.recording') if kind == 'recorder_node' else None
    with folder.with_suffix('.log').open('w+', encoding='utf-8') as log:
        demo = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        used = _watch(demo, bag, seconds + _ANSWER_S)
        if demo.returncode:
            log.seek(0)
            raise SystemExit(f'{" ".join(command)}:\n{log.read()}')
    if bag is not None:
        count = sum(1 for _ in BagReader(bag).messages(lambda *_: True))
        print(f'  recorder_node: {count} messages')
    figures, commands = figures_of(folder / 'bag')
    return {'executor_cpu_ms_per_s': _cpu_ms_per_s(used, seconds), **figures}, commands


def _watch(
    demo: subprocess.Popen[bytes], bag: Path | None, timeout_s: float
) -> list[tuple[float, float]]:
    """Wait for the demo's end, with a recorder beside it where a bag is named.

    Returns:
        steady time and processor seconds of the executor's process, again and again
    """
    used: list[tuple[float, float]] = []
    executor, recorder = 0, None
    end_s = time.monotonic() + timeout_s
    while demo.poll() is None:
        if time.monotonic() > end_s:
            demo.kill()
            raise SystemExit('the demo did not end')
        executor = executor or _child(demo.pid, _EXECUTOR)
        if executor:
            # It may end in between.
            with suppress(OSError):
                fields = Path(f'/proc/{executor}/stat').read_text().rpartition(') ')[2].split()
                ticks = int(fields[11]) + int(fields[12])
                used.append((time.monotonic(), ticks / os.sysconf('SC_CLK_TCK')))
        if executor and bag is not None and recorder is None:
            # Not before: the demo drives no robot that somebody else listens to.
            words = [sys.executable, *_RECORDER, '-p', f'folder:={bag}']
            recorder = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(_LOOK_S)
    if recorder is not None:
        recorder.send_signal(signal.SIGINT)
        if recorder.wait(_ANSWER_S):
            raise SystemExit(f'recorder_node ended with {recorder.returncode}')
    return used


def _child(parent: int, words: bytes) -> int:
    """Process id of a child whose command line has these words; 0 without one."""
    for pid in Path(f'/proc/{parent}/task/{parent}/children').read_text().split():
        with suppress(OSError):
            if words in Path(f'/proc/{pid}/cmdline').read_bytes():
                return int(pid)
    return 0


def _cpu_ms_per_s(used: Sequence[tuple[float, float]], seconds: float) -> float:
    """Processor ms a second of motion; the process's start and end are left out."""
    end_s = used[-1][0] - 2.0
    within = [one for one in used if end_s - 0.8 * seconds <= one[0] <= end_s]
    (begin_s, begin), (last_s, last) = within[0], within[-1]
    return 1e3 * (last - begin) / (last_s - begin_s)


def figures_of(bag: Path) -> tuple[dict[str, float], np.ndarray]:
    """Figures of one run, of its bag, and its first commands on an even grid, (times, joints)."""
    reader = BagReader(bag)
    late_ms: list[float] = []
    inference_ms: list[float] = []
    # When a command came to the bag: its stamp is zero, which means now.
    came_ns: list[int] = []
    commanded: list[np.ndarray] = []
    for raw in reader.messages(lambda topic, _: topic in TOPICS):
        if raw.topic == TOPICS[2]:
            message = reader.read(raw)
            if message is not None:
                came_ns.append(raw.time_ns)
                commanded.append(np.array(message.points[-1].positions))
            continue
        for status in reader.read(raw).status:
            given = values_of(status)
            if status.name == '/vla_executor: tick':
                late_ms.append(float(given['late_p99_ms']))
            elif 'ms.total' in given:
                inference_ms.append(float(given['ms.total']))
    gaps_ms = np.diff(came_ns) * 1e-6
    figures = {
        # A status every second; that of the start is left out.
        'tick_late_p99_ms': float(np.median(late_ms[1:])),
        'tick_late_worst_p99_ms': float(np.max(late_ms[1:])),
        'command_gap_p99_ms': float(np.percentile(gaps_ms, 99)),
        'inference_ms': float(np.median(inference_ms)),
        'commands': float(len(came_ns)),
    }
    return figures, on_grid((np.array(came_ns) - came_ns[0]) * 1e-9, np.array(commanded))


def on_grid(times_s: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Commands from the first that moves on, every `_GRID_S` seconds; (times, joints)."""
    moved = np.abs(positions - positions[0]).max(axis=1) > 0.0
    begin_s = times_s[np.argmax(moved)]
    grid_s = begin_s + np.arange(0.0, _ALIKE_S, _GRID_S)
    return np.stack([np.interp(grid_s, times_s, column) for column in positions.T], axis=1)


def summary(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Per figure: the runs of each kind, and the ratio to the plain run of the same turn."""
    figures: dict[str, Any] = {}
    for name in found[PLAIN][0]:
        runs = {kind: np.array([run[name] for run in found[kind]]) for kind in KINDS}
        figures[name] = {kind: values.tolist() for kind, values in runs.items()}
        for kind in KINDS[1:]:
            ratio = runs[kind] / runs[PLAIN]
            spread = {**percentiles(ratio), 'median_95': median_interval(ratio)}
            figures[name][f'{kind}_over_plain'] = spread
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
    # Mean distance of a run's commands from those of the first run of its turn, rad.
    distance: dict[str, list[float]] = {kind: [] for kind in KINDS[1:]}
    with tempfile.TemporaryDirectory(prefix='vla_recording_cost_') as folder:
        for turn in range(arguments.turns):
            commands: dict[str, np.ndarray] = {}
            for kind in in_turn(KINDS, turn):
                out = Path(folder) / f'{turn}_{kind.replace(" ", "_")}'
                figures, commands[kind] = run_demo(out, arguments.seconds, turn, kind)
                found[kind].append(figures)
                print(turn, kind, {n: round(v, 2) for n, v in found[kind][-1].items()}, flush=True)
            for kind in KINDS[1:]:
                distance[kind].append(float(np.abs(commands[kind] - commands[PLAIN]).mean()))
    result = summary(found)
    for name, figure in result.items():
        for kind in KINDS[1:]:
            ratio = figure[f'{kind}_over_plain']
            low, high = ratio['median_95']
            print(f'{name:24s} {kind} / plain {ratio["median"]:.3f} [{low:.3f}, {high:.3f}]')
    for kind, values in distance.items():
        print(f'distance from plain, rad        {kind}: {np.round(values, 4).tolist()}')
    result |= {
        'turns': arguments.turns,
        'seconds': arguments.seconds,
        'distance_from_plain_rad': distance,
    }
    print(f'written: {write_result("recording_cost", result, PACKAGES, arguments.json)}')


if __name__ == '__main__':
    main()
