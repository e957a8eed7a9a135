"""The chunk executor on its thread: clock, lock, outputs and requests around the pure core.

Invariants:
- the core is used under one lock, held for a fraction of a millisecond (1 to 2 ms where an ensemble
  averages a hundred chunks of 100 rows). Neither the tick nor the dead-man waits for a conversion,
  the check of a chunk, a log line or a publisher of anything but commands;
- the tick overwrites arrays and messages that exist already; it allocates when it asks for a
  chunk or at a handover, a few times a second;
- requests and handovers leave through `on_request` and `take_handovers`;
- a command that cannot be sent stops the executor; an output that fails keeps no other one from its
  command;
- a controller that is not active gets nothing: it would take the newest command when it is switched
  on. One that comes back holds the robot and gets nothing until `start`, until the hold is set to
  where the robot is, or, on outputs that repeat it, until the hold is where the robot is;
- a command goes on from the one before it only on outputs that got that one;
- a stopped robot at rest gets its hold for a moment, then nothing (`Command.settled`), but on
  outputs that repeat it: others may command it then;
- after `close` nothing is sent, and the last command was a hold; where a thread or an output hangs,
  every other output gets it within seconds.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock, Thread

import numpy as np

from vla_runtime.execution.command import (
    Command,
    CommandKind,
    Counters,
    Driver,
    Reason,
    StartResult,
    SubmitResult,
)
from vla_runtime.execution.config import ExecutorStatus, Mode
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.handover import Handover
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.messages.trajectories import ns_to_stamp
from vla_runtime.nodes.executor.controller_watch import (
    ControllerWatch,
    Verdict,
    why_refused,
)
from vla_runtime.nodes.executor.outputs import Output, OutputWriter
from vla_runtime.nodes.executor.realtime import QuietGarbage
from vla_runtime.nodes.executor.silences import Silence, StreamSilences
from vla_runtime.nodes.worker import join_thread
from vla_runtime.types import ActionChunk, ChunkHeader, PlanRequest

# Finished steps that a request carries in front: the policy's newest frame is a little older than
# the request, and its row 0 belongs to the step that was current then.
_PAST_STEPS = 8
_SEAMS_KEPT = 64
_TOLD_EACH_NS = 1_000_000_000
_COLLECT_EVERY_S = 1.0
# Whoever keeps a lock or a command for so long at the end is not going to give it back.
_HANGS_AFTER_S = 1.0
_LOOKS_EVERY_S = 0.005
# Silences that end within this were one, and explain readings for so long.
_TOGETHER_S, _STALL_COUNTS_S = 0.2, 3.0
_STALLED = 'controller_manager stood still'


@dataclass(frozen=True)
class TimedHandover:
    """A handover, the ROS time of the first command after it, and the parameters from then on."""

    stamp_ns: int
    seam: Handover
    parameters: ExecutorParameters
    dry_run: bool


@dataclass(frozen=True)
class DriverChange:
    """Who drives the robot from the command of this ROS time on, who did before, and why.

    The same driver twice: it is told again.
    """

    stamp_ns: int
    driver: Driver
    before: Driver
    reason: Reason


@dataclass(frozen=True)
class LoopStatus:
    """A consistent snapshot, for a status message."""

    executor: ExecutorStatus
    counters: Counters
    sent: int


class _Outgoing:
    """A command on its way to the outputs, copied from the core under its lock.

    The control thread has one and all others share one, so a delayed thread sends what it took, or
    nothing where a newer command has been sent.

    Attributes:
        setpoints: (columns,) float64.
        follows: the command before it was sent too, so that it goes on from there.
        withheld: topics of outputs that do not get it.
        settled: only outputs that repeat a hold get it.
        number: counts commands in the order in which they were computed.
    """

    def __init__(self, columns: int) -> None:
        self.setpoints = np.zeros(columns)
        self.follows = False
        self.withheld: frozenset[str] = frozenset()
        self.settled = False
        self.number = 0
        self.stamp_ns = 0


class SendError(RuntimeError):
    """Outputs that a command could not be sent to; it was sent to all others."""


def _describe(errors: Sequence[Exception]) -> str:
    return f'a command could not be sent: {"; ".join(map(str, errors))}'


class ControlLoop:
    """Ticks a `ChunkExecutor` and sends what it commands.

    Args:
        on_request: gets the committed plan when a chunk is wanted; called in the control thread,
            must return at once.
        ros_time_of_ns: ROS time at a recent time of the steady clock, so that a command is stamped
            with the time that its motion was computed for. None under `use_sim_time`: stamped with
            the ROS clock, and `stop_and_wait` goes on without its messages.
    """

    def __init__(
        self,
        executor: ChunkExecutor,
        writers: Sequence[Output],
        ros_now_ns: Callable[[], int],
        on_request: Callable[[PlanRequest], None],
        ros_time_of_ns: Callable[[float], int] | None = None,
    ) -> None:
        self._executor = executor
        self._writers = tuple(writers)
        self._ros_now_ns = ros_now_ns
        self._on_request = on_request
        self._ros_time_of_ns = ros_time_of_ns
        self._garbage = QuietGarbage()
        self._lock = Lock()
        # One sender at a time: the writers' messages are used again and again.
        self._sending = Lock()
        self._of_tick = _Outgoing(executor.columns.count)
        self._of_others = _Outgoing(executor.columns.count)
        self._repeats_hold = any(writer.repeats_hold for writer in writers)
        self._follows = False
        self._computed = 0
        self._computed_s = -math.inf
        self._newest_sent = 0
        self._sent = 0
        self._seams_passed = 0
        self._seams: deque[TimedHandover] = deque(maxlen=_SEAMS_KEPT)
        self._driver = Driver.NOBODY
        self._drivers: deque[DriverChange] = deque(maxlen=_SEAMS_KEPT)
        self._told_ns = 0
        self._collected_s = 0.0
        self._closed = False
        # Topics that another node commands: nothing is sent there until `start`.
        self._taken: frozenset[str] = frozenset()
        # Topics whose controllers would refuse a command, or take it when they are switched on.
        self._refusing: frozenset[str] = frozenset()
        # These, and those whose controllers came back and have not been sent anything since.
        self._returned: frozenset[str] = frozenset()
        # Topics that got the last command, and the steady time of the last one on each.
        self._up_to_date: frozenset[str] = frozenset()
        self._sent_s: dict[str, float] = {}
        # Silences of the publishers of joint states.
        self._silences: dict[str, StreamSilences] = {}

    def tick(self, now_s: float) -> None:
        """One control period; `now_s` is the steady clock."""
        now_ros_ns = self._ros_now_ns()
        with self._lock:
            if self._is_overtaken(now_s):
                return
            command = self._executor.tick(now_s, now_ros_ns)
            stamp_ns = self._stamp_ns(now_s, now_ros_ns)
            self._note_driver(stamp_ns, command.reason)
            sends, dry_run = self._take(command, self._of_tick, stamp_ns), command.dry_run
            started = self._executor.mode is Mode.RUNNING
        # Whatever comes after it may fail; the command is on its way by then.
        if sends:
            self._send(self._of_tick)
        with self._lock:
            self._note_handover(now_ros_ns, dry_run)
            plan = None
            # A start in between asks with its own first tick: an answer to a request from before
            # that tick would be one to the plan that the start dropped.
            if started:
                plan = self._executor.poll_request(now_s, now_ros_ns, _PAST_STEPS)
                if plan is None:
                    plan = self._executor.repeat_request(now_s, now_ros_ns, _PAST_STEPS)
            running = self._executor.mode is Mode.RUNNING
        if plan is not None:
            self._on_request(plan)
        if self._garbage.on and now_s - self._collected_s >= _COLLECT_EVERY_S:
            self._collected_s = now_s
            self._garbage.collect(everything=not running)

    def _stamp_ns(self, now_s: float, now_ros_ns: int) -> int:
        return now_ros_ns if self._ros_time_of_ns is None else self._ros_time_of_ns(now_s)

    def _note_driver(self, stamp_ns: int, reason: Reason) -> None:
        """Tell who drives when that changes, and again each second: a recording may begin late."""
        driver = self._executor.driver
        if driver is not self._driver or abs(stamp_ns - self._told_ns) >= _TOLD_EACH_NS:
            self._drivers.append(DriverChange(stamp_ns, driver, self._driver, reason))
            self._driver, self._told_ns = driver, stamp_ns

    def defer_gc(self) -> None:
        """Collect garbage only in the slack after a tick, until `close`."""
        self._garbage.begin()

    def _is_overtaken(self, now_s: float) -> bool:
        """Return whether the dead-man computed a command for a later time; under the lock."""
        if now_s < self._computed_s:
            return True
        self._computed_s = now_s
        return False

    def _take(self, command: Command, outgoing: _Outgoing, stamp_ns: int) -> bool:
        """Copy a command that is to be sent; under the lock."""
        if command.kind is CommandKind.IDLE or command.dry_run:
            self._follows = False
            return False
        if command.settled and not self._repeats_hold:
            self._follows = False
            return False
        np.copyto(outgoing.setpoints, command.setpoints)
        outgoing.follows, self._follows = self._follows and not command.seats, True
        outgoing.settled = command.settled
        if self._returned:
            self._send_again(seats=command.seats)
        outgoing.withheld = self._returned
        self._computed += 1
        outgoing.number, outgoing.stamp_ns = self._computed, stamp_ns
        return True

    def _send_again(self, *, seats: bool) -> None:
        """Send to outputs that came back where the robot is, to all if `seats`; under the lock."""
        if self._executor.unsent_placed:
            again = (one.topic for one in self._writers if seats or one.repeats_hold)
            self._returned = self._refusing | self._returned.difference(again)

    def _send(self, outgoing: _Outgoing) -> None:
        """Send to every output unless a newer command was sent; then SendError for failures."""
        with self._sending:
            if self._closed or outgoing.number <= self._newest_sent:
                return
            self._newest_sent = outgoing.number
            errors = self._send_to_all(outgoing)
        if not errors:
            return
        text = _describe(errors)
        with self._lock:
            self._executor.stop(Reason.INTERNAL_ERROR)
            self._executor.detail = text
        raise SendError(text) from errors[0]

    def _send_to_all(self, outgoing: _Outgoing) -> tuple[Exception, ...]:
        """Send to every output, also after one failed; return the failures."""
        stamp, now_s = ns_to_stamp(outgoing.stamp_ns), time.monotonic()
        errors: tuple[Exception, ...] = ()
        got = []
        for writer in self._writers:
            if not self._is_for(writer, outgoing):
                continue
            topic = writer.topic
            try:
                writer.send(
                    outgoing.setpoints, stamp, outgoing.follows and topic in self._up_to_date
                )
            except Exception as error:
                errors += (error,)
            got.append(topic)
            self._sent_s[topic] = now_s
        if len(got) != len(self._up_to_date) or not self._up_to_date.issuperset(got):
            self._up_to_date = frozenset(got)
        self._sent += not errors
        return errors

    def _is_for(self, writer: Output, outgoing: _Outgoing) -> bool:
        if outgoing.settled and not writer.repeats_hold:
            return False
        withheld = (outgoing.withheld, self._taken, self._refusing)
        return not any(writer.topic in topics for topics in withheld)

    def _send_side_by_side(self, outgoing: _Outgoing) -> tuple[Exception, ...]:
        """Send to every output in a thread of its own; return the failures, hanging ones too."""
        stamp, end_s = ns_to_stamp(outgoing.stamp_ns), time.monotonic() + _HANGS_AFTER_S
        errors: list[Exception] = []

        def send(writer: Output) -> None:
            try:
                follows = outgoing.follows and writer.topic in self._up_to_date
                writer.send(outgoing.setpoints, stamp, follows)
            except Exception as error:
                errors.append(error)

        threads = [
            Thread(target=send, args=(writer,), name=f'hold on {writer.topic}', daemon=True)
            for writer in self._writers
            if self._is_for(writer, outgoing)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            try:
                join_thread(thread, max(end_s - time.monotonic(), 0.0))
            except TimeoutError:
                hangs = f'{thread.name} hangs: not sent within {_HANGS_AFTER_S:g} s'
                errors.append(TimeoutError(hangs))
        self._sent += not errors
        return tuple(errors)

    def _note_handover(self, now_ros_ns: int, dry_run: bool) -> None:
        passed = self._executor.counters.taken_over
        if passed != self._seams_passed:
            self._seams_passed = passed
            if self._executor.handovers:
                self._seams.append(
                    TimedHandover(
                        now_ros_ns, self._executor.handovers[-1], self._executor.parameters, dry_run
                    )
                )

    def start(self, now_s: float) -> StartResult:
        with self._lock:
            result = self._executor.start(now_s, self._ros_now_ns())
            if result.started:
                self._note_start()
            return result

    def _note_start(self) -> None:
        self._taken = frozenset()
        self._returned = self._refusing

    @property
    def sent_s(self) -> Mapping[str, float]:
        """Steady time of the last command on each output, by its topic in the robot file."""
        return self._sent_s.copy()

    def is_started(self) -> bool:
        with self._lock:
            return self._executor.mode is Mode.RUNNING

    def is_silent(self) -> bool:
        """Return whether the robot is at rest and only repeated holds are sent."""
        with self._lock:
            return self._executor.is_silent

    def why_not_start(self, now_s: float) -> StartResult:
        """Return what the core would answer to a start now; nothing begins."""
        with self._lock:
            refused, fault = self._executor.why_not_start(now_s, self._ros_now_ns())
        return StartResult(not refused, refused, fault)

    @property
    def has_started(self) -> bool:
        """Whether there was a start, other than of a dry run that has been switched off since."""
        return self._executor.mode is not Mode.IDLE

    def pause(self, text: str = '') -> StartResult:
        with self._lock:
            return self._executor.pause(text)

    def goes_home(self) -> bool:
        with self._lock:
            return self._executor.goes_home

    def resume(self) -> StartResult:
        with self._lock:
            return self._executor.resume(self._ros_now_ns())

    def take_over(self) -> StartResult:
        with self._lock:
            return self._executor.take_over(self._ros_now_ns())

    def give_back(self) -> StartResult:
        with self._lock:
            return self._executor.give_back(self._ros_now_ns())

    def pause_leading(self, text: str) -> bool:
        """Pause a robot that a leader leads; return whether one did."""
        with self._lock:
            return self._executor.leading and self._executor.pause(text).started

    def observe_leader(self, positions: np.ndarray, stamp_ns: int) -> None:
        with self._lock:
            self._executor.observe_leader(positions, stamp_ns, self._ros_now_ns())

    def go_home(self, now_s: float, *, far: bool) -> StartResult:
        with self._lock:
            executor = self._executor
            was_started = executor.mode is Mode.RUNNING
            result = executor.go_home(now_s, self._ros_now_ns(), far=far)
            if result.started and not was_started:
                self._note_start()
            return result

    def drives(self) -> bool:
        """Return whether the executor is started and not paused."""
        with self._lock:
            return self._executor.mode is Mode.RUNNING and not self._executor.paused

    def rests(self) -> bool:
        with self._lock:
            return self._executor.at_rest

    def stop(self) -> None:
        with self._lock:
            self._executor.stop()

    def release(self) -> None:
        with self._lock:
            self._executor.release()

    def give_way(self, topic: str, why: str) -> None:
        """Release the robot to another node that commands it; a dry run commands nothing.

        Nothing more is sent on `topic` (of the robot file) while the other outputs come to rest;
        `why` names the other node for the person at the robot.
        """
        with self._lock:
            executor = self._executor
            if executor.mode is Mode.IDLE or executor.dry_run:
                return
            is_new = topic not in self._taken
            self._taken |= {topic}
            executor.release()
            if is_new:
                executor.detail = why

    def apply_controller_state(self, watch: ControllerWatch) -> None:
        """Send in the controllers' form and at their speed; stop where they refuse."""
        scaling = watch.scaling()
        controllers = watch.trajectory_controllers()
        for writer in self._writers:
            if isinstance(writer, OutputWriter):
                writer.controller, writer.scaling = controllers.get(writer.topic), scaling
        # A gripper behind an action follows its own controller's verdict.
        verdicts = [one for one in watch.verdicts if not one.of_action]
        refused = why_refused(verdicts)
        refusing = frozenset(one.topic for one in verdicts if one.refusal)
        with self._lock:
            executor = self._executor
            self._refusing = refusing
            self._returned |= refusing
            executor.set_speed_scaling(scaling)
            executor.note_references(watch.references(executor.columns.count))
            executor.note_unsent(self._unsent_columns(verdicts))
            if refused and executor.mode is Mode.RUNNING and not executor.dry_run:
                executor.stop(Reason.CONTROLLER)
                executor.detail = refused
            self._name_stall(watch.newest_silence())

    def _unsent_columns(self, verdicts: Sequence[Verdict]) -> np.ndarray:
        unsent = np.zeros(self._executor.columns.count, dtype=bool)
        for verdict in verdicts:
            if verdict.topic in self._returned:
                unsent[list(verdict.columns)] = True
        return unsent

    def _name_stall(self, controller: Silence | None) -> None:
        """Tell the core of a silence after which a reading may jump."""
        if controller is None or time.monotonic() - controller.ended_s > _STALL_COUNTS_S:
            return
        silences = [one.newest for one in self._silences.values() if one.newest is not None]
        states = max(silences, key=lambda silence: silence.ended_s, default=None)
        if states is None or abs(states.ended_s - controller.ended_s) > _TOGETHER_S:
            return
        executor = self._executor
        if not executor.doubts_state or executor.detail.startswith(_STALLED):
            return
        text = (
            f'{_STALLED} for {max(controller.lasted_s, states.lasted_s):.2g} s (joint states and '
            'controller_state were silent together), then the robot went to the newest command at '
            'once: give controller_manager a real-time priority and its computer less to do'
        )
        is_started = executor.mode is Mode.RUNNING
        executor.detail = text if is_started else f'{text}; look at the robot, then ~/start'

    def stop_and_wait(self, timeout_s: float) -> bool:
        """Stop; return whether the robot came to rest in time. Waits for no hung core."""
        if self._ros_time_of_ns is None:
            self._go_on_without_clock_messages()
        deadline_s = time.monotonic() + timeout_s
        while self._lock.acquire(timeout=_HANGS_AFTER_S):
            try:
                self._executor.stop()
                at_rest = self._executor.at_rest
            finally:
                self._lock.release()
            if at_rest or time.monotonic() > deadline_s:
                return at_rest
            time.sleep(_LOOKS_EVERY_S)
        return False

    def _go_on_without_clock_messages(self) -> None:
        """Let simulated time pass with the steady clock: nobody takes `/clock` now."""
        read_ns, read_at_ns = self._ros_now_ns(), time.monotonic_ns()
        self._ros_now_ns = lambda: read_ns + time.monotonic_ns() - read_at_ns

    def reset(self, episode: int) -> None:
        """Begin an episode and open the latch: the operator's reset."""
        with self._lock:
            self._executor.reset(episode)

    def begin_episode(self, episode: int) -> None:
        """Begin an episode; the latch stays as it is."""
        with self._lock:
            self._executor.begin_episode(episode)

    def set_parameters(self, parameters: ExecutorParameters) -> None:
        with self._lock:
            self._executor.set_parameters(parameters)

    def set_dry_run(self, dry_run: bool) -> None:
        """A change stops the executor, and takes effect when the robot has come to rest."""
        with self._lock:
            self._executor.set_dry_run(dry_run)

    def observe_state(
        self,
        names: Sequence[str],
        positions: Sequence[float],
        stamp_ns: int,
        source: str = '',
    ) -> None:
        with self._lock:
            self._silences.setdefault(source, StreamSilences()).hear(time.monotonic())
            self._executor.observe_state(names, positions, stamp_ns, source, self._ros_now_ns())

    def submit(self, chunk: ActionChunk, header: ChunkHeader, now_s: float) -> SubmitResult:
        # Most of the work, and none that the tick would have to wait for.
        checked = self._executor.check_chunk(chunk)
        with self._lock:
            return self._executor.submit_chunk(checked, header, now_s, self._ros_now_ns())

    def check_alive(self, now_s: float) -> None:
        """Hold the robot when ticks have stopped; called beside the control thread."""
        with self._lock:
            if now_s < self._computed_s:
                return
            command = self._executor.dead_man(now_s)
            if command is None:
                return
            self._computed_s = now_s
            stamp_ns = self._stamp_ns(now_s, self._ros_now_ns())
            sends = self._take(command, self._of_others, stamp_ns)
        if sends:
            self._send(self._of_others)

    def status(self) -> LoopStatus:
        with self._lock:
            counters = self._executor.counters
            copied = replace(
                counters,
                refused=dict(counters.refused),
                holds=dict(counters.holds),
                limited=dict(counters.limited),
            )
            return LoopStatus(self._executor.status(), copied, self._sent)

    def measured(self) -> dict[str, float]:
        """Return the measured positions by column; empty while some are missing or in doubt."""
        with self._lock:
            return self._executor.measured(self._ros_now_ns())

    def take_handovers(self) -> list[TimedHandover]:
        """Return the handovers since the last call, oldest first."""
        taken = []
        while self._seams:
            taken.append(self._seams.popleft())
        return taken

    def take_drivers(self) -> list[DriverChange]:
        """Return the changes of who drives since the last call, oldest first."""
        taken = []
        while self._drivers:
            taken.append(self._drivers.popleft())
        return taken

    def close(self) -> None:
        """Hold, as the last command, once the control thread has ended, or hangs.

        SendError names outputs that failed; all others have got the hold.
        """
        if self._garbage.on:
            self._garbage.end()
        last = self._of_others
        if self._lock.acquire(timeout=_HANGS_AFTER_S):
            try:
                sends = self._take(self._executor.stop_at_once(), last, self._ros_now_ns())
            finally:
                self._lock.release()
        else:
            # Nobody knows what the core is doing: hold where the last command was.
            last = max(
                self._of_tick,
                self._of_others,
                key=lambda outgoing: outgoing.number,
            )
            last.setpoints[self._executor.columns.is_velocity] = 0.0
            last.stamp_ns = self._ros_now_ns()
            sends = self._sent > 0
        # What a thread that hangs in an output is about to send becomes a hold as well.
        for outgoing in (self._of_tick, self._of_others):
            if sends:
                np.copyto(outgoing.setpoints, last.setpoints)
            outgoing.setpoints[self._executor.columns.is_velocity] = 0.0
        had_its_turn = self._sending.acquire(timeout=_HANGS_AFTER_S)
        try:
            self._closed = True
            errors = self._send_side_by_side(last) if sends else ()
        finally:
            if had_its_turn:
                self._sending.release()
        if errors:
            raise SendError(_describe(errors)) from errors[0]
