"""Anything may come, in any order: what must hold at every single tick.

A hypothesis state machine drives an executor with random chunks (late, dropped, duplicated,
reordered, of other episodes, broken), measured states that stop, lag or lie, clocks that jump,
ticks that come late, parameters that change, and a person who pauses, sends it home and leads it.
A model beside it, built from what was put in and what came out, says what is allowed.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from execution_rig import ROS_START_NS, chunk_of
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from reported_states import report
from watched_executor import ROWS, SEEN, WatchedExecutor

from vla_runtime.execution.column_model import StartParameters
from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import Command, CommandKind, Reason, SubmitResult
from vla_runtime.execution.config import ExecutorConfig, Mode
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.leader import LeaderMode, LeaderParameters
from vla_runtime.execution.limits import ColumnLimits, LimitActions, make_limits
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.states import State
from vla_runtime.execution.watchdog import WatchdogParameters
from vla_runtime.types import ChunkHeader

PERIOD_NS = 10_000_000
PERIOD_S = 0.01
HORIZON = 16
NAMES = ('arm', 'spin', 'wheel')
KINDS = ('position', 'position', 'velocity')
POSITIONS = np.array([True, True, False])
LIMITS = make_limits(
    NAMES,
    {
        'arm': ColumnLimits(-1.0, 1.0, 3.0, 40.0),
        'spin': ColumnLimits(velocity=4.0, acceleration=60.0),
        'wheel': ColumnLimits(-2.0, 2.0, 1.5, 20.0),
    },
    actions=LimitActions(acceleration='clamp'),
)
TOLERANCE = StartParameters().tolerance
HOLD_FOLLOWS = 0.05
HOME = (0.2, -0.1)
LEADER_SPEED = 1.5
WATCHDOG = WatchdogParameters(tick_timeout_s=0.05, max_state_age_s=0.1, max_tracking_error=0.4)

handovers = st.builds(
    HandoverParameters,
    mode=st.sampled_from(['switch', 'blend', 'ensemble', 'rtc']),
    blend_steps=st.integers(1, 6),
    ensemble_order=st.sampled_from(['oldest_first', 'newest_first']),
    ensemble_decay=st.floats(0, 1),
)
parameter_sets = st.builds(
    ExecutorParameters,
    replan_interval=st.integers(1, HORIZON),
    replan_mode=st.sampled_from(['asynchronous', 'synchronous']),
    overrun=st.sampled_from(['hold', 'continue']),
    max_overrun_steps=st.integers(0, 5),
    interpolation=st.sampled_from(['linear', 'cubic']),
    handover=handovers,
)
_FUTURE_NS = round(WATCHDOG.future_tolerance_s * 1e9)
APPROACH_SPEED = 2.0
# A robot that was pushed, or whose readings jumped, is taken for granted again after so many ticks.
SETTLES = 120


@dataclass
class Observed:
    """A moment that chunks can be made of: when it was, and which step was current."""

    ros_ns: int
    step: int
    episode: int


class AnythingGoes(RuleBasedStateMachine):
    """See the module's words."""

    @initialize(
        parameters=parameter_sets,
        on_too_far=st.sampled_from(['refuse', 'approach']),
        latch=st.sampled_from([0, 4]),
        period_s=st.sampled_from([PERIOD_NS * 1e-9, math.inf]),
        leader_mode=st.sampled_from(['offset', 'absolute']),
    )
    def begin(
        self,
        parameters: ExecutorParameters,
        on_too_far: str,
        latch: int,
        period_s: float,
        leader_mode: LeaderMode = 'offset',
    ) -> None:
        columns = (Column('arm'), Column('spin', continuous=True), Column('wheel', kind='velocity'))
        config = ExecutorConfig(
            columns,
            LIMITS,
            StartParameters(on_too_far=on_too_far, approach_speed=APPROACH_SPEED),
            WATCHDOG,
            clamp_latch=latch,
            control_period_s=period_s,
            home={'arm': HOME[0], 'spin': HOME[1]},
            leader=LeaderParameters(NAMES[:2], leader_mode),
        )
        self.executor = WatchedExecutor(config, parameters)
        self.staged = parameters
        self.longest_s = 1.5 * period_s
        self.now_s, self.ros_ns = 10.0, ROS_START_NS
        self.measured, self.known = np.zeros(3), np.zeros(3)
        # What the joint without end stops has reported: its driver wraps angles that jump, unless
        # they are of more than one turn.
        self.lowest, self.highest, self.jumped = 0.0, 0.0, False
        self.state_stamp_ns: int | None = None
        # The newest stamp lay in the future, as the clock was set back: an older one replaces it.
        self.distrusted = False
        # Stamp of a reading that came before its time.
        self.early_ns = 0
        self.state_arrives = True
        self.follows = 1.0
        self.setpoints = np.zeros(3)
        self.velocity = np.zeros(3)
        self.last_dt_s = 0.0
        # Where each column of a hold came to rest: it gives way by no more than HOLD_FOLLOWS.
        self.anchor = np.full(3, np.nan)
        # Stamp of the last reading that was refused; nothing moves for a while after it.
        self.refused_ns: int | None = None
        self.kind = CommandKind.IDLE
        self.number = 0
        self.seen: list[Observed] = []
        report(self.executor.observe_state, NAMES, list(self.measured), self.ros_ns)
        self.joined: dict[int, tuple[SubmitResult, Observed]] = {}
        self.executed: list[tuple[int, int, int]] = []
        self.interval_of: dict[int, tuple[int, int]] = {}
        self.accepted = self.received = 0
        self.latched = False
        self.references = np.full(3, np.nan)
        self.comes, self.unsent = False, np.zeros(3, dtype=bool)
        # Where the leader's joints are, and where a hand takes them.
        self.leader_at, self.leader_goes = np.zeros(2), np.zeros(2)
        self.leader_speaks = True
        self.tick_one()
        self.tick_one()
        self.start()

    # ------------------------------------------------------------ one tick and what it may do

    def tick_one(
        self, gap_ns: int = PERIOD_NS, jump_ns: int = 0, dt_s: float | None = None
    ) -> None:
        """Let time pass and tick; the last command came `dt_s` before, if not a tick before."""
        self.now_s += gap_ns * 1e-9
        self.ros_ns += gap_ns + jump_ns
        self.forget_this_time()
        if self.state_arrives:
            self.state_comes()
        if self.leader_speaks:
            most = LEADER_SPEED * PERIOD_S
            self.leader_at += np.clip(self.leader_goes - self.leader_at, -most, most)
            self.executor.observe_leader(self.leader_at.copy(), self.ros_ns, self.ros_ns)
        running = self.executor.mode is Mode.RUNNING
        command = self.executor.tick(self.now_s, self.ros_ns)
        jumped = abs(jump_ns) > 200_000_000
        must_hold = not running or gap_ns > 50_000_000 or jumped or self.state_is_bad()
        if running and not self.executor.dry_run and self.is_far():
            must_hold = True
        if not running and self.executor.unsent_placed:
            # What is sent to nobody goes along with the robot.
            unsent = self.unsent & POSITIONS
            self.setpoints[unsent] = command.setpoints[unsent]
            self.velocity[unsent], self.anchor[unsent] = 0.0, np.nan
        if command.seats:
            self.check_seat(command, gap_ns * 1e-9 if dt_s is None else dt_s)
        assert command.reason is not Reason.INTERNAL_ERROR, self.executor.detail
        self.check_motion(command, gap_ns * 1e-9 if dt_s is None else dt_s)
        if must_hold:
            self.check_stopping(command)
        if command.kind is CommandKind.TRACK and command.step >= 0:
            self.check_step(command.step, command.chunk, command.row)
        self.remember(command)
        if command.kind is not CommandKind.IDLE and not command.dry_run:
            gap = self.setpoints - self.measured
            self.measured[POSITIONS] += self.follows * gap[POSITIONS]
        assert self.state_stamp_ns is not None
        if gap_ns <= 50_000_000 and self.state_stamp_ns - self.ros_ns > _FUTURE_NS:
            self.distrusted = True
        if jumped or command.reason is Reason.CLOCK_JUMP:
            # Nothing of before can be told from what comes.
            self.state_stamp_ns, self.distrusted = self.ros_ns, False
            self.early_ns = 0
            self.refused_ns = None
            self.seen = []
        self.seen.append(Observed(self.ros_ns, self.executor.status().step, self.executor.episode))

    def forget_this_time(self) -> None:
        """A time that comes twice was, from now on, the second time."""
        self.seen = [seen for seen in self.seen if seen.ros_ns < self.ros_ns]

    def state_comes(self) -> None:
        """A reading comes, and is taken, dropped as too old, or refused as impossible."""
        newest, refused = self.state_stamp_ns, self.executor.counters.states_implausible
        self.executor.observe_state(list(NAMES), list(self.measured), self.ros_ns)
        if newest is not None and not self.distrusted and self.ros_ns < newest:
            return
        if self.executor.counters.states_implausible > refused:
            self.refused_ns = self.ros_ns
            return
        self.state_stamp_ns, self.distrusted = self.ros_ns, False
        self.jumped = self.jumped or abs(self.measured[1] - self.known[1]) > math.pi
        self.known = self.measured.copy()
        self.lowest = min(self.lowest, self.known[1])
        self.highest = max(self.highest, self.known[1])

    def check_seat(self, command: Command, dt_s: float) -> None:
        """A command that begins where the robot is: its columns stay, or are as measured."""
        measured = self.known.copy()
        turns = np.round((command.setpoints[1] - measured[1]) / (2 * math.pi))
        measured[1] += 2 * math.pi * turns
        inside = np.clip(measured, LIMITS.lower, LIMITS.upper)
        at = np.minimum(np.abs(command.setpoints - measured), np.abs(command.setpoints - inside))
        stays = np.abs(command.setpoints - self.setpoints) <= APPROACH_SPEED * dt_s + 1e-9
        assert (stays | (at <= 1e-9))[POSITIONS].all(), (command, self.setpoints, self.known)
        self.setpoints = np.where(POSITIONS, command.setpoints, self.setpoints)
        self.velocity[POSITIONS] = 0.0
        self.anchor[:] = np.nan

    def remember(self, command: Command) -> None:
        self.kind = command.kind
        self.setpoints = command.setpoints.copy()

    def check_stopping(self, command: Command) -> None:
        """A hold, or on the way to one."""
        holds = command.kind in (CommandKind.HOLD, CommandKind.IDLE)
        assert holds or command.reason is Reason.BRAKING, command

    def state_is_bad(self) -> bool:
        assert self.state_stamp_ns is not None
        age_s = (self.ros_ns - max(self.state_stamp_ns, self.early_ns)) * 1e-9
        stale = age_s > WATCHDOG.max_state_age_s or not np.isfinite(self.known).all()
        return stale or self.refused_ns == self.ros_ns

    def is_far(self) -> bool:
        gap = (self.setpoints - self.known)[POSITIONS]
        turn = 2 * math.pi
        furthest = max(self.highest - self.lowest, self.highest, -self.lowest)
        if self.jumped and furthest <= turn + 0.01:
            gap[1] = (gap[1] + math.pi) % turn - math.pi
        return bool(np.abs(gap).max() > WATCHDOG.max_tracking_error + 1e-9)

    def check_motion(self, command: Command, dt_s: float) -> None:
        """Finite, and within all limits by the times of the commands; holds only give way."""
        setpoints, velocities, kind = command.setpoints, command.velocities, command.kind
        assert np.isfinite(setpoints).all() and np.isfinite(velocities).all()
        if kind is CommandKind.IDLE:
            # Nothing is sent, and nothing is known of where the next command sets out from.
            self.velocity, self.anchor = np.zeros(3), np.full(3, np.nan)
            return
        self.check_inside(setpoints, kind)
        assert (np.abs(velocities) <= LIMITS.velocity * (1 + 1e-9)).all()
        velocity = (setpoints - self.setpoints) / dt_s
        velocity[2] = setpoints[2]
        if self.kind is CommandKind.IDLE:
            velocity[POSITIONS] = 0.0  # the first command is where the robot is
        change = np.abs(velocity - self.velocity)
        if dt_s > self.longest_s:
            # After a pause the robot stands at its last command, and is not sent the way of it.
            most = LIMITS.velocity * self.longest_s / dt_s
            assert (np.abs(velocity) <= most * (1 + 1e-9))[POSITIONS].all()
            change[POSITIONS & np.isclose(np.abs(velocity), most)] = 0.0
        # What a robot is stopped for that ran into something is the one stop that freezes here.
        freezes = kind is CommandKind.HOLD and command.reason is Reason.TRACKING_ERROR
        for span_s in (dt_s, 0.5 * (dt_s + self.last_dt_s)):
            gentle = (change <= LIMITS.acceleration * span_s * (1 + 1e-6) + 1e-8).all()
            assert gentle or freezes, (command, change / span_s)
        assert (np.abs(velocity) <= LIMITS.velocity * (1 + 1e-9)).all(), (command, velocity)
        if kind is CommandKind.HOLD and self.kind is not CommandKind.IDLE:
            # What has come to rest is held there, and gives way by little in all, slowly.
            begins = np.isnan(self.anchor) & (self.velocity == 0.0)
            self.anchor[begins] = self.setpoints[begins]
            held = POSITIONS & ~np.isnan(self.anchor)
            given = np.abs(setpoints - self.anchor)
            # After an outage a hold comes to where the robot was found, however far that is.
            came, self.comes = self.comes, bool(velocity.any() and self.executor.status().progress)
            if came or self.comes:
                given[:], self.anchor[:] = 0.0, np.nan
            assert (given <= HOLD_FOLLOWS + 1e-9)[held].all(), (command, self.anchor, self.known)
            assert (np.abs(velocity) <= APPROACH_SPEED * (1 + 1e-9))[held].all(), command
        else:
            self.anchor[:] = np.nan
        self.velocity, self.last_dt_s = velocity, dt_s

    def check_inside(self, setpoints: np.ndarray, kind: CommandKind) -> None:
        """Within the limits, or on the way back inside from where the robot was found."""
        lower, upper = LIMITS.lower[POSITIONS], LIMITS.upper[POSITIONS]
        if kind is not CommandKind.TRACK and self.kind is not CommandKind.IDLE:
            lower = np.minimum(lower, self.setpoints[POSITIONS])
            upper = np.maximum(upper, self.setpoints[POSITIONS])
        elif kind is CommandKind.HOLD:
            lower, upper = lower - TOLERANCE, upper + TOLERANCE
        assert (setpoints[POSITIONS] >= lower).all() and (setpoints[POSITIONS] <= upper).all()
        assert abs(setpoints[2]) <= 1.5

    def check_step(self, step: int, chunk: int, row: int) -> None:
        """Steps go up one by one, a chunk's rows too, and none past S plus overrun."""
        found = (step, chunk, row)
        if self.executed and self.executed[-1] == found:
            return
        if self.executed:
            assert step == self.executed[-1][0] + 1, (self.executed[-3:], found)
        else:
            assert step == 0
        self.executed.append(found)
        result, observed = self.joined[chunk]
        if chunk not in self.interval_of:
            # It takes over now: at the promised step, at the row of steps consumed since.
            assert (step, row) == (result.join_step, result.join_index)
            assert row == step - observed.step
            self.interval_of[chunk] = (self.staged.replan_interval, self.staged.overrun_steps)
        interval, overrun = self.interval_of[chunk]
        assert result.join_index <= row < result.join_index + interval + overrun
        assert row < HORIZON
        assert row - step == result.join_index - result.join_step

    # ------------------------------------------------------------ what may happen

    @rule(ticks=st.integers(1, 40))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.tick_one()

    @rule()
    def start(self) -> None:
        if self.executor.start(self.now_s, self.ros_ns).started:
            self.check_start()

    def check_start(self) -> None:
        """The first command of a start is where the robot is, or the robot brakes first."""
        before, kind_before = self.setpoints, self.kind
        command = self.executor.tick(self.now_s, self.ros_ns)
        if command.seats:
            self.velocity[POSITIONS] = 0.0
        self.remember(command)
        outside = np.abs(self.setpoints - np.clip(self.setpoints, LIMITS.lower, LIMITS.upper))
        near_enough = abs(self.setpoints[0] - self.known[0]) <= 0.2 * HOLD_FOLLOWS
        assert outside[0] == 0.0 or near_enough
        assert outside[0] <= TOLERANCE
        if kind_before is not CommandKind.IDLE and self.executor.mode is Mode.RUNNING:
            near = np.abs(self.setpoints - self.known)[POSITIONS]
            # Where a controller holds the robot it sags from there.
            held = np.abs(self.references - self.known)[POSITIONS] <= HOLD_FOLLOWS
            near[held] = np.abs(self.setpoints - self.references)[POSITIONS][held]
            near[1] = abs((near[1] + math.pi) % (2 * math.pi) - math.pi)
            braked = not self.executor.at_rest or (self.setpoints == before).all()
            # To a place that nobody saw the robot go to the command comes slowly.
            braked |= self.executor.state is State.JOINING
            assert braked or near.max() <= 0.2 * HOLD_FOLLOWS + 1e-9
        self.anchor[:] = np.nan

    @rule(
        back=st.integers(0, 30),
        start=st.floats(-0.3, 0.3),
        slope=st.floats(-0.15, 0.15),
        wobble=st.floats(0, 0.2),
        repeats=st.integers(1, 3),
        ticks=st.integers(0, 60),
    )
    def chunk_comes(
        self, back: int, start: float, slope: float, wobble: float, repeats: int, ticks: int
    ) -> None:
        """A chunk observed some ticks ago; maybe more than once, maybe after a newer one."""
        self.start()
        observed = self.seen[max(-1 - back, -len(self.seen))]
        rows = np.arange(HORIZON)[:, None] * slope + wobble * np.sin(np.arange(HORIZON))[:, None]
        rows = rows + self.setpoints * POSITIONS + start
        rows[:, 2] = np.sin(np.arange(HORIZON) * (1 + wobble)) * 2 * start
        self.number += 1
        for _ in range(repeats):
            self.offer(rows, observed, self.number)
        for _ in range(ticks):
            self.tick_one()

    def offer(self, rows: np.ndarray, observed: Observed, number: int, episode: int = 0) -> None:
        result = self.executor.submit_chunk(
            chunk_of(rows, NAMES, KINDS),
            ChunkHeader(observed.ros_ns, observed.episode + episode, number),
            self.now_s,
            self.ros_ns,
        )
        self.received += 1
        if result.accepted:
            assert number not in self.joined, 'a chunk was taken twice'
            assert episode == 0 and np.isfinite(rows).all()
            self.accepted += 1
            self.joined[number] = (result, observed)

    @rule(
        row=st.integers(0, HORIZON - 1),
        column=st.integers(0, 2),
        value=st.sampled_from([math.nan, math.inf, -math.inf, 1e7, 1e30]),
    )
    def poisoned_chunk_comes(self, row: int, column: int, value: float) -> None:
        rows = np.tile(self.setpoints, (HORIZON, 1))
        rows[row, column] = value
        self.number += 1
        self.offer(rows, self.seen[-1], self.number)

    @rule(episode=st.sampled_from([-1, 1]))
    def chunk_of_another_episode_comes(self, episode: int) -> None:
        self.number += 1
        self.offer(np.tile(self.setpoints, (HORIZON, 1)), self.seen[-1], self.number, episode)

    @rule()
    def policy_answers(self) -> None:
        """The well-behaved policy: what keeps the robot moving through all of this."""
        self.state_arrives = True
        self.executor.set_speed_scaling(1.0)
        for _ in range(SETTLES):
            self.tick_one()
        self.start()
        self.executor.give_back(self.ros_ns)
        # A pause ends a way home, which a resume waits for.
        self.executor.pause()
        self.executor.resume(self.ros_ns)
        moved = False
        for _ in range(12):
            if self.executor.poll_request(self.now_s, self.ros_ns) is not None:
                observed = self.seen[-1]
                for _ in range(6):
                    self.tick_one()
                steps = np.arange(HORIZON)[:, None] * 0.02
                rows = self.setpoints * POSITIONS + steps * np.array([1.0, 1.0, 0.0])
                rows[:, 0] = np.clip(rows[:, 0], -0.9, 0.9)
                self.number += 1
                self.offer(rows, observed, self.number)
            for _ in range(4):
                self.tick_one()
                moved = moved or self.kind is CommandKind.TRACK
        # Whatever went before, a policy that answers and that a person lets go on gets the robot
        # moving again, unless it was left outside its limits, too far from any chunk's begin.
        status = self.executor.status()
        refused = status.clamp_latched or status.open_requests or abs(self.known[0]) > 1.0
        if status.mode is Mode.RUNNING and not refused:
            # To a place that nobody saw the robot go to it creeps at first.
            on_its_way = self.kind is CommandKind.APPROACH or self.executor.state is State.JOINING
            assert moved or on_its_way, status

    @rule(parameters=parameter_sets)
    def parameters_change(self, parameters: ExecutorParameters) -> None:
        self.executor.set_parameters(parameters)
        self.staged = parameters

    @rule(gap_ms=st.one_of(st.integers(1, 30), st.integers(51, 3000)))
    def tick_comes_late(self, gap_ms: int) -> None:
        """Or early; within a step, so that no step is passed over, or beyond the time-out."""
        self.tick_one(gap_ns=gap_ms * 1_000_000)

    @rule(gap_ms=st.one_of(st.integers(1, 49), st.integers(51, 500)))
    def dead_man_looks(self, gap_ms: int) -> None:
        command = self.executor.dead_man(self.now_s + gap_ms * 1e-3)
        assert (command is None) == (gap_ms <= 50)
        if command is not None:
            self.check_stopping(command)
            self.check_motion(command, gap_ms * 1e-3)
            self.remember(command)
            self.tick_one(gap_ns=gap_ms * 1_000_000 + PERIOD_NS, dt_s=PERIOD_NS * 1e-9)

    @rule(jump_s=st.sampled_from([-100.0, -1.0, -0.3, 0.3, 1.0, 100.0]))
    def clock_jumps(self, jump_s: float) -> None:
        self.tick_one(jump_ns=round(jump_s * 1e9))

    @rule(nudge_ms=st.integers(-40, 40))
    def clock_is_set_by_a_little(self, nudge_ms: int) -> None:
        """As time servers do; too little to be a jump, unless there are many of them."""
        self.tick_one(jump_ns=nudge_ms * 1_000_000)

    @rule(arrives=st.booleans())
    def joint_states_stop_or_come_back(self, arrives: bool) -> None:
        self.state_arrives = arrives

    @rule(follows=st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    def robot_lags(self, follows: float) -> None:
        self.follows = follows

    @rule(column=st.integers(0, 1), by=st.sampled_from([-1.0, -0.1, 0.1, 0.7, 2 * math.pi]))
    def robot_is_pushed(self, column: int, by: float) -> None:
        self.measured[column] = np.clip(self.measured[column] + by, -9, 9)
        if column == 0:
            self.measured[0] = np.clip(self.measured[0], -1.1, 1.1)

    @rule(
        column=st.integers(0, 1),
        by=st.floats(-1.2, 1.2),
        speed=st.floats(0.05, 3.0),
        rests=st.integers(0, 80),
    )
    def robot_is_led_by_hand(self, column: int, by: float, speed: float, rests: int) -> None:
        """At a speed that a person's hand has, against motors that are off."""
        follows, self.follows = self.follows, 0.0
        for _ in range(math.ceil(abs(by) / (speed * PERIOD_NS * 1e-9))):
            self.measured[column] += math.copysign(speed * PERIOD_NS * 1e-9, by)
            if column == 0:
                self.measured[0] = np.clip(self.measured[0], -1.1, 1.1)
            self.tick_one()
        for _ in range(rests):
            self.tick_one()
        self.follows = follows

    @rule(column=st.integers(0, 1), value=st.floats(-7, 7), samples=st.integers(1, 30))
    def encoder_lies(self, column: int, value: float, samples: int) -> None:
        """A reading that is refused, for less than half a second, moves nothing at rest."""
        self.state_arrives = True
        self.tick_one()
        before, at_rest = self.measured.copy(), self.executor.at_rest
        setpoints, refused = self.setpoints.copy(), self.executor.counters.states_implausible
        follows, self.follows = self.follows, 0.0
        self.measured[column] = value
        for _ in range(samples):
            self.tick_one()
        self.measured, self.follows = before, follows
        all_refused = self.executor.counters.states_implausible - refused == samples
        if all_refused and at_rest and self.executor.at_rest:
            assert (self.setpoints == setpoints)[POSITIONS].all()

    @rule()
    def encoder_fails(self) -> None:
        before = self.measured.copy()
        self.measured[0] = math.nan
        self.state_arrives = True
        follows, self.follows = self.follows, 0.0
        self.tick_one()
        self.measured, self.follows = before, follows

    @rule()
    def stop(self) -> None:
        self.executor.stop()

    # ------------------------------------------------------------ a person beside it

    @rule()
    def pause(self) -> None:
        self.executor.pause()

    @rule()
    def resume(self) -> None:
        self.executor.resume(self.ros_ns)

    @rule(far=st.booleans())
    def go_home(self, far: bool) -> None:
        starts = self.executor.mode is not Mode.RUNNING
        if self.executor.go_home(self.now_s, self.ros_ns, far=far).started and starts:
            self.check_start()

    @rule(ticks=st.integers(1, 300))
    def leader_takes_over(self, ticks: int) -> None:
        """It leads for as long as a person does, or takes over for a moment."""
        self.executor.take_over(self.ros_ns)
        self.time_passes(ticks)

    @rule()
    def leader_gives_back(self) -> None:
        self.executor.give_back(self.ros_ns)

    @rule(goal=st.tuples(st.floats(-2, 2), st.floats(-7, 7)))
    def leader_is_moved(self, goal: tuple[float, float]) -> None:
        self.leader_goes[:] = goal

    @rule(by=st.sampled_from([-0.5, 0.05, 0.5, 6.0]))
    def leader_jumps(self, by: float) -> None:
        self.leader_at += by

    @rule(values=st.sampled_from([[math.nan, 0.0], [0.0], [1e9, 0.0]]))
    def leader_says_nonsense(self, values: list[float]) -> None:
        self.executor.observe_leader(np.array(values), self.ros_ns, self.ros_ns)

    @rule(speaks=st.booleans())
    def leader_dies_or_comes_back(self, speaks: bool) -> None:
        self.leader_speaks = speaks

    @rule()
    def controller_fails(self) -> None:
        self.executor.stop(Reason.CONTROLLER)

    @rule()
    def robot_is_released(self) -> None:
        self.executor.release()

    @rule(dry_run=st.booleans())
    def dry_run_changes(self, dry_run: bool) -> None:
        """A change that takes effect at once forgets the command, as the next tick says."""
        was_dry = self.executor.status().dry_run
        self.executor.set_dry_run(dry_run)
        if was_dry:
            # It ends at once, from whatever velocity: nothing was sent.
            self.velocity = np.zeros(3)
        if self.executor.state is State.IDLE:
            self.kind, self.velocity = CommandKind.IDLE, np.zeros(3)
            step = self.executor.status().step
            self.seen.append(Observed(self.ros_ns, step, self.executor.episode))

    @rule(factor=st.sampled_from([-1.0, 0.0, 0.3, 1.0, 2.0, math.nan]))
    def slider_moves(self, factor: float) -> None:
        self.executor.set_speed_scaling(factor)

    @rule()
    def two_nodes_publish(self) -> None:
        """The same numbers, from two nodes in turns."""
        for source in ('/joint_states#1', '/joint_states#2') * 3:
            self.executor.observe_state(list(NAMES), list(self.known), self.ros_ns + 1, source)
            self.tick_one()

    @rule(ahead_s=st.sampled_from([0.06, 0.3, 5.0, 1e6]))
    def a_stamp_lies_in_the_future(self, ahead_s: float) -> None:
        stamp_ns = self.ros_ns + round(ahead_s * 1e9)
        if ahead_s < 0.1:
            # It waits for its time, and is a reading then.
            self.early_ns = stamp_ns
        self.executor.observe_state(list(NAMES), list(self.known), stamp_ns, '', self.ros_ns)

    @rule(off=st.sampled_from([0.0, 0.02, -0.3]), known=st.booleans())
    def controllers_say_where_they_hold(self, off: float, known: bool) -> None:
        self.references = self.known + off if known else np.full(3, np.nan)
        self.references[2] = math.nan
        self.executor.note_references(self.references)

    @rule(columns=st.lists(st.booleans(), min_size=3, max_size=3))
    def controllers_are_switched(self, columns: list[bool]) -> None:
        self.unsent = np.array(columns)
        self.executor.note_unsent(self.unsent)

    @rule()
    def freeze(self) -> None:
        last = self.executor.stop_at_once()
        assert last.kind in (CommandKind.HOLD, CommandKind.IDLE)
        self.velocity = np.zeros(3)
        self.remember(last)
        # The step that was begun is over: what is seen from now on is of the next one.
        self.forget_this_time()
        step = self.executor.status().step
        self.seen.append(Observed(self.ros_ns, step, self.executor.episode))

    @rule(by_operator=st.booleans())
    def episode_begins(self, by_operator: bool) -> None:
        begin = self.executor.reset if by_operator else self.executor.begin_episode
        begin(self.executor.episode + 1)
        assert not (by_operator and self.executor.latch.closed)
        self.latched = self.latched and not by_operator
        self.executed = []
        self.tick_one()
        self.seen = self.seen[-1:]

    @invariant()
    def only_the_operator_opens_the_latch(self) -> None:
        if hasattr(self, 'executor'):
            assert self.executor.latch.closed or not self.latched
            self.latched = self.executor.latch.closed

    # ------------------------------------------------------------ books that must balance

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, 'executor'):
            return
        counters, pending = self.executor.counters, self.executor.status().pending_chunk >= 0
        assert counters.received == self.received
        assert counters.accepted == self.accepted
        assert counters.received == counters.accepted + sum(counters.refused.values())
        gone = counters.taken_over + counters.superseded + counters.dropped
        assert counters.accepted == gone + pending
        assert counters.taken_over == len(self.interval_of)
        assert counters.internal_errors == 0

    def teardown(self) -> None:
        if not hasattr(self, 'executor'):
            return
        for chunk, number in Counter(chunk for _, chunk, _ in self.executed).items():
            interval, overrun = self.interval_of[chunk]
            assert number <= interval + overrun


AnythingGoes.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAnythingGoes = AnythingGoes.TestCase


@pytest.mark.thorough
def test_a_long_walk_keeps_to_the_rows_of_the_table_of_states():
    """`test_executor_states` reaches them all, by calls that were chosen."""
    SEEN.clear()
    long = settings(
        AnythingGoes.TestCase.settings,
        max_examples=150,
        stateful_step_count=40,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(3)(AnythingGoes), settings=long)
    print(f'{len(ROWS & set(SEEN))} of {len(ROWS)} rows of the table of states')
    assert len(ROWS & set(SEEN)) >= len(ROWS) // 4


def test_a_robot_led_away_while_the_clock_is_set_back_is_not_pulled_back():
    """A case that the machine once found: states of before are newer than those that come."""
    machine = AnythingGoes()
    machine.begin(ExecutorParameters(), 'refuse', 0, PERIOD_NS * 1e-9)
    machine.stop()
    machine.time_passes(2)
    for nudge_ms in (-37, -37, -8):
        machine.clock_is_set_by_a_little(nudge_ms)
    machine.robot_is_led_by_hand(column=0, by=-0.8, speed=1.0, rests=80)
    assert machine.setpoints[0] == machine.measured[0]
