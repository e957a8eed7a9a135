"""The table of the executor's states: every call in every state, and every row of it reached.

`WatchedExecutor`, which all rigs of this folder drive, fails at a change of state that is no row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from execution_rig import TWO, Rig, alike, holding
from hypothesis import given, settings
from hypothesis import strategies as st
from watched_executor import CALLS, ROWS, SEEN

from vla_runtime.execution.column_model import StartParameters
from vla_runtime.execution.command import Reason
from vla_runtime.execution.leader import LeaderParameters
from vla_runtime.execution.limits import ColumnLimits
from vla_runtime.execution.states import TRAITS, TRANSITIONS, Event, State

LIMIT = ColumnLimits(-1.0, 1.0, velocity=2.0, acceleration=8.0)
HOME = 0.3
RAMP, SLOW = np.linspace(0.0, 0.8, 20), np.linspace(0.0, 0.9, 40)


class Way(Rig):
    """A rig whose acts follow on one another, to get an executor into a state."""

    def __init__(self, clamp_latch: int = 2, limit: ColumnLimits = LIMIT, **config: Any) -> None:
        super().__init__(
            holding(replan_interval=10),
            limits=alike(TWO, limit),
            start=StartParameters(on_too_far='approach'),
            clamp_latch=clamp_latch,
            control_period_s=0.01,
            home=dict.fromkeys(TWO, HOME),
            leader=LeaderParameters(TWO),
            **config,
        )

    def wait(self, ticks: int) -> Way:
        self.tick(ticks)
        return self

    def until(self, state: State) -> Way:
        self.run_until(lambda _: self.executor.state is state)
        return self

    def plan(self, rows: Sequence[float] = RAMP) -> Way:
        assert self.submit(list(rows)).accepted
        return self

    def offered(self, *rows: float) -> Way:
        self.submit([row for row in rows for _ in range(20 // len(rows))])
        return self

    def stop(self) -> Way:
        self.executor.stop()
        return self

    def pause(self) -> Way:
        assert self.executor.pause().started
        return self

    def led(self, by: float = 0.0) -> Way:
        hand(self, by)
        result = self.executor.take_over(self.ros_ns)
        assert result.started, result.text
        return self

    def home(self) -> Way:
        result = self.executor.go_home(self.now_s, self.ros_ns)
        assert result.started, result.text
        return self

    def release(self) -> Way:
        self.executor.release()
        return self

    def restart(self, times: int = 1) -> Way:
        for _ in range(times):
            self.start()
        return self

    def silent(self) -> Way:
        self.state_arrives = False
        return self

    def moved(self, by: float, steps: int = 1, follows: bool = False) -> Way:
        """Its first joint goes so far: at once, or by a step a tick."""
        self.robot_follows = follows
        for _ in range(steps):
            self.measured[0] += by / steps
            if steps > 1:
                self.tick()
        return self


def hand(rig: Rig, by: float = 0.0, ticks: int = 5) -> None:
    """The leader goes so far within so many ticks."""
    for tick in range(ticks):
        rig.executor.observe_leader(np.full(2, by * (tick + 1) / ticks), rig.ros_ns, rig.ros_ns)
        rig.tick()


def lead(rig: Rig) -> None:
    hand(rig)
    rig.executor.take_over(rig.ros_ns)
    hand(rig, 0.2, 20)


def leader_glitches(rig: Rig) -> None:
    for far in (0.0, 3.0, np.nan, 0.0, 3.0, 3.0, 3.0, 3.0):
        rig.executor.observe_leader(np.full(2, far), rig.ros_ns, rig.ros_ns)
        rig.tick()


def waiting(**given: Any) -> Way:
    return Way(**given).started()


def tracking(**given: Any) -> Way:
    return waiting(**given).plan().wait(15)


def outside() -> Way:
    return Way().moved(1.1, follows=True).wait(2)


def stopped() -> Way:
    return waiting().stop().wait(60)


def elsewhere() -> Way:
    """The robot was found where nobody saw it go, and a person was asked about that once."""
    return stopped().moved(0.4).wait(100).restart()


def braking_outside() -> Way:
    return outside().restart().wait(5).silent().until(State.BRAKING)


def latched_in_motion() -> Way:
    way = tracking()
    for _ in range(2):
        way.wait(1).offered(way.ticks[-1].position, 2)
    return way


def leading_in_motion() -> Way:
    way = tracking().led()
    hand(way, 0.3, 12)
    return way


DRY, S = {'dry_run': True}, State
WAYS: dict[str, tuple[State, Callable[[], Way]]] = {
    'idle': (S.IDLE, lambda: Way().wait(2)),
    'idle in dry run': (S.IDLE, lambda: Way(**DRY).wait(2)),
    'idle outside': (S.IDLE, outside),
    'waiting': (S.WAITING, waiting),
    'waiting in dry run': (S.WAITING, lambda: waiting(**DRY)),
    # The plan is at its end, and the robot is not at rest.
    'waiting in motion': (S.WAITING, lambda: tracking().until(S.WAITING)),
    'tracking': (S.TRACKING, tracking),
    'tracking at rest': (S.TRACKING, lambda: waiting().plan([0.0] * 20).wait(3)),
    'tracking just begun': (S.TRACKING, lambda: waiting().plan()),
    'tracking in dry run': (S.TRACKING, lambda: tracking(**DRY)),
    'approaching': (S.APPROACHING, lambda: waiting().offered(0.6).wait(20)),
    'approaching just begun': (S.APPROACHING, lambda: waiting().offered(0.6)),
    'approaching outside': (S.APPROACHING, lambda: outside().restart().wait(5)),
    'joining': (S.JOINING, lambda: elsewhere().restart().wait(3)),
    'joining just begun': (S.JOINING, lambda: elsewhere().restart()),
    'braking': (S.BRAKING, lambda: waiting().plan(SLOW).wait(5).silent().until(S.BRAKING)),
    'braking in dry run': (S.BRAKING, lambda: tracking(**DRY).silent().until(S.BRAKING)),
    'braking outside': (S.BRAKING, braking_outside),
    'braking after a start': (S.BRAKING, lambda: tracking().stop().restart()),
    'braking behind the latch': (S.BRAKING, lambda: latched_in_motion().wait(2)),
    'latched in a pause': (
        S.LATCHED,
        lambda: waiting(clamp_latch=1).offered(0, 2).wait(1).pause().wait(5),
    ),
    'braking without the robot': (
        S.BRAKING,
        lambda: tracking(limit=replace(LIMIT, tracking_error=0.04)).moved(0.0).stop().restart(),
    ),
    'holding': (S.HOLDING, lambda: waiting().silent().until(S.HOLDING)),
    'holding outside': (S.HOLDING, lambda: braking_outside().until(S.HOLDING)),
    'latched': (S.LATCHED, lambda: waiting().wait(1).offered(0, 2).wait(1).offered(0, 2).wait(1)),
    'latched at once': (S.LATCHED, lambda: waiting(clamp_latch=1).offered(0, 2).wait(1)),
    'latched in motion': (S.TRACKING, latched_in_motion),
    'paused': (S.PAUSED, lambda: waiting().pause().wait(60)),
    'paused just begun': (S.PAUSED, lambda: waiting().pause()),
    'paused in dry run': (S.PAUSED, lambda: waiting(**DRY).pause().wait(60)),
    'paused outside': (S.PAUSED, lambda: outside().restart().wait(5).pause().wait(60)),
    'braking to a pause': (S.BRAKING, lambda: tracking().pause()),
    'paused at home': (S.PAUSED, lambda: tracking().home().wait(200)),
    # Three ticks before it is there.
    'nearly at home': (
        S.APPROACHING,
        lambda: waiting().home().until(S.APPROACHING).wait(99),
    ),
    # The last tick of the way still moved it.
    'paused at home in motion': (
        S.PAUSED,
        lambda: waiting().home().until(S.APPROACHING).until(S.PAUSED),
    ),
    'on its way home': (S.APPROACHING, lambda: waiting().home().wait(5)),
    'holding while it is paused': (
        S.HOLDING,
        lambda: waiting().pause().wait(5).silent().until(State.HOLDING),
    ),
    'joining in a pause': (S.JOINING, lambda: elsewhere().restart().pause().wait(2)),
    'leading': (S.LEADING, lambda: waiting().led()),
    'leading in motion': (S.LEADING, leading_in_motion),
    'leading in dry run': (S.LEADING, lambda: waiting(**DRY).led()),
    'leading in a pause': (S.LEADING, lambda: waiting().pause().wait(5).led()),
    'stopping': (S.STOPPING, lambda: tracking().stop()),
    'stopping in dry run': (S.STOPPING, lambda: tracking(**DRY).stop()),
    'stopped': (S.STOPPED, stopped),
    # The robot sags below its last command.
    'stopped below': (S.STOPPED, lambda: stopped().moved(-0.03).wait(10)),
    'stopped elsewhere': (S.STOPPED, elsewhere),
    'releasing': (S.RELEASING, lambda: tracking().release()),
    'releasing at rest': (S.RELEASING, lambda: stopped().moved(-0.03).wait(10).release()),
    'releasing while it waits': (S.RELEASING, lambda: waiting().release()),
    'releasing elsewhere': (S.RELEASING, lambda: elsewhere().release()),
    'releasing in dry run': (S.RELEASING, lambda: tracking(**DRY).release()),
    'released': (S.RELEASED, lambda: stopped().release().wait(2)),
    'released outside': (S.RELEASED, lambda: stopped().release().wait(2).moved(1.1, 110).wait(60)),
}


# ---------------------------------------------------------------- what may come then


def two_nodes_publish(rig: Rig) -> None:
    for source in ('/joint_states#1', '/joint_states#2') * 3:
        rig.executor.observe_state(rig.names, list(rig.measured), rig.ros_ns + 1, source)
        rig.tick()


def states_end(rig: Rig) -> None:
    rig.state_arrives = False
    rig.tick(25)


def tick_comes_late(rig: Rig) -> None:
    rig.now_s += 0.2
    rig.ros_ns += 200_000_000
    rig.tick()


def ticks_end(rig: Rig, *after_s: float) -> None:
    for late_s in after_s:
        rig.executor.dead_man(rig.now_s + late_s)


def robot_is_pushed(rig: Rig) -> None:
    rig.robot_follows, rig.state_arrives = False, True
    for _ in range(30):
        rig.measured[0] += 0.025
        rig.tick()


def robot_is_found_elsewhere(rig: Rig) -> None:
    rig.robot_follows, rig.state_arrives = False, True
    rig.measured[0] += 0.6
    rig.tick(3)


EVENTS: dict[str, Callable[[Rig], object]] = {
    'start': lambda rig: rig.start(),
    'stop': lambda rig: rig.executor.stop(),
    'freeze': lambda rig: rig.executor.stop(Reason.TRACKING_ERROR),
    'release': lambda rig: rig.executor.release(),
    'pause': lambda rig: rig.executor.pause(),
    'resume': lambda rig: rig.executor.resume(rig.ros_ns),
    'take over': lambda rig: rig.executor.take_over(rig.ros_ns),
    'give back': lambda rig: rig.executor.give_back(rig.ros_ns),
    'lead': lead,
    'leader glitches': leader_glitches,
    'home': lambda rig: rig.executor.go_home(rig.now_s, rig.ros_ns, far=True),
    'reset': lambda rig: rig.executor.reset(rig.executor.episode + 1),
    'episode': lambda rig: rig.executor.begin_episode(rig.executor.episode + 1),
    'dry run': lambda rig: rig.executor.set_dry_run(True),
    'no dry run': lambda rig: rig.executor.set_dry_run(False),
    'shutdown': lambda rig: rig.executor.stop_at_once(),
    'chunk': lambda rig: rig.submit(list(rig.executor._commander.command.setpoints[0] + RAMP / 4)),
    'chunk far away': lambda rig: rig.submit([0.9] * 20),
    'chunk with nan': lambda rig: rig.submit([np.nan] * 20),
    'chunk outside': lambda rig: [rig.submit([3.0] * 20) for _ in range(3) if rig.tick()],
    'time': lambda rig: rig.tick(200),
    'two nodes publish': two_nodes_publish,
    'states end': states_end,
    'late tick': tick_comes_late,
    'ticks end': lambda rig: ticks_end(rig, 0.035, 0.045, 0.055, 0.2),
    'ticks end for long': lambda rig: ticks_end(rig, *np.arange(0.1, 1.5, 0.01)),
    'robot pushed': robot_is_pushed,
    'robot elsewhere': robot_is_found_elsewhere,
}


@pytest.mark.parametrize('way', WAYS)
def test_a_state_refuses_chunks_and_asks_for_them_as_the_table_says(way):
    state, make = WAYS[way]
    rig = make()
    assert rig.executor.state is state
    if way == 'waiting in motion':
        assert not rig.executor.at_rest
    refusal = TRAITS[state].refusal
    asks = rig.poll() is not None
    result = rig.submit([0.0] * 20)
    if refusal is not None:
        assert result.refusal is refusal and asks is TRAITS[state].asks


QUICK = (
    *('idle', 'waiting in motion', 'tracking', 'approaching', 'joining', 'braking', 'latched'),
    'released',
    'paused',
    'on its way home',
    'leading in motion',
)
# Rows that the calls above do not reach: tests elsewhere do.
ELSEWHERE = {
    # test_clocks
    (State.HOLDING, Event.TICK, State.TRACKING),
    # test_leader
    (State.WAITING, Event.TICK, State.LEADING),
    (State.TRACKING, Event.TICK, State.LEADING),
    (State.APPROACHING, Event.TICK, State.LEADING),
    (State.LEADING, Event.TICK, State.WAITING),
}


def walk_from(way: str) -> None:
    for name, event in EVENTS.items():
        rig = WAYS[way][1]()
        event(rig)
        rig.tick(15)
        rig.state_arrives = True
        rig.tick(25)
        assert not rig.executor.counters.internal_errors, name


@pytest.mark.parametrize('way', QUICK)
def test_whatever_comes_in_a_state_leads_on_by_a_row_of_the_table(way):
    walk_from(way)


@settings(deadline=None)
@given(
    way=st.sampled_from(list(WAYS)),
    walk=st.lists(
        st.tuples(st.sampled_from(list(EVENTS)), st.sampled_from([0, 1, 3, 15, 40]), st.booleans()),
        max_size=6,
    ),
)
def test_whatever_follows_on_what_no_command_is_beyond_a_limit(way, walk):
    rig = WAYS[way][1]()
    for name, ticks, arrives in walk:
        rig.state_arrives |= arrives
        EVENTS[name](rig)
        rig.tick(ticks)
    assert not rig.executor.counters.internal_errors
    for tick in rig.ticks:
        setpoints, velocities = tick.command.setpoints, tick.command.velocities
        assert (np.abs(setpoints) <= LIMIT.upper + StartParameters().tolerance).all()
        assert (np.abs(velocities) <= LIMIT.velocity * (1.0 + 1e-9)).all()


@pytest.mark.thorough
def test_every_row_of_the_table_is_reached():
    for way in WAYS:
        walk_from(way)
    missed = ROWS - set(SEEN) - ELSEWHERE
    print(f'{len(ROWS & set(SEEN))} of {len(ROWS)} rows')
    assert not missed, sorted(' '.join((a.name, e.name, b.name)) for a, e, b in missed)


def test_the_table_has_every_state_and_every_call_once():
    assert len(ROWS) == len(TRANSITIONS)
    assert {row.event for row in TRANSITIONS} == set(Event) == set(CALLS.values())
    assert {row.state for row in TRANSITIONS} == {row.to for row in TRANSITIONS} == set(State)
    assert set(TRAITS) == set(State)


@pytest.mark.parametrize(
    ('way', 'rests'),
    [
        ('braking', State.HOLDING),
        ('braking behind the latch', State.LATCHED),
        ('braking to a pause', State.PAUSED),
        ('stopping', State.STOPPED),
    ],
)
def test_an_episode_that_begins_while_the_robot_brakes_waits_until_it_rests(way, rests):
    """No state that says that the robot rests is ever one in which it moves."""
    state, make = WAYS[way]
    rig = make()
    assert rig.executor.state is state
    assert not rig.executor.at_rest
    rig.executor.begin_episode(rig.executor.episode + 1)
    while not rig.executor.at_rest:
        assert rig.executor.state is state
        # Of the plan of the episode before nothing is executed.
        assert rig.tick().step == -1
    rig.tick()
    assert rig.executor.state is rests
