"""A Ray cluster on this machine, for tests of what runs on one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

needs_ray = pytest.mark.skipif(
    find_spec('ray') is None, reason="Ray is not installed: pip install '.[ray]'"
)
_PATIENCE_S = 120.0
_RAY = 'from ray.scripts.scripts import main; main()'


class Addresses(NamedTuple):
    """Addresses of a cluster: for this machine, which belongs to it, and for any other."""

    member: str
    client: str


@contextmanager
def local_cluster(
    folder: Path, *python_path: Path, token: str | None = None
) -> Iterator[Addresses]:
    """Start a cluster with two CPUs, so of two workers; yield its addresses.

    Args:
        folder: for its log; it starts there.
        python_path: first place where the cluster's workers look for packages.
        token: token that the cluster asks for; None: it asks for none.
    """
    port, client_port = _free_port(), _free_port()
    words = ['start', '--head', '--block', '--num-cpus=2', f'--port={port}']
    words += [f'--ray-client-server-port={client_port}', '--object-store-memory=80000000']
    words += ['--include-dashboard=false', '--disable-usage-stats']
    before = os.environ.get('PYTHONPATH')
    path = os.pathsep.join([*map(str, python_path), *([before] if before else [])])
    # Without a word Ray would ask for the token in the home folder, where there is one.
    security = {'RAY_AUTH_MODE': 'disabled' if token is None else 'token'}
    if token is not None:
        security['RAY_AUTH_TOKEN'] = token
    log = folder / 'ray.log'
    with log.open('w') as output:
        process = subprocess.Popen(
            [sys.executable, '-c', _RAY, *words],
            cwd=folder,
            # A busy machine starts a cluster in more than the 30 seconds that Ray allows.
            env={
                **os.environ,
                **security,
                'PYTHONPATH': path,
                'RAY_raylet_start_wait_time_s': '120',
                'RAY_agent_register_timeout_ms': '120000',
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        end_s = time.monotonic() + _PATIENCE_S
        while 'Ray runtime started' not in log.read_text():
            assert process.poll() is None and time.monotonic() < end_s, log.read_text()
            time.sleep(0.1)
        yield Addresses(f'127.0.0.1:{port}', f'ray://127.0.0.1:{client_port}')
    finally:
        with suppress(psutil.NoSuchProcess):
            started = [psutil.Process(process.pid)]
            started += started[0].children(recursive=True)
            process.terminate()
            _, left = psutil.wait_procs(started, 30)
            for one in left:
                one.kill()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(('', 0))
        return found.getsockname()[1]
