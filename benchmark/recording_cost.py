"""What recording costs the motion: the demo recorded and not, by turns.

Three kinds drive the same scenes with the same instructions: the demo as it is, with `--record`,
and with a `recorder_node` beside it, as on a robot. Of every run: processor time of the executor's
process, how late its ticks were, how evenly its commands came, how long inferences took. The demo
runs in real time, so no two runs have equal commands, recorded or not (that recording changes no
command is shown in lock-step, test/ros/recorder/test_recording_changes_nothing.py); what it costs
must be looked for between the kinds. Processor time hardly depends on what else the machine does.

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
from measurement import median_interval, percentiles, write_result

from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.ros.messages.diagnostics import values_of

PACKAGES = ('rclpy', 'torch', 'numpy', 'mcap', 'zstandard')
KINDS = ('plain', '--record', 'recorder_node')
TOPICS = ('/diagnostics', '/vla_policy/report', '/arm_controller/joint_trajectory')
_ANSWER_S = 120.0
_LOOK_S = 0.25
_RECORDER = ('-m', 'vla_runtime.ros.recorder.node', '--ros-args', '-p', 'robot:=tabletop')
_EXECUTOR = b'vla_runtime.ros.executor.node'


def run_demo(folder: Path, seconds: float, seed: int, kind: str) -> dict[str, float]:
    """Run the demo once; its figures."""
    command = [sys.executable, '-m', 'vla_runtime', 'demo', '--out', str(folder)]
    command += ['--seconds', str(seconds), '--seed', str(seed)]
    command += ['--record'] if kind == '--record' else []
    recorder = None
    if kind == 'recorder_node':
        bag = folder.with_suffix('.recording')
        words = [sys.executable, *_RECORDER, '-p', f'folder:={bag}']
        recorder = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with folder.with_suffix('.log').open('w+', encoding='utf-8') as log:
            demo = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            used = _executor_use(demo, seconds + _ANSWER_S)
            if demo.returncode:
                log.seek(0)
                raise SystemExit(f'{" ".join(command)}:\n{log.read()}')
    finally:
        if recorder is not None:
            recorder.send_signal(signal.SIGINT)
            if recorder.wait(_ANSWER_S):
                raise SystemExit(f'recorder_node ended with {recorder.returncode}')
    if recorder is not None:
        print(f'  recorder_node: {_messages(bag)} messages')
    return {'executor_cpu_ms_per_s': _cpu_ms_per_s(used, seconds), **figures_of(folder / 'bag')}


def _executor_use(demo: subprocess.Popen[bytes], timeout_s: float) -> list[tuple[float, float]]:
    """Wait for the demo's end; steady and processor seconds of its executor's process meanwhile."""
    used: list[tuple[float, float]] = []
    executor = 0
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
        time.sleep(_LOOK_S)
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


def _messages(bag: Path) -> int:
    return sum(1 for _ in BagReader(bag).messages(lambda *_: True))


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
    """Per figure: the runs of each kind, and the ratio to the plain run of the same turn."""
    figures: dict[str, Any] = {}
    for name in found['plain'][0]:
        runs = {kind: np.array([run[name] for run in found[kind]]) for kind in KINDS}
        figures[name] = {kind: values.tolist() for kind, values in runs.items()}
        for kind in KINDS[1:]:
            ratio = runs[kind] / runs['plain']
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
    with tempfile.TemporaryDirectory(prefix='vla_recording_cost_') as folder:
        for turn in range(arguments.turns):
            # Each kind is first equally often.
            first = turn % len(KINDS)
            for kind in (*KINDS[first:], *KINDS[:first]):
                out = Path(folder) / f'{turn}_{kind}'
                found[kind].append(run_demo(out, arguments.seconds, turn, kind))
                print(turn, kind, {n: round(v, 2) for n, v in found[kind][-1].items()}, flush=True)
    figures = summary(found)
    for name, figure in figures.items():
        for kind in KINDS[1:]:
            ratio = figure[f'{kind}_over_plain']
            low, high = ratio['median_95']
            print(f'{name:24s} {kind} / plain {ratio["median"]:.3f} [{low:.3f}, {high:.3f}]')
    figures = {'turns': arguments.turns, 'seconds': arguments.seconds, **figures}
    print(f'written: {write_result("recording_cost", figures, PACKAGES, arguments.json)}')


if __name__ == '__main__':
    main()
