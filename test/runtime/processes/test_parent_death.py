"""Children end with the process that started them, nodes with their launch."""

from __future__ import annotations

import ast
import os
import select
import signal
import subprocess
import sys

import pytest
from paths import ROOT

from vla_runtime.processes.parent_death import LAUNCH_VARIABLE

PARENT = """
import subprocess, sys, time
from vla_runtime.processes.parent_death import dies_with_this_process
child = subprocess.Popen(
    [sys.executable, '-c', 'import time; time.sleep(1000)'],
    preexec_fn=dies_with_this_process(),
)
print(child.pid, flush=True)
time.sleep(1000)
"""
NODE = """
import os, signal, time
from vla_runtime.processes.parent_death import end_with_launch
def end(*_):
    os.write(1, b'SIGTERM')
    os._exit(0)
signal.signal(signal.SIGTERM, end)
end_with_launch()
print(os.getpid(), flush=True)
while True:
    time.sleep(0.1)
"""
# Starts what follows as the launch files start their nodes.
LAUNCH = f"""
import os, subprocess, sys, time
os.environ['{LAUNCH_VARIABLE}'] = str(os.getpid())
subprocess.Popen(sys.argv[1:])
time.sleep(1000)
"""
# Far longer than anything here takes on any machine.
PATIENCE_S = 120.0


def test_a_child_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, '-c', PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    # Becomes readable when the process ends.
    readable, _, _ = select.select([child], [], [], PATIENCE_S)
    os.close(child)
    assert readable


def start_launch(*between: str) -> tuple[subprocess.Popen[str], int]:
    """Start a launch with one node; returns it and the node's process id."""
    launch = subprocess.Popen(
        [sys.executable, '-c', LAUNCH, *between, sys.executable, '-c', NODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launch.stdout is not None
    return launch, int(launch.stdout.readline())


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGTERM])
def test_a_node_gets_sigterm_when_its_launch_ends(number: signal.Signals) -> None:
    launch, _ = start_launch()
    launch.send_signal(number)
    # Read to its end, which comes when the node, too, has closed it.
    assert launch.communicate(timeout=PATIENCE_S)[0] == 'SIGTERM'


def test_what_a_shell_in_a_launch_starts_goes_on() -> None:
    launch, node = start_launch('sh', '-c', '"$@"; true', 'sh')
    launch.kill()
    launch.wait()
    assert launch.stdout is not None
    readable, _, _ = select.select([launch.stdout], [], [], 0.5)
    os.kill(node, signal.SIGTERM)
    assert launch.stdout.read() == 'SIGTERM'
    assert not readable


@pytest.mark.parametrize('reaped', [True, False])
def test_a_node_gets_sigterm_when_its_launch_ended_before_it_could_be_tied(reaped: bool) -> None:
    # To the end of its input, which `communicate` closes.
    wait = ('sh', '-c', 'echo 0; read line; exec "$@"', 'sh')
    launch, _ = start_launch(*wait)
    launch.kill()
    # Ended, and not reaped yet.
    os.waitid(os.P_PID, launch.pid, os.WEXITED | os.WNOWAIT)
    if reaped:
        launch.wait()
    assert launch.communicate(timeout=PATIENCE_S)[0] == 'SIGTERM'


def test_every_node_of_the_launch_files_is_told_its_launch() -> None:
    for file in (ROOT / 'launch').glob('*.launch.py'):
        calls = [
            node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)
        ]
        nodes = [call for call in calls if ast.unparse(call.func) == 'Node']
        assert nodes, file
        for call in nodes:
            given = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert 'LAUNCH_VARIABLE: str(os.getpid())' in given['additional_env'], file
