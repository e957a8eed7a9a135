"""The table of the executor's states: every call in every state, and every row of it reached.

`WatchedExecutor`, which all rigs of this folder drive, fails at a change of state that is no row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from execution_rig import Rig, holding
from hypothesis import given, settings
from hypothesis import strategies as st
from watched_executor import CALLS, ROWS, SEEN

from vla_runtime.execution.column_model import StartParameters
from vla_runtime.execution.command import Reason
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.states import TRAITS, TRANSITIONS, Event, State

LIMIT = ColumnLimits(-1.0, 1.0, velocity=2.0, acceleration=8.0)
RAMP = np.linspace(0.0, 0.8, 20)


def rig_of(clamp_latch: int = 2, limit: ColumnLimits = LIMIT, **config: object) -> Rig:
    return Rig(
        holding(replan_interval=10),
        limits=make_limits(('a', 'b'), {'a': limit, 'b': limit}),
        start=StartParameters(on_too_far='approach'),
        clamp_latch=clamp_latch,
        control_period_s=0.01,
        **config,
    )


# ---------------------------------------------------------------- ways into every state


def idle() -> Rig:
    rig = rig_of()
    rig.tick(2)
    return rig


def idle_in_dry_run() -> Rig:
    rig = rig_of(dry_run=True)
    rig.tick(2)
    return rig


def idle_outside() -> Rig:
    rig = rig_of()
    rig.measured[0] = 1.1
    rig.tick(2)
    return rig


def waiting() -> Rig:
    return rig_of().started()


def waiting_in_dry_run() -> Rig:
    return rig_of(dry_run=True).started()


def tracking() -> Rig:
    rig = rig_of().started()
    assert rig.submit(list(RAMP)).accepted
    rig.tick(15)
    return rig


def tracking_at_rest() -> Rig:
    rig = rig_of().started()
    assert rig.submit([0.0] * 20).accepted
    rig.tick(3)
    return rig


def tracking_just_begun() -> Rig:
    rig = rig_of().started()
    assert rig.submit(list(RAMP)).accepted
    return rig


def tracking_in_dry_run() -> Rig:
    rig = rig_of(dry_run=True).started()
    assert rig.submit(list(RAMP)).accepted
    rig.tick(15)
    return rig


def waiting_in_motion() -> Rig:
    """The plan is at its end, and the robot is not at rest."""
    rig = tracking()
    rig.run_until(lambda _: rig.executor.state is State.WAITING)
    assert not rig.executor.at_rest
    return rig


def approaching() -> Rig:
    rig = rig_of().started()
    rig.submit([0.6] * 20)
    rig.tick(20)
    return rig


def approaching_just_begun() -> Rig:
    rig = rig_of().started()
    rig.submit([0.6] * 20)
    return rig


def approaching_outside() -> Rig:
    rig = idle_outside()
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
    rig.tick(5)
    return rig


def joining() -> Rig:
    rig = joining_just_begun()
    rig.tick(3)
    return rig


def joining_just_begun() -> Rig:
    """A person says for the second time that the robot is where nobody saw it go."""
    rig = rig_of().started()
    rig.executor.stop()
    rig.tick(60)
    rig.robot_follows = False
    rig.measured[0] += 0.4
    rig.tick(100)
    for _ in range(2):
        rig.executor.start(rig.now_s, rig.ros_ns)
    return rig


def braking() -> Rig:
    rig = rig_of().started()
    rig.parameters = holding(replan_interval=20)
    assert rig.submit(list(np.linspace(0.0, 0.9, 40))).accepted
    rig.tick(5)
    rig.state_arrives = False
    rig.run_until(lambda _: rig.executor.state is State.BRAKING)
    return rig


def braking_in_dry_run() -> Rig:
    rig = tracking_in_dry_run()
    rig.state_arrives = False
    rig.run_until(lambda _: rig.executor.state is State.BRAKING)
    return rig


def braking_outside() -> Rig:
    rig = approaching_outside()
    rig.state_arrives = False
    rig.run_until(lambda _: rig.executor.state is State.BRAKING)
    return rig


def braking_after_a_start() -> Rig:
    rig = stopping()
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
    return rig


def braking_without_the_robot() -> Rig:
    rig = rig_of(limit=replace(LIMIT, tracking_error=0.04)).started()
    assert rig.submit(list(RAMP)).accepted
    rig.tick(15)
    rig.robot_follows = False
    rig.executor.stop()
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
    return rig


def holding_still() -> Rig:
    rig = rig_of().started()
    rig.state_arrives = False
    rig.run_until(lambda _: rig.executor.state is State.HOLDING)
    return rig


def holding_outside() -> Rig:
    rig = braking_outside()
    rig.run_until(lambda _: rig.executor.state is State.HOLDING)
    return rig


def latched() -> Rig:
    rig = rig_of().started()
    for _ in range(2):
        rig.tick()
        rig.submit([0.0] * 10 + [2.0] * 10)
    rig.tick()
    return rig


def latched_at_once() -> Rig:
    rig = rig_of(clamp_latch=1).started()
    rig.submit([0.0] * 10 + [2.0] * 10)
    rig.tick()
    return rig


def latched_in_motion() -> Rig:
    rig = tracking()
    for _ in range(2):
        rig.tick()
        rig.submit([rig.ticks[-1].position] * 10 + [2.0] * 10)
    return rig


def stopping() -> Rig:
    rig = tracking()
    rig.executor.stop()
    return rig


def stopped() -> Rig:
    rig = waiting()
    rig.executor.stop()
    rig.tick(60)
    return rig


def stopped_below() -> Rig:
    """The robot sags below its last command."""
    rig = stopped()
    rig.robot_follows = False
    rig.measured[0] -= 0.03
    rig.tick(10)
    return rig


def stopped_elsewhere() -> Rig:
    rig = stopped()
    rig.robot_follows = False
    rig.measured[0] += 0.4
    rig.tick(100)
    rig.executor.start(rig.now_s, rig.ros_ns)
    return rig


def releasing() -> Rig:
    rig = tracking()
    rig.executor.release()
    return rig


def releasing_at_rest() -> Rig:
    rig = stopped_below()
    rig.executor.release()
    return rig


def releasing_while_it_waits() -> Rig:
    rig = waiting()
    rig.executor.release()
    return rig


def releasing_in_dry_run() -> Rig:
    rig = tracking_in_dry_run()
    rig.executor.release()
    return rig


def released() -> Rig:
    rig = stopped()
    rig.executor.release()
    rig.tick(2)
    return rig


def released_outside() -> Rig:
    rig = released()
    rig.robot_follows = False
    for place in np.arange(0.0, 1.1, 0.01):
        rig.measured[0] = place
        rig.tick()
    rig.tick(60)
    return rig


WAYS: dict[Callable[[], Rig], State] = {
    idle: State.IDLE,
    idle_in_dry_run: State.IDLE,
    idle_outside: State.IDLE,
    waiting: State.WAITING,
    waiting_in_dry_run: State.WAITING,
    waiting_in_motion: State.WAITING,
    tracking: State.TRACKING,
    tracking_at_rest: State.TRACKING,
    tracking_just_begun: State.TRACKING,
    tracking_in_dry_run: State.TRACKING,
    approaching: State.APPROACHING,
    approaching_just_begun: State.APPROACHING,
    approaching_outside: State.APPROACHING,
    joining: State.JOINING,
    joining_just_begun: State.JOINING,
    braking: State.BRAKING,
    braking_in_dry_run: State.BRAKING,
    braking_outside: State.BRAKING,
    braking_after_a_start: State.BRAKING,
    braking_without_the_robot: State.BRAKING,
    holding_still: State.HOLDING,
    holding_outside: State.HOLDING,
    latched: State.LATCHED,
    latched_at_once: State.LATCHED,
    latched_in_motion: State.TRACKING,
    stopping: State.STOPPING,
    stopped: State.STOPPED,
    stopped_below: State.STOPPED,
    stopped_elsewhere: State.STOPPED,
    releasing: State.RELEASING,
    releasing_at_rest: State.RELEASING,
    releasing_while_it_waits: State.RELEASING,
    releasing_in_dry_run: State.RELEASING,
    released: State.RELEASED,
    released_outside: State.RELEASED,
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


def ticks_end(rig: Rig) -> None:
    for late_s in (0.035, 0.045, 0.055, 0.2):
        rig.executor.dead_man(rig.now_s + late_s)


def ticks_end_for_long(rig: Rig) -> None:
    for late_s in np.arange(0.1, 1.5, 0.01):
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
    'start': lambda rig: rig.executor.start(rig.now_s, rig.ros_ns),
    'stop': lambda rig: rig.executor.stop(),
    'freeze': lambda rig: rig.executor.stop(Reason.TRACKING_ERROR),
    'release': lambda rig: rig.executor.release(),
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
    'ticks end': ticks_end,
    'ticks end for long': ticks_end_for_long,
    'robot pushed': robot_is_pushed,
    'robot elsewhere': robot_is_found_elsewhere,
}


@pytest.mark.parametrize('way', WAYS, ids=lambda way: way.__name__)
def test_a_state_refuses_chunks_and_asks_for_them_as_the_table_says(way: Callable[[], Rig]) -> None:
    rig = way()
    assert rig.executor.state is WAYS[way]
    refusal = TRAITS[WAYS[way]].refusal
    asks = rig.executor.poll_request(rig.now_s, rig.ros_ns) is not None
    result = rig.submit([0.0] * 20)
    if refusal is not None:
        assert result.refusal is refusal and not asks


QUICK = (idle, waiting_in_motion, tracking, approaching, joining, braking, latched, released)
# Rows that the calls above do not reach: tests elsewhere do.
ELSEWHERE = {
    # test_simulated_clock
    (State.HOLDING, Event.TICK, State.TRACKING),
}


def walk_from(way: Callable[[], Rig]) -> None:
    for name, event in EVENTS.items():
        rig = way()
        event(rig)
        rig.tick(15)
        rig.state_arrives = True
        rig.tick(25)
        assert not rig.executor.counters.internal_errors, name


@pytest.mark.parametrize('way', QUICK, ids=lambda way: way.__name__)
def test_whatever_comes_in_a_state_leads_on_by_a_row_of_the_table(way: Callable[[], Rig]) -> None:
    walk_from(way)


@settings(deadline=None)
@given(
    way=st.sampled_from(list(WAYS)),
    walk=st.lists(
        st.tuples(st.sampled_from(list(EVENTS)), st.sampled_from([0, 1, 3, 15, 40]), st.booleans()),
        max_size=6,
    ),
)
def test_whatever_follows_on_what_no_command_is_beyond_a_limit(
    way: Callable[[], Rig], walk: list[tuple[str, int, bool]]
) -> None:
    rig = way()
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
def test_every_row_of_the_table_is_reached() -> None:
    for way in WAYS:
        walk_from(way)
    missed = ROWS - set(SEEN) - ELSEWHERE
    print(f'{len(ROWS & set(SEEN))} of {len(ROWS)} rows')
    assert not missed, sorted(' '.join((a.name, e.name, b.name)) for a, e, b in missed)


def test_the_table_has_every_state_and_every_call_once() -> None:
    assert len(ROWS) == len(TRANSITIONS)
    assert {row.event for row in TRANSITIONS} == set(Event) == set(CALLS.values())
    assert {row.state for row in TRANSITIONS} == {row.to for row in TRANSITIONS} == set(State)
    assert set(TRAITS) == set(State)
