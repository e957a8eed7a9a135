"""A policy server as a process of its own, which a test may kill, stop and start again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from paths import ROOT

from vla_runtime.processes.parent_death import dies_with_this_process


class ServedProcess:
    """`vla_runtime serve` on a port of its own, which it keeps when it is started again.

    Args:
        bundle: of the usual path.
        arguments: further bundles, and options.
        before: words before the command, as of a network namespace.
        host: that the robot knows it by.

    Attributes:
        port: chosen by the first start.
    """

    def __init__(
        self, bundle: Path, *arguments: str, before: tuple[str, ...] = (), host: str = '127.0.0.1'
    ) -> None:
        self.port = 0
        self._before, self._host = before, host
        self._arguments = arguments
        self.start(bundle)

    @property
    def url(self) -> str:
        return f'ws://{self._host}:{self.port}'

    def start(self, bundle: Path) -> None:
        """Start it, and wait until it takes robots."""
        words = ['serve', str(bundle), *self._arguments, '--port', str(self.port), '--threads', '1']
        self._process = subprocess.Popen(
            [*self._before, sys.executable, '-m', 'vla_runtime', *words],
            cwd=ROOT,
            env={**os.environ, 'PYTHONPATH': str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=dies_with_this_process(),
        )
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line)
            if line.startswith('ready: '):
                self.port = int(line.rpartition(':')[2])
                return
        raise AssertionError(''.join(said))

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it at once, as a machine that loses its power."""
        self._process.kill()
        self._process.communicate()
