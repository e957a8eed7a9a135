"""The executor under real ros2_control: ripple, its end, velocities, speed scaling, switching.

Needs ros2_control and ros2_controllers (controller_manager, joint_trajectory_controller,
forward_command_controller, joint_state_broadcaster, mock_components) in the environment:

    python benchmark/ros2_control.py --before FOLDER

With `--before`, a checkout of an earlier state, each figure is taken of both by turns. Speed
scaling is measured only with `--scale-variable`: the name of an environment variable that names a
file with the factor, for a controller patched so. `--realtime` runs everything under SCHED_RR,
before the other work of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from parts.measurement import in_turn, write_result

ROOT = Path(__file__).parents[1]
RIG = Path(__file__).with_name('parts') / 'ros2_control_rig.py'
RATES_HZ = (100, 125, 250, 500, 1000)
_REALTIME = ('chrt', '--rr', '5')
_RUN_S = 120


def runs(cases: list[str]) -> list[tuple[str, int]]:
    """Return case and controller rate of every run."""
    rates = {
        'ripple': RATES_HZ,
        'kill': RATES_HZ,
        'forward': (100,),
        'velocity': (100, 500),
        'scaling': (500,),
    }
    return [(case, rate) for case in cases for rate in rates.get(case, (500,))]


def run(case: str, rate: int, code: Path, words: argparse.Namespace) -> dict[str, Any]:
    """Measure once; an error is a figure too."""
    work = Path(tempfile.mkdtemp(prefix='ros2_control_')) / 'run'
    command = [*(_REALTIME if words.realtime else ()), sys.executable, str(RIG), case]
    command += ['--rate', str(rate), '--code', str(code), '--work', str(work)]
    if words.scale_variable:
        command += ['--scale-variable', words.scale_variable]
    command += ['--node-environment', *words.node_environment]
    paths = [str(ROOT), os.environ.get('PYTHONPATH', '')]
    environment = {**os.environ, 'PYTHONPATH': ':'.join(filter(None, paths))}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_RUN_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {'error': f'no end within {_RUN_S} s'}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{')]
    if not lines:
        return {'error': done.stderr.strip().splitlines()[-1:] or 'nothing was printed'}
    shutil.rmtree(work.parent)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = ['ripple', 'kill', 'forward', 'velocity', 'scaling']
    every += ['switch', 'partial', 'inactive', 'steps']
    parser.add_argument('--cases', nargs='+', default=every, choices=every)
    parser.add_argument('--before', type=Path, help='checkout of an earlier state')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--realtime', action='store_true')
    parser.add_argument('--scale-variable', default='')
    parser.add_argument('--node-environment', nargs='*', default=[], metavar='NAME=VALUE')
    parser.add_argument('--out', type=Path)
    words = parser.parse_args()
    cases = [case for case in words.cases if case != 'scaling' or words.scale_variable]
    codes = {'after': ROOT, **({'before': words.before.resolve()} if words.before else {})}
    figures: dict[str, Any] = {}
    for round_ in range(words.rounds):
        for case, rate in runs(cases):
            for name in in_turn(sorted(codes), round_):
                found = run(case, rate, codes[name], words)
                of_case = figures.setdefault(case, {}).setdefault(str(rate), {})
                of_case.setdefault(name, []).append(found)
                print(round_, case, rate, name, json.dumps(found), flush=True)
        # After each round, so that a run that is cut off leaves its figures.
        print(write_result('ros2_control', figures, ['numpy', 'ros-rclpy'], words.out))


if __name__ == '__main__':
    main()
