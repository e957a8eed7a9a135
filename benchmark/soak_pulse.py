"""Waiting time of a thread that wants to run: the load of the machine, over time.

    python benchmark/soak_pulse.py pulse.txt

Wakes up every 5 ms and writes a line when that was more than 2 ms late: stamp and lateness,
nanoseconds. Ends with the end of stdin.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

PERIOD_NS = 5_000_000
NOTED_NS = 2_000_000


def main() -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    with Path(sys.argv[1]).open('w', encoding='ascii', buffering=1) as log:
        due = time.monotonic_ns()
        while not ended.is_set():
            due = max(due + PERIOD_NS, time.monotonic_ns())
            time.sleep(max(0, due - time.monotonic_ns()) * 1e-9)
            late = time.monotonic_ns() - due
            if late > NOTED_NS:
                log.write(f'{time.time_ns()} {late}\n')


if __name__ == '__main__':
    main()
