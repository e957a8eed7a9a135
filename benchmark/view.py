"""What the page costs beside a moving arm: CPU time of its process, late ticks, a stop's answer.

The real `executor_node` moves an arm that follows its commands at 100 Hz, on chunks made by hand,
beside three cameras of 640x480 at 30 Hz. By turns without and with `vla_runtime view`, which one
open page takes everything from. CPU time is that of the view's process in /proc, lateness the
executor's own figure (tick_jitter.py), and beside it stands how long the machine kept a bare loop
waiting. At the end of a turn with the page the arm rests, and the page asks for a stop again and
again: what is measured is the way there and back, with everything else still running.

    python benchmark/view.py [--seconds 600] [--rounds 2]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml
from diagnostic_msgs.msg import DiagnosticArray
from parts.graph_rig import PACKAGES, ROOT, Graph, quiet_domain
from parts.measurement import Target, in_turn, percentiles, write_result
from tick_jitter import NODE, _keep_moving, _said, lateness_of, machine_pulse
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

# Beside the helpers that graph_rig makes importable.
from executor_bench import Arm  # isort: skip

from std_srvs.srv import Trigger

from vla_runtime.processes.parent_death import dies_with_this_process

CAMERAS = ('front', 'wrist', 'side')
MOST_CORES, MOST_STOP_MS = 0.25, 100.0
_STOPS, _WARM_S = 30, 5.0
# A turn without the page shows the machine's own lateness sooner.
_WITHOUT_S = 120.0


def robot_file(folder: Path) -> Path:
    """Write the tabletop's robot file with three cameras of 640x480; the policy uses two."""
    robot = yaml.safe_load((ROOT / 'config' / 'robots' / 'tabletop.yaml').read_text())
    robot['cameras'] = [
        {'name': name, 'topic': f'{name}/image_raw', 'width': 640, 'height': 480}
        for name in CAMERAS
    ]
    path = folder / 'three_cameras.yaml'
    path.write_text(yaml.safe_dump(robot), encoding='utf-8')
    return path


@contextmanager
def cameras(folder: Path) -> Iterator[None]:
    """Publish three raw cameras at 30 Hz from a process of their own."""
    topics = [f'/{name}/image_raw' for name in CAMERAS]
    driver = ROOT / 'benchmark' / 'parts' / 'camera_drivers.py'
    process = subprocess.Popen(
        [sys.executable, str(driver), *topics, '--frames', str(folder / 'frames.txt')],
        stdin=subprocess.PIPE,
        preexec_fn=dies_with_this_process(),
    )
    try:
        yield
    finally:
        process.communicate()


