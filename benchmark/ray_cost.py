"""What a Ray cluster costs and gains on one machine: the same recordings by processes and by Ray.

`vla_runtime replay` runs copies of one recording in one process, in two, and on a cluster of two
workers that it starts for the time (`--ray local`), by turns. Of every run: seconds by the clock,
and processor seconds of the command and all its children, which hardly depend on what else the
machine does. One copy gives the cost of beginning, the difference to many that of the work.

    python benchmark/ray_cost.py BAG [--copies 8] [--turns 3]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from measurement import write_result

PACKAGES = ('ray', 'torch', 'numpy')
KINDS: Mapping[str, Sequence[str]] = {
    'one process': ('--workers', '1'),
    'two processes': ('--workers', '2'),
    'ray, two workers': ('--ray', 'local', '--workers', '2'),
}
_LOOK_S = 0.1


def run(command: Sequence[str]) -> dict[str, float]:
    """Run a command to its end: seconds by the clock, and processor seconds with all children."""
    begin_s = time.monotonic()
    done = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    # A process's own time, as it was last seen: not all of Ray's children are waited for.
    used: dict[tuple[int, float], float] = {}
    while done.poll() is None:
        with suppress(psutil.NoSuchProcess):
            for one in (done, *done.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = one.cpu_times()
                    used[one.pid, one.create_time()] = times.user + times.system
        time.sleep(_LOOK_S)
    if done.returncode:
        raise SystemExit(f'{" ".join(command)}:\n{done.stderr.read().decode()}')
    return {'seconds': time.monotonic() - begin_s, 'cpu_seconds': sum(used.values())}


def summary_of(out: Path) -> list[dict[str, Any]]:
    """Results of a run without their times, which must be those of any other run."""
    results = json.loads((out / 'summary.json').read_text(encoding='utf-8'))['recordings']
    return [
        {name: value for name, value in one.items() if name not in ('replay_s', 'median_ms')}
        for one in results
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('recording', type=Path, metavar='BAG')
    parser.add_argument('--copies', type=int, default=8, help='of the recording (default: 8)')
    parser.add_argument('--turns', type=int, default=3, help='runs of each (default: 3)')
    parser.add_argument('--json', type=Path, help='write here instead of to benchmark/results/')
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix='vla_ray_cost_') as folder:
        for number in range(arguments.copies):
            shutil.copytree(arguments.recording, Path(folder) / 'bags' / f'{number:02d}')
        places = {1: Path(folder) / 'bags' / '00', arguments.copies: Path(folder) / 'bags'}
        expected: dict[int, list[dict[str, Any]]] = {}
        for turn in range(arguments.turns):
            for count, place in places.items():
                for kind, words in KINDS.items():
                    out = Path(folder) / f'{turn}_{count}_{kind}'
                    command = [sys.executable, '-m', 'vla_runtime', 'replay', str(place)]
                    figures = run([*command, '--out', str(out), *words])
                    assert summary_of(out) == expected.setdefault(count, summary_of(out)), kind
                    found.setdefault(f'{kind}, {count} recordings', []).append(figures)
                    print(turn, count, kind, figures, flush=True)
    result: dict[str, Any] = {'copies': arguments.copies, 'turns': arguments.turns}
    result['inferences'] = sum(one['inferences'] for one in expected[arguments.copies])
    for name, runs in found.items():
        result[name] = {
            figure: [round(one[figure], 2) for one in runs] for figure in ('seconds', 'cpu_seconds')
        }
        medians = {figure: float(np.median(values)) for figure, values in result[name].items()}
        print(f'{name:32s} ' + ', '.join(f'{k} {v:.1f}' for k, v in medians.items()))
    print(f'written: {write_result("ray_cost", result, PACKAGES, arguments.json)}')


if __name__ == '__main__':
    main()
