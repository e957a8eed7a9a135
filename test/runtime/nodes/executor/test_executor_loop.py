"""The control loop's lock: what it is not held for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import numpy as np
import pytest
from reported_states import report

from vla_runtime.execution.chunk_check import CheckedChunk
from vla_runtime.execution.columns import Column
from vla_runtime.execution.config import ExecutorConfig, Mode
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.stopping import OnStop, StopActions
from vla_runtime.execution.watchdog import MotionClock, WatchdogParameters
from vla_runtime.messages.trajectories import stamp_to_ns
from vla_runtime.nodes.executor.control_loop import ControlLoop, SendError
from vla_runtime.nodes.executor.steady_loop import SteadyLoop, system_time_ns
from vla_runtime.types import ActionChunk, ChunkHeader, PlanRequest

TIMEOUT_S = 30.0
NAMES = ('a', 'b')


def begin(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def end(thread: threading.Thread) -> None:
    thread.join(TIMEOUT_S)
    assert not thread.is_alive(), 'it hangs'


class Slow(ChunkExecutor):
    """Takes as long to check a chunk as the test wants."""

    def __init__(self) -> None:
        columns = tuple(Column(name) for name in NAMES)
        super().__init__(
            ExecutorConfig(columns), ExecutorParameters(replan_interval=5, overrun='hold')
        )
        self.begun, self.go_on = threading.Event(), threading.Event()

    def check_chunk(self, chunk: ActionChunk) -> CheckedChunk:
        self.begun.set()
        assert self.go_on.wait(TIMEOUT_S)
        return super().check_chunk(chunk)


def received(stamp_ns: int) -> tuple[ActionChunk, ChunkHeader]:
    rows = np.zeros((20, 2))
    chunk = ActionChunk(rows, NAMES, ('position',) * 2, 0.04, rows.astype(np.float32))
    return chunk, ChunkHeader(stamp_ns, 0, 0)


def test_when_a_chunk_is_being_checked_expect_ticks_and_the_dead_man_not_to_wait() -> None:
    core, now_ns = Slow(), [10**18]
    loop = ControlLoop(core, [], lambda: now_ns[0], lambda _: None)

    def tick(now_s: float) -> None:
        now_ns[0] += 10_000_000
        loop.observe_state(NAMES, [0.0, 0.0], now_ns[0])
        loop.tick(now_s)

    report(loop.observe_state, NAMES, [0.0, 0.0], now_ns[0])
    tick(1.0)
    assert loop.start(1.0).started
    tick(1.01)
    results = []
    submitting = begin(lambda: results.append(loop.submit(*received(now_ns[0]), 1.01)))
    assert core.begun.wait(TIMEOUT_S)
    # The tick does not wait for the check of a chunk.
    end(begin(lambda: (tick(1.02), loop.check_alive(1.03))))
    assert core.counters.ticks == 3
    core.go_on.set()
    end(submitting)
    assert results[0].accepted
    tick(1.03)
    assert loop.status().executor.kind.value == 'track'


class Output:
    """Keeps sent commands and their stamps; or fails, from a given call on."""

    topic = 'arm'
    repeats_hold = False

    def __init__(self) -> None:
        self.follows: list[bool] = []
        self.sent: list[list[float]] = []
        self.stamps: list[object] = []
        self.broken = False

    def send(self, setpoints: np.ndarray, stamp: object, follows: bool) -> None:
        if self.broken:
            raise OSError('the cable is out')
        self.stamps.append(stamp)
        self.follows.append(follows)
        self.sent.append([float(number) for number in setpoints])


class Bench:
    """A loop around an arm and a base that goes by velocity, in motion, with an output for each."""

    def __init__(self, on_stop: StopActions | None = None) -> None:
        columns = (Column('a'), Column('b', 'velocity', feedback=False))
        config = ExecutorConfig(columns, on_stop=on_stop or StopActions())
        self.core = ChunkExecutor(config, ExecutorParameters(replan_interval=5, overrun='hold'))
        self.now_ns, self.now_s = 10**18, 1.0
        self.first, self.second = Output(), Output()
        outputs: list = [self.first, self.second]
        self.loop = ControlLoop(self.core, outputs, lambda: self.now_ns, lambda _: None)
        report(self.loop.observe_state, ['a'], [0.0], self.now_ns)
        self.tick()
        assert self.loop.start(self.now_s).started
        self.tick()
        rows = np.array([[0.0, 0.5]] * 20)
        chunk = ActionChunk(rows, NAMES, ('position', 'velocity'), 0.04, rows.astype(np.float32))
        result = self.loop.submit(chunk, ChunkHeader(self.now_ns, 0, 0), self.now_s)
        assert result.accepted, result.text
        for _ in range(8):
            self.tick()
        assert self.second.sent[-1][1] > 0.1

    def tick(self, measured: float = 0.0) -> None:
        self.now_ns += 10_000_000
        self.now_s += 0.01
        self.loop.observe_state(['a'], [measured], self.now_ns)
        self.loop.tick(self.now_s)


def test_a_command_bears_the_time_that_its_motion_was_computed_for() -> None:
    core, output = ChunkExecutor(ExecutorConfig((Column('a'),)), ExecutorParameters()), Output()
    now_ns, late_ns = [10**18], [0]
    loop = ControlLoop(
        core,
        [output],  # type: ignore[list-item]
        # What passes between the begin of a tick and the look at the clock.
        lambda: now_ns[0] + late_ns[0],
        lambda _: None,
        ros_time_of_ns=lambda now_s: 10**18 + round(now_s * 1e9),
    )
    report(loop.observe_state, ['a'], [0.0], now_ns[0])
    for tick, late in enumerate((0, 0, 7_000_000, 0, 20_000_000), start=1):
        now_ns[0], late_ns[0] = 10**18 + tick * 10_000_000, late
        loop.observe_state(['a'], [0.0], now_ns[0])
        loop.tick(0.01 * tick)
        loop.start(0.01 * tick)
    loop.check_alive(0.2)
    stamps = [stamp_to_ns(stamp) - 10**18 for stamp in output.stamps]  # type: ignore[arg-type]
    assert stamps == [20_000_000, 30_000_000, 40_000_000, 50_000_000, 200_000_000]


def test_a_command_goes_on_from_the_one_before_it_and_never_from_one_before_a_dry_run() -> None:
    bench = Bench()
    sent, follows = bench.second.sent, bench.second.follows
    assert not follows[0] and all(follows[1:])
    bench.loop.set_dry_run(True)
    for _ in range(100):
        bench.tick()
    count = len(sent)
    bench.loop.set_dry_run(False)
    # Moved by hand meanwhile.
    for _ in range(3):
        bench.tick(measured=0.3)
    assert bench.loop.start(bench.now_s).started
    for _ in range(2):
        bench.tick(measured=0.3)
    assert sent[count] == [0.3, 0.0]
    assert follows[count:] == [False, True]


@pytest.mark.parametrize('action', get_args(OnStop))
@pytest.mark.parametrize('stopped_before', [False, True])
def test_a_base_in_motion_is_sent_zero_velocity_before_a_dry_run(
    action: OnStop, stopped_before: bool
) -> None:
    bench = Bench(StopActions(stopped=action))
    if stopped_before:
        # In the same moment: no tick has commanded the stop yet.
        bench.loop.stop()
    bench.loop.set_dry_run(True)
    for _ in range(100):
        bench.tick()
    assert bench.loop.status().executor.dry_run
    assert bench.second.sent[-1][1] == 0.0
    count = len(bench.second.sent)
    for _ in range(10):
        bench.tick()
    assert len(bench.second.sent) == count


def test_what_a_hanging_thread_sends_after_a_dry_run_began_is_what_it_had() -> None:
    core = ChunkExecutor(ExecutorConfig((Column('a'),)), ExecutorParameters())
    waiting, go_on = threading.Event(), threading.Event()

    class Slow(Output):
        def send(self, setpoints: np.ndarray, stamp: object, follows: bool) -> None:
            waiting.set()
            assert go_on.wait(TIMEOUT_S)
            super().send(setpoints, stamp, follows)

    outputs: list = [Slow(), Output()]
    loop = ControlLoop(core, outputs, lambda: 10**18, lambda _: None)
    report(loop.observe_state, ['a'], [0.7], 10**18)
    loop.observe_state(['a'], [0.7], 10**18)
    loop.tick(1.0)
    assert loop.start(1.0).started
    ticking = begin(lambda: loop.tick(1.01))
    assert waiting.wait(TIMEOUT_S)
    loop.set_dry_run(True)
    loop.close()
    go_on.set()
    end(ticking)
    assert outputs[1].sent == [[0.7]]


def test_when_the_dead_man_was_faster_expect_the_overtaken_tick_not_to_be_sent() -> None:
    bench = Bench()
    bench.loop.check_alive(bench.now_s + 0.2)
    sent = len(bench.second.sent)
    # It began before, and waited for the lock meanwhile.
    bench.loop.tick(bench.now_s + 0.1)
    assert len(bench.second.sent) == sent
    bench.now_s += 0.2
    bench.tick()
    assert len(bench.second.sent) == sent + 1


def test_when_a_tick_is_kept_from_its_output_expect_no_older_command_after_a_newer_one() -> None:
    bench = Bench()
    waiting, go_on = threading.Event(), threading.Event()

    class Slow(Output):
        def send(self, setpoints: np.ndarray, stamp: object, follows: bool) -> None:
            if threading.current_thread() is ticking:
                waiting.set()
                assert go_on.wait(TIMEOUT_S)
            super().send(setpoints, stamp, follows)

    slow = Slow()
    bench.loop = ControlLoop(bench.core, [slow], lambda: bench.now_ns, lambda _: None)  # type: ignore[list-item]
    ticking = threading.Thread(target=bench.tick, daemon=True)
    ticking.start()
    assert waiting.wait(TIMEOUT_S)
    moving = bench.core.status().kind.value == 'track'
    looking = begin(lambda: bench.loop.check_alive(bench.now_s + 1))
    go_on.set()
    end(ticking)
    end(looking)
    # The tick's command left as it was taken, and the hold after it.
    assert moving
    assert slow.sent[0][1] > 0.1 and slow.sent[-1][1] == 0.0


def test_when_a_start_comes_in_the_middle_of_a_tick_expect_the_request_with_the_next_one() -> None:
    core, now_ns = ChunkExecutor(ExecutorConfig((Column('a'),)), ExecutorParameters()), [10**18]
    requests: list[PlanRequest] = []
    meanwhile: list[Callable[[], object]] = []

    class Arm(Output):
        def send(self, setpoints: np.ndarray, stamp: object, follows: bool) -> None:
            super().send(setpoints, stamp, follows)
            while meanwhile:
                meanwhile.pop()()

    arm: Any = Arm()
    loop = ControlLoop(core, [arm], lambda: now_ns[0], requests.append)

    def tick(now_s: float) -> None:
        now_ns[0] += 10_000_000
        loop.observe_state(['a'], [0.0], now_ns[0])
        loop.tick(now_s)

    report(loop.observe_state, ['a'], [0.0], now_ns[0])
    tick(1.0)
    assert loop.start(1.0).started
    tick(1.01)
    loop.stop()
    requests.clear()
    meanwhile.append(lambda: loop.start(1.02))
    tick(1.02)
    assert not meanwhile and core.mode is Mode.RUNNING
    assert not requests
    tick(1.03)
    assert len(requests) == 1
    # Of a policy that names no request.
    rows = np.zeros((20, 1))
    chunk = ActionChunk(rows, ('a',), ('position',), 0.04, rows.astype(np.float32))
    result = loop.submit(chunk, ChunkHeader(now_ns[0] + 1_000, 0, 0), 1.03)
    assert result.accepted, result.text


def tick_twice(bench: Bench) -> None:
    with suppress(SendError):
        bench.tick()
    bench.tick()


@pytest.mark.parametrize(
    'send', [tick_twice, lambda b: b.loop.check_alive(b.now_s + 10.0), lambda b: b.loop.close()]
)
def test_when_an_output_fails_expect_the_hold_on_every_other_one(
    send: Callable[[Bench], object],
) -> None:
    bench = Bench()
    bench.first.broken = True
    with pytest.raises(SendError):
        send(bench)
    assert bench.second.sent[-1] == [0.0, 0.0]
    if send is tick_twice:
        executor = bench.loop.status().executor
        assert executor.reason.value == 'internal_error' and 'the cable is out' in executor.detail


def test_when_asking_for_a_chunk_fails_expect_the_command_of_that_tick_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()

    def fail(*_: object) -> None:
        raise RuntimeError('no plan')

    monkeypatch.setattr(bench.core, 'poll_request', fail)
    sent = len(bench.second.sent)
    with pytest.raises(RuntimeError, match='no plan'):
        bench.tick()
    assert len(bench.second.sent) == sent + 1


def test_when_the_control_thread_hangs_in_the_core_expect_the_hold_sent_at_the_end() -> None:
    bench = Bench()
    bench.loop._lock.acquire()  # and never released
    end(begin(bench.loop.close))
    assert bench.second.sent[-1] == [0.0, 0.0]


def test_when_the_control_thread_hangs_in_an_output_expect_the_hold_last() -> None:
    bench = Bench()
    hung, release = threading.Event(), threading.Event()
    send = bench.second.send

    def hang(setpoints: np.ndarray, stamp: object, follows: bool) -> None:
        if threading.current_thread() is ticking:
            hung.set()
            assert release.wait(TIMEOUT_S)
        send(setpoints, stamp, follows)

    bench.second.send = hang  # type: ignore[method-assign]
    ticking = threading.Thread(target=bench.tick)
    ticking.start()
    try:
        assert hung.wait(TIMEOUT_S)
        end(begin(bench.loop.close))
        assert bench.second.sent[-1] == [0.0, 0.0]
    finally:
        release.set()
        ticking.join()
    # What was on its way comes late, and holds too; nothing follows it.
    assert bench.second.sent[-1] == [0.0, 0.0]
    count = len(bench.second.sent)
    bench.tick()
    assert len(bench.second.sent) == count


@pytest.mark.parametrize('which', ['first', 'second'])
def test_when_an_output_hangs_for_good_expect_the_hold_on_every_other_one(which: str) -> None:
    bench = Bench()
    release = threading.Event()
    hanging = getattr(bench, which)
    hanging.send = lambda *_: release.wait(TIMEOUT_S)
    errors: list[Exception] = []

    def close() -> None:
        try:
            bench.loop.close()
        except SendError as error:
            errors.append(error)

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    try:
        other = bench.second if which == 'first' else bench.first
        closing.join(TIMEOUT_S / 2)
        assert not closing.is_alive()
        assert other.sent[-1] == [0.0, 0.0]
        assert 'hold on arm hangs' in str(errors[0])
    finally:
        release.set()


@pytest.mark.parametrize('clock', ['steady', 'ros'])
def test_a_slow_base_comes_to_rest_before_the_end_and_less_time_than_it_takes_is_said(
    clock: MotionClock,
) -> None:
    limits = make_limits(('base',), {'base': ColumnLimits(velocity=1.0, acceleration=2.0)})
    base = (Column('base', kind='velocity', feedback=False),)
    core = ChunkExecutor(
        ExecutorConfig(
            base,
            limits,
            # Bounds that a busy machine does not reach.
            watchdog=WatchdogParameters(tick_timeout_s=1.0, clock_jump_s=5.0, motion_clock=clock),
        ),
        ExecutorParameters(replan_interval=20),
    )
    sent: list[float] = []
    sent_s: list[float] = []
    tick_s = [0.0]
    # A simulated clock stands still in the teardown: the thread that takes its messages waits.
    last_ns: list[int] = []

    def ros_now_ns() -> int:
        return last_ns[0] if last_ns else time.time_ns()

    class Base(Output):
        def send(self, setpoints: np.ndarray, stamp: object, follows: bool) -> None:
            sent.append(float(setpoints[0]))
            sent_s.append(tick_s[0])

    stamps = system_time_ns if clock == 'steady' else None
    loop = ControlLoop(core, [Base()], ros_now_ns, lambda _: None, stamps)
    loop.begin_episode(1)

    def tick(now_s: float) -> None:
        tick_s[0] = now_s
        loop.tick(now_s)

    ticks = SteadyLoop(tick, 100.0, 'control', lambda error: None)
    ticks.start()
    try:
        wait_for(lambda: loop.start(time.monotonic()).started)
        rows = np.ones((400, 1))
        chunk = ActionChunk(rows, ('base',), ('velocity',), 0.05, rows.astype(np.float32))

        def moves() -> bool:
            loop.submit(chunk, ChunkHeader(time.time_ns(), 1, len(sent)), time.monotonic())
            return bool(sent) and sent[-1] == 1.0

        wait_for(moves)
        if clock == 'ros':
            last_ns.append(time.time_ns())
        assert not loop.stop_and_wait(0.0)
        assert loop.stop_and_wait(limits.braking_s + TIMEOUT_S)
    finally:
        ticks.stop(TIMEOUT_S)
        loop.close()
    moved = sent.index(1.0)
    # Within the acceleration, however late a tick is on a busy machine; two ticks' time in doubt.
    most = 2.0 * (np.diff(sent_s[moved:]) + 0.02)
    assert (-np.diff(sent[moved:]) <= most).all() and sent[-1] == 0.0


def wait_for(condition) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def ticked(bench: Bench, count: int) -> None:
    for _ in range(count):
        bench.tick()


@pytest.mark.parametrize('stopped_before', [False, True])
def test_an_output_that_another_node_commands_gets_nothing_more_and_the_others_a_hold(
    stopped_before: bool,
) -> None:
    bench = Bench()
    bench.first.topic = 'base'
    if stopped_before:
        bench.loop.stop()
    bench.loop.give_way('base', '/person sends commands on /base')
    sent = len(bench.first.sent), len(bench.second.sent)
    ticked(bench, 200)
    assert len(bench.first.sent) == sent[0]
    assert len(bench.second.sent) > sent[1] and bench.second.sent[-1][1] == 0.0
    status = bench.loop.status().executor
    assert (status.reason.value, status.detail) == ('released', '/person sends commands on /base')
    # At rest nobody gets anything; a close sends no hold either.
    last = len(bench.second.sent)
    ticked(bench, 10)
    bench.loop.close()
    assert (len(bench.first.sent), len(bench.second.sent)) == (sent[0], last)


def test_a_close_while_another_node_commands_an_output_sends_its_hold_to_the_others_only() -> None:
    bench = Bench()
    bench.first.topic = 'base'
    sent = len(bench.first.sent)
    bench.loop.give_way('base', '/person sends commands on /base')
    bench.loop.close()
    assert len(bench.first.sent) == sent
    assert bench.second.sent[-1][1] == 0.0


def test_a_start_sends_to_every_output_again() -> None:
    bench = Bench()
    bench.first.topic = 'base'
    bench.loop.give_way('base', '/person sends commands on /base')
    ticked(bench, 200)
    sent = len(bench.first.sent)
    assert bench.loop.start(bench.now_s).started
    ticked(bench, 2)
    assert len(bench.first.sent) == sent + 2
    assert bench.first.follows[-2:] == [False, True]
