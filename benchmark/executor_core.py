"""Cost of the chunk executor: microseconds a tick and a chunk, without ROS.

The target is 100 µs a tick at 14 joints, with every limit switched on, the robot in motion at every
tick. A chunk is checked beside the ticks and taken between two of them, so that what it takes must
stay well below a control period. With --realtime the largest figure may be the kernel's own: its
throttle takes the processor from real-time work for 50 ms of a busy second.

    python benchmark/executor_core.py [--seconds 60] [--realtime] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import os
import tracemalloc
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from measurement import percentiles, write_result

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import Command, CommandKind
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.types import ActionChunk

HORIZON = 50
STEP_S = 1.0 / 30.0
PERIOD_NS = 10_000_000
DELAY_TICKS = 12
LONG_HORIZON = 900  # half a minute, within which no other chunk is wanted


class Drive:
    """An executor that is driven along a sine by a policy with a constant delay."""

    def __init__(
        self, joints: int, mode: str, replan_interval: int = 10, horizon: int = HORIZON
    ) -> None:
        self.horizon = horizon
        self.names = tuple(f'joint_{index}' for index in range(joints))
        limit = ColumnLimits(-2.0, 2.0, 3.0, 60.0, 0.5)
        self.executor = ChunkExecutor(
            ExecutorConfig(
                tuple(Column(name) for name in self.names),
                make_limits(self.names, dict.fromkeys(self.names, limit)),
            ),
            ExecutorParameters(
                replan_interval=replan_interval,
                overrun='hold',
                handover=HandoverParameters(mode=mode),  # type: ignore[arg-type]
            ),
        )
        self.phases = np.arange(joints) * 0.1
        self.now_s, self.ros_ns = 100.0, 10**12
        self.positions = np.zeros(joints)
        self.number = 0
        self.due: tuple[int, int] | None = None
        self.ticks: list[float] = []
        self.tracked = 0
        self.checks: list[float] = []
        self.chunks: list[float] = []
        self.tick()
        assert self.executor.start(self.now_s, self.ros_ns).started

    def chunk(self, observed_ns: int) -> ActionChunk:
        times = (observed_ns - 10**12) * 1e-9 + np.arange(self.horizon) * STEP_S
        actions = 0.5 * (np.sin(times[:, None] + self.phases) - np.sin(self.phases))
        kinds = ('position',) * len(self.names)
        return ActionChunk(actions, self.names, kinds, STEP_S, actions.astype(np.float32))

    def tick(self) -> None:
        """One control period, with all that a node does in it."""
        self.step()
        if self.executor.poll_request(self.now_s, self.ros_ns, past_steps=8) is not None:
            self.due = (len(self.ticks) + DELAY_TICKS, self.ros_ns)
        if self.due is not None and len(self.ticks) >= self.due[0]:
            self.answer(self.due[1])

    def step(self) -> None:
        """Measure, tick, follow."""
        self.observe()
        start = perf_counter()
        command = self.executor.tick(self.now_s, self.ros_ns)
        self.ticks.append((perf_counter() - start) * 1e6)
        self.tracked += command.kind is CommandKind.TRACK
        self.follow(command)

    def observe(self) -> None:
        """Let a period pass and measure, stamped in ROS time."""
        self.now_s += PERIOD_NS * 1e-9
        self.ros_ns += PERIOD_NS
        self.executor.observe_state(self.names, self.positions, self.ros_ns)

    def follow(self, command: Command) -> None:
        """A robot that reaches every command at once."""
        if command.kind is not CommandKind.IDLE:
            np.copyto(self.positions, command.setpoints)

    def answer(self, observed_ns: int) -> None:
        self.due = None
        self.number += 1
        chunk = self.chunk(observed_ns)
        start = perf_counter()
        checked = self.executor.check_chunk(chunk)
        middle = perf_counter()
        result = self.executor.submit_chunk(
            checked, observed_ns, 0, self.number, self.now_s, self.ros_ns
        )
        end = perf_counter()
        self.checks.append((middle - start) * 1e6)
        self.chunks.append((end - middle) * 1e6)
        assert result.accepted, result.text


def measure(joints: int, mode: str, seconds: float) -> dict[str, Any]:
    """Drive for some seconds of robot time."""
    drive = Drive(joints, mode)
    for _ in range(300):
        drive.tick()
    drive.ticks.clear()
    drive.checks.clear()
    drive.chunks.clear()
    drive.tracked = 0
    drive.due = None if drive.due is None else (DELAY_TICKS, drive.due[1])
    gc.collect()
    gc.disable()
    for _ in range(round(seconds * 1e9 / PERIOD_NS)):
        drive.tick()
    gc.enable()
    assert drive.tracked == len(drive.ticks), 'a hold was measured, not a motion'
    return {
        'joints': joints,
        'handover': mode,
        'tick_us': percentiles(drive.ticks),
        'check_us': percentiles(drive.checks),
        'chunk_us': percentiles(drive.chunks),
        'limited_ticks': drive.executor.counters.limited_ticks,
        'starved_ticks': drive.executor.counters.starved_ticks,
    }


def memory_of_ticks(joints: int, ticks: int = 2000) -> dict[str, int]:
    """Bytes that ticks of a moving robot keep, and the largest amount that one of them needs.

    The ticks lie within one chunk: what a seam or a request allocates is not the steady tick's.
    """
    drive = Drive(joints, 'switch', replan_interval=LONG_HORIZON, horizon=LONG_HORIZON)
    for _ in range(3 * DELAY_TICKS):
        drive.tick()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    drive.step()
    before, _ = tracemalloc.get_traced_memory()
    largest = 0
    for _ in range(ticks):
        drive.observe()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        command = drive.executor.tick(drive.now_s, drive.ros_ns)
        _, peak = tracemalloc.get_traced_memory()
        largest = max(largest, peak - held)
        drive.follow(command)
        assert command.kind is CommandKind.TRACK, f'a hold was measured: {command}'
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    gc.enable()
    return {'kept_bytes': after - before, 'peak_bytes': largest, 'ticks': ticks}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--seconds', type=float, default=60.0, help='robot time (default: 60)')
    parser.add_argument('--json', type=Path, help='also write the figures to this file')
    parser.add_argument(
        '--realtime', action='store_true', help='priority above all other work (needs permission)'
    )
    arguments = parser.parse_args()
    if arguments.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    if hasattr(os, 'sched_setaffinity'):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    rows = [
        measure(joints, mode, arguments.seconds)
        for joints in (6, 14)
        for mode in ('switch', 'blend', 'ensemble')
    ]
    print('joints  hand-over   tick p50    p99    max µs   check p50   take p50    p99 µs')
    for row in rows:
        tick, check, chunk = row['tick_us'], row['check_us'], row['chunk_us']
        print(
            f'{row["joints"]:6d}  {row["handover"]:9s} {tick["median"]:10.1f} {tick["p99"]:6.1f} '
            f'{tick["max"]:9.1f} {check["median"]:11.1f} {chunk["median"]:10.1f} '
            f'{chunk["p99"]:9.1f}'
        )
    memory = memory_of_ticks(14)
    print(
        f'{memory["ticks"]} ticks of 14 joints keep {memory["kept_bytes"]} bytes, '
        f'at most {memory["peak_bytes"]} at a time'
    )
    if arguments.json is not None:
        figures = {'rows': rows, 'memory': memory}
        print('wrote', write_result('executor_core', figures, ['numpy'], arguments.json))


if __name__ == '__main__':
    main()
