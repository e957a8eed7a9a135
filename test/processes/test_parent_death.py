"""Children end with the process that started them."""

from __future__ import annotations

import os
import select
import subprocess
import sys

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


def test_a_child_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, '-c', PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    # Becomes readable when the process ends; 10 s is for a loaded machine.
    readable, _, _ = select.select([child], [], [], 10.0)
    os.close(child)
    assert readable
