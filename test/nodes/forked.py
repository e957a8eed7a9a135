"""A node's module as a fork of one process that has imported what it imports.

Importing PyTorch, and what its first forward pass imports, takes a policy node seconds of processor
time at every start, and an executor or recorder half a second of ROS 2 and NumPy. Here a server of
`multiprocessing` does it once for a test process. What is its own of a node that starts from
nothing, such as its first imports, is left to tests that start one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

from paths import ROOT

from vla_runtime.processes.parent_death import die_with

# The last two are what the policy's first forward pass imports.
_IMPORTED = [
    'vla_runtime.policy',
    'vla_runtime.nodes.managed_node',
    'vla_runtime.nodes.executor.session',
    'vla_runtime.nodes.policy.responder',
    'vla_runtime.nodes.recorder.topic_recorder',
    'torch',
    'sympy',
    'torch._dynamo',
]
_CONTEXT = multiprocessing.get_context('forkserver')


class Fork:
    """A running module with what `subprocess.Popen` has of it.

    Args:
        module: run as `python -m` runs it.
        arguments: arguments of the command line.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        _CONTEXT.set_forkserver_preload(_IMPORTED)
        reader, writer = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(
            target=_run, args=(module, arguments, dict(os.environ), writer), daemon=True
        )
        self._process.start()
        writer.close()
        self.pid = int(self._process.pid or 0)
        self.stdout = os.fdopen(os.dup(reader.fileno()), encoding='utf-8')
        reader.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout_s or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], output: Connection
) -> None:
    """Be the module, with the tests' environment of now."""
    die_with(os.getppid())
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    # What `exec` would start in its place.
    sys.orig_argv = [sys.executable, '-m', module, *arguments]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name='__main__', alter_sys=True)
