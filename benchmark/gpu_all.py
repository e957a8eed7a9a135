"""Every measurement that wants a GPU, one after the other, with a result file each.

    python benchmark/gpu_all.py OUT
    python benchmark/gpu_all.py OUT --lerobot-python LEROBOT_ENV/bin/python --realtime-vla CHECKOUT

`gpu.py`, then TensorRT's engines (`gpu_tensorrt.py`), LeRobot (`lerobot_turns.py`) and the public
Triton implementation (`realtime_vla.py`): those whose requirements are given. About an hour. Each
command has a limit of time. What fails, is cut off or is left out is named at the end, and does not
stop the others. Exit code: 0, 1 where a measurement failed or was cut off, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from parts.gpu_run import described_parser, device_fault  # noqa: E402

from vla_runtime.processes.parent_death import dies_with_this_process  # noqa: E402

Command = list[str]
# Seconds that a command may take. `gpu.py` ends by itself before; LeRobot's side compiles
# for many minutes, and an engine is built.
LIMITS_S = {
    'gpu.py': 600.0,
    'gpu_tensorrt.py': 2400.0,
    'lerobot_turns.py': 2400.0,
    'realtime_vla.py': 900.0,
}


def commands(arguments: argparse.Namespace) -> tuple[dict[str, Command], dict[str, str]]:
    """Return the command of each measurement, and what is left out with its reason."""
    from vla_runtime.engines.preflight import missing_package

    out = arguments.out
    found: dict[str, Command] = {'gpu': ['gpu.py', '--json', f'{out}/gpu.json']}
    left_out: dict[str, str] = {}
    if missing := missing_package('tensorrt', 'cuda', 'onnxruntime', 'onnx'):
        left_out['tensorrt'] = f"needs the Python package '{missing}'"
    else:
        for precision in ('bfloat16', 'int8'):
            to_file = ['--json', f'{out}/tensorrt_{precision}.json']
            words = ['gpu_tensorrt.py', f'{out}/tensorrt', '--precision', precision, *to_file]
            found[f'tensorrt {precision}'] = words
    if arguments.lerobot_python is None:
        left_out['lerobot'] = 'needs --lerobot-python, a Python with LeRobot'
    else:
        with_lerobot = ['--lerobot-python', str(arguments.lerobot_python)]
        to_file = ['--json', f'{out}/lerobot_pi05_gpu.json']
        found['lerobot'] = ['lerobot_turns.py', '--device', 'cuda', *with_lerobot, *to_file]
    if arguments.realtime_vla is None:
        left_out['realtime-vla'] = 'needs --realtime-vla, a checkout of it'
    else:
        to_file = ['--json', f'{out}/realtime_vla.json']
        found['realtime-vla'] = ['realtime_vla.py', str(arguments.realtime_vla), *to_file]
    return found, left_out


def run(command: Command, most_s: float) -> str:
    """Run a measurement's command, `most_s` at most; return how it failed, or ''."""
    script, *words = command
    print(f'\n$ python benchmark/{" ".join(command)}', flush=True)
    limit_s = min(most_s, LIMITS_S.get(script, most_s))
    code = _run_one([sys.executable, str(HERE / script), *words], limit_s)
    if code is None:
        return f'{script} was cut off after {limit_s:.0f} s'
    return f'{script} ended with {code}' if code else ''


def _run_one(command: Sequence[str], limit_s: float) -> int | None:
    """Return a command's exit code; None where it and all its children were cut off."""
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=dies_with_this_process())
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Also at Ctrl-C, which its own session does not see.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; see the module for the exit code."""
    arguments = _arguments(argv)
    if reason := device_fault('cuda'):
        print(f'error: {reason}', file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    found, left_out = commands(arguments)
    failures = {
        name: failure
        for name, command in found.items()
        if (failure := run(command, arguments.most_s))
    }
    print()
    for name in found:
        print(f'{name:18} {failures.get(name, "done")}')
    for name, reason in left_out.items():
        print(f'{name:18} left out: {reason}')
    return 1 if failures else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument('out', type=Path, metavar='OUT', help='folder for the results')
    parser.add_argument('--lerobot-python', type=Path, help='Python of an environment with LeRobot')
    parser.add_argument('--realtime-vla', type=Path, help='checkout of Dexmal/realtime-vla')
    parser.add_argument(
        '--most-s',
        type=float,
        default=max(LIMITS_S.values()),
        metavar='S',
        help='no command may take longer (default: each its own limit)',
    )
    return parser.parse_args(argv)


if __name__ == '__main__':
    sys.exit(main())
