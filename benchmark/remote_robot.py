"""What a robot needs for a policy on a server: megabytes of its environment, seconds to be ready.

The environment is made as `./run` makes one, with the extra `remote` and ROS 2's wheels, and with
neither torch nor ONNX Runtime. Then the policy node is started in it again and again, with the demo
policy on a server on this machine: seconds from its start until the contract fits the robot file
and the server has answered, and its memory then. The server runs in the environment of this script.

Run: python benchmark/remote_robot.py [--environment FOLDER] [--turns 10]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from parts.measurement import Target, percentiles, write_result
from serve_load import served

from vla_runtime.processes.domains import claim_domain

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ('numpy', 'websockets', 'msgpack')
REQUIREMENTS = ROOT / 'requirements'


def make_environment(folder: Path) -> float:
    """Make a robot's environment; return the seconds that it took."""
    start_s = perf_counter()
    subprocess.run([sys.executable, '-m', 'venv', str(folder)], check=True)
    pip = [str(folder / 'bin' / 'python'), '-m', 'pip', 'install', '--quiet', '--no-compile']
    subprocess.run([*pip, 'pip>=24', 'setuptools==79.0.1'], check=True)
    pinned = ['-c', str(REQUIREMENTS / 'versions.txt'), '-r', str(REQUIREMENTS / 'wheels.txt')]
    words = [*pip, '--no-build-isolation', *pinned, f'{ROOT}[remote]']
    subprocess.run(words, check=True)
    return perf_counter() - start_s


def megabytes(folder: Path) -> float:
    """Megabytes on disk of a folder, each file once, without bytecode."""
    blocks = {
        (found.st_dev, found.st_ino): found.st_blocks
        for path in folder.rglob('*')
        if path.suffix != '.pyc'
        for found in [path.lstat()]
    }
    return sum(blocks.values()) * 512 / 1e6


def start_node(environment: Path, url: str) -> tuple[float, float]:
    """Start the policy node and end it; seconds until it was ready, and its megabytes of memory."""
    own = {'AMENT_PREFIX_PATH': str(environment), 'ROS_DOMAIN_ID': str(claim_domain())}
    own['PATH'] = f'{environment / "bin"}:{os.environ["PATH"]}'
    given = ('backend:=remote', f'server:={url}', 'robot:=tabletop', 'autostart:=true')
    words = [word for one in given for word in ('-p', one)]
    start_s = perf_counter()
    node = subprocess.Popen(
        [environment / 'bin' / 'policy_node', '--ros-args', *words],
        cwd=environment,
        env={name: v for name, v in os.environ.items() if name != 'PYTHONPATH'} | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert node.stdout is not None
    for line in node.stdout:
        if 'ready in' in line:
            break
    else:
        raise RuntimeError('the node ended before it was ready')
    seconds = perf_counter() - start_s
    status = Path(f'/proc/{node.pid}/status').read_text(encoding='utf-8')
    resident = next(line for line in status.splitlines() if line.startswith('VmRSS'))
    node.terminate()
    node.communicate()
    return seconds, int(resident.split()[1]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').split('\n')[0])
    parser.add_argument('--environment', type=Path, help='made before (default: a new one)')
    parser.add_argument('--turns', type=int, default=10, help='starts of the node (default: 10)')
    parser.add_argument('--out', type=Path, help='another file for the results')
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = arguments.environment or Path(folder) / 'environment'
        if arguments.environment is None:
            figures['install_s'] = make_environment(environment)
        figures['environment_mb'] = megabytes(environment)
        with served(ROOT / 'engines' / 'demo', '--threads', '1') as url:
            # The first start compiles what it imports.
            start_node(environment, url)
            seconds, memory = zip(
                *(start_node(environment, url) for _ in range(arguments.turns)), strict=True
            )
    figures['ready_s'] = percentiles(seconds)
    figures['resident_mb'] = percentiles(memory)
    print(Target('environment, MB', 500, figures['environment_mb']).line)
    print(Target('ready, s', 5, figures['ready_s']['median'], arguments.turns).line)
    print(f'wrote {write_result("remote_robot", figures, PACKAGES, arguments.out)}')


if __name__ == '__main__':
    main()
