"""Shared by the benchmarks of nodes: a ROS graph of their own, and the tests' helpers for it."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / 'test'), str(ROOT / 'test' / 'runtime' / 'nodes')]

from graph import LATCHED, RELIABLE, SENSOR, Graph, Process, isolate  # noqa: E402

__all__ = [
    'LATCHED',
    'PACKAGES',
    'RELIABLE',
    'ROOT',
    'SENSOR',
    'Graph',
    'Process',
    'isolate',
    'keep_others_out',
    'quiet_domain',
]

PACKAGES = ('numpy', 'torch', 'ros-rclpy', 'ros-fastrtps')


def keep_others_out() -> None:
    """Run this process and its children before everything else (SCHED_FIFO, needs permission)."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))


@contextmanager
def quiet_domain():  # type: ignore[no-untyped-def]
    """A graph of its own, in a domain that the machine's other ROS programs do not use."""
    isolate()
    made = Graph('benchmark')
    try:
        yield made
    finally:
        made.close()
