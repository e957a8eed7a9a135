"""Waiting time of a thread that wants to run: for a core, or for the interpreter of a node.

    python benchmark/parts/soak_pulse.py pulse.txt
    python benchmark/parts/soak_pulse.py held.txt vla_runtime.nodes.policy.node --ros-args ...

Wakes up every 5 ms and writes a line when that was more than 2 ms late: stamp and lateness,
nanoseconds. Ends with the end of stdin. With a module it runs that as a program, wakes up in its
process every 20 ms, and writes a line for 50 ms or more in which no Python ran there. rclpy keeps
the interpreter while it publishes, so that a message which the middleware does not take shows as
such a line; a long call of compiled code does too. Ends with the module.
"""

from __future__ import annotations

import runpy
import sys
import threading
import time
from pathlib import Path

PERIOD_NS, NOTED_NS = 5_000_000, 2_000_000
# A thread in the node's process costs it time and waits for the interpreter.
NODE_PERIOD_NS, NODE_NOTED_NS = 20_000_000, 50_000_000


def watch(path: Path, period_ns: int, noted_ns: int, ended: threading.Event) -> None:
    """Add a line to the file for each wake-up that came late, until the end."""
    with path.open('a', encoding='ascii', buffering=1) as log:
        due = time.monotonic_ns()
        while not ended.is_set():
            due = max(due + period_ns, time.monotonic_ns())
            time.sleep(max(0, due - time.monotonic_ns()) * 1e-9)
            late = time.monotonic_ns() - due
            if late > noted_ns:
                log.write(f'{time.time_ns()} {late}\n')


def main() -> None:
    path, *program = Path(sys.argv[1]), *sys.argv[2:]
    ended = threading.Event()
    if not program:
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
        return watch(path, PERIOD_NS, NOTED_NS, ended)
    words = (path, NODE_PERIOD_NS, NODE_NOTED_NS, ended)
    threading.Thread(target=watch, args=words, daemon=True).start()
    sys.argv = program
    runpy.run_module(program[0], run_name='__main__', alter_sys=True)


if __name__ == '__main__':
    main()
