"""The control loop's lock: what it is not held for."""

from __future__ import annotations

import threading

import numpy as np

from vla_runtime.execution.chunk_check import CheckedChunk
from vla_runtime.execution.columns import Column
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.ros.control_loop import ControlLoop
from vla_runtime.ros.conversions import ReceivedChunk
from vla_runtime.types import ActionChunk

TIMEOUT_S = 30.0
NAMES = ('a', 'b')


class Slow(ChunkExecutor):
    """Takes as long to check a chunk as the test wants."""

    def __init__(self) -> None:
        columns = tuple(Column(name) for name in NAMES)
        super().__init__(ExecutorConfig(columns), ExecutorParameters(replan_interval=5))
        self.begun, self.go_on = threading.Event(), threading.Event()

    def check_chunk(self, chunk: ActionChunk) -> CheckedChunk:
        self.begun.set()
        assert self.go_on.wait(TIMEOUT_S)
        return super().check_chunk(chunk)


def received(stamp_ns: int) -> ReceivedChunk:
    rows = np.zeros((20, 2))
    chunk = ActionChunk(rows, NAMES, ('position',) * 2, 0.04, rows.astype(np.float32))
    return ReceivedChunk(chunk, stamp_ns, 0, 0, True)


def test_when_a_chunk_is_being_checked_expect_ticks_and_the_dead_man_not_to_wait() -> None:
    core, now_ns = Slow(), [10**18]
    loop = ControlLoop(core, [], lambda: now_ns[0], lambda _: None)

    def tick(now_s: float) -> None:
        now_ns[0] += 10_000_000
        loop.observe_state(NAMES, [0.0, 0.0], now_ns[0])
        loop.tick(now_s)

    tick(1.0)
    assert loop.start(1.0).started
    tick(1.01)
    results = []
    submitting = threading.Thread(
        target=lambda: results.append(loop.submit(received(now_ns[0]), 1.01))
    )
    submitting.start()
    assert core.begun.wait(TIMEOUT_S)
    ticking = threading.Thread(target=lambda: (tick(1.02), loop.check_alive(1.03)), daemon=True)
    ticking.start()
    ticking.join(TIMEOUT_S)
    assert not ticking.is_alive(), 'the tick waits for the check of a chunk'
    assert core.counters.ticks == 3
    core.go_on.set()
    submitting.join(TIMEOUT_S)
    assert results[0].accepted
    tick(1.03)
    assert loop.status().executor.kind.value == 'track'