class OpenPage:
    """A page that takes everything; `ask_stop` returns milliseconds to the answer."""

    def __init__(self, port: int) -> None:
        self._socket = connect(f'ws://127.0.0.1:{port}/live', max_size=None)
        self._answered = threading.Event()
        self.pictures, self.news = 0, 0
        threading.Thread(target=self._take, daemon=True).start()

    def ask_stop(self) -> float:
        self._answered.clear()
        begin_s = time.monotonic()
        self._socket.send(json.dumps({'do': 'stop', 'id': 1}))
        if not self._answered.wait(20.0):
            raise RuntimeError('a stop was not answered')
        return 1e3 * (time.monotonic() - begin_s)

    def _take(self) -> None:
        # It ends with the view.
        with suppress(ConnectionClosed):
            self._take_all()

    def _take_all(self) -> None:
        for message in self._socket:
            if isinstance(message, bytes):
                self.pictures += 1
            elif '"reply"' in message:
                self._answered.set()
            else:
                self.news += 1


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process with all of its threads."""
    fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


def turn(graph: Graph, folder: Path, bundle: Path, seconds: float, with_page: bool) -> dict:
    """Run the executor once beside the cameras; return figures of its ticks, and of the page."""
    robot = robot_file(folder)
    process = graph.start(
        'vla_runtime.nodes.executor.node',
        '--ros-args',
        *('--params-file', str(ROOT / 'config' / 'executor.yaml')),
        *('-p', f'bundle:={bundle}', '-p', f'robot:={robot}'),
    )
    diagnostics, arm, found = graph.collect(DiagnosticArray, '/diagnostics'), Arm(graph), {}
    view = None
    try:
        for transition in ('configure', 'activate'):
            if not graph.transition(NODE, transition):
                raise RuntimeError(f'{transition} failed:\n{process.output()}')
        page = None
        if with_page:
            view = graph.start(
                'vla_runtime', 'view', '--namespace', '/', '--robot', str(robot), '--port', '0'
            )
            ready = r'ready: http://127\.0\.0\.1:(\d+)'
            port = graph.wait_for(lambda: re.search(ready, view.text()), 'the page')
            page = OpenPage(int(port[1]))
        graph.wait_for(lambda: graph.call(Trigger, f'{NODE}/start', Trigger.Request()).success, '')
        _keep_moving(graph, arm, _WARM_S)
        diagnostics.clear()
        before, begin_s = (cpu_seconds(view.pid) if view else 0.0), time.monotonic()
        shown = (page.pictures, page.news) if page else (0, 0)
        with machine_pulse(0) as pulse:
            _keep_moving(graph, arm, seconds)
        took_s = time.monotonic() - begin_s
        windows, control = _said(diagnostics, 'tick'), _said(diagnostics, 'control')[-1]
        if view is not None and page is not None:
            found = {
                'view_cores': (cpu_seconds(view.pid) - before) / took_s,
                'pictures_a_second': (page.pictures - shown[0]) / took_s,
                'news_a_second': (page.news - shown[1]) / took_s,
            }
            page.ask_stop()
            found['stop_ms'] = percentiles(np.array([page.ask_stop() for _ in range(_STOPS)]))
    finally:
        arm.close()
        if view is not None:
            view.stop()
        process.stop()
    return {
        'page': with_page,
        'seconds': round(took_s, 1),
        'ticks': int(windows[-1]['ticks']),
        'skipped': int(windows[-1]['skipped']),
        'starved_ticks': int(control['starved_ticks']),
        **lateness_of(windows),
        **found,
        'load': {**pulse, 'load_1min': os.getloadavg()[0]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--seconds', type=float, default=600.0, help='of motion, with the page')
    parser.add_argument('--rounds', type=int, default=2, help='of a turn without and one with')
    parser.add_argument('--bundle', type=Path, default=ROOT / 'engines' / 'demo')
    parser.add_argument('--out', type=Path, help='instead of benchmark/results')
    arguments = parser.parse_args()
    turns: list[dict[str, Any]] = []
    print(
        '| page | p50, ms | p99, ms | most, ms | skipped | machine, ms | view, cores | stop, ms |'
    )
    print('|---|---:|---:|---:|---:|---:|---:|---:|')
    for round_ in range(arguments.rounds):
        for kind in in_turn(('without', 'with'), round_):
            with quiet_domain() as graph, TemporaryDirectory() as name, cameras(Path(name)):
                shows = kind == 'with'
                seconds = arguments.seconds if shows else min(arguments.seconds, _WITHOUT_S)
                one = turn(graph, Path(name), arguments.bundle, seconds, shows)
            turns.append(one)
            stop = one.get('stop_ms', {}).get('median', float('nan'))
            print(
                f'| {kind} | {one["late_p50_ms"]:.3f} | {one["late_p99_ms"]:.3f} '
                f'| {one["late_max_ms"]:.1f} | {one["skipped"]} '
                f'| {one["load"]["machine_late_max_ms"]:.1f} '
                f'| {one.get("view_cores", float("nan")):.3f} | {stop:.1f} |',
                flush=True,
            )
    beside = [one for one in turns if one['page']]
    targets = [
        Target('cores of the view', MOST_CORES, max(one['view_cores'] for one in beside)),
        Target('a stop, ms', MOST_STOP_MS, max(one['stop_ms']['p99'] for one in beside)),
    ]
    for target in targets:
        print(target.line)
    packages = (*PACKAGES, 'viser', 'starlette', 'uvicorn', 'websockets')
    print(write_result('view', {'turns': turns}, packages, arguments.out).name)
    return int(any(target.found is not None and target.found > target.most for target in targets))


if __name__ == '__main__':
    sys.exit(main())
