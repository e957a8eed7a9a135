"""A release: the robot comes to rest, then nothing is commanded until a start."""

from __future__ import annotations

import numpy as np
import pytest
from execution_rig import Rig
from stopping_rig import moving, rig_of

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import CommandKind, Reason
from vla_runtime.execution.config import Mode
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.stopping import StopActions

ACCELERATION = 2.0
PERIOD_S = 0.01


def released(rig: Rig) -> Rig:
    """The same rig once it commands nothing."""
    rig.executor.release()
    for _ in range(200):
        if rig.tick().kind is CommandKind.IDLE:
            return rig
    raise AssertionError('it goes on commanding')


def test_when_released_in_motion_expect_braking_within_limits_then_a_hold_then_nothing() -> None:
    limits = {name: ColumnLimits(acceleration=ACCELERATION) for name in 'ab'}
    rig = moving(limits=make_limits(('a', 'b'), limits))
    first = len(rig.ticks) - 2
    released(rig)
    sent = [tick.command.setpoints[0] for tick in rig.ticks[first:-1]]
    velocities = np.diff(sent) / PERIOD_S
    assert np.abs(np.diff(velocities)).max() <= ACCELERATION * PERIOD_S * 1.01
    # The hold was commanded: it is the last of them.
    last = rig.ticks[-2].command
    assert (last.kind, last.reason) == (CommandKind.HOLD, Reason.RELEASED)
    assert not last.velocities.any() and sent[-1] == sent[-2]
    assert rig.reason == 'released' and rig.executor.mode is Mode.STOPPED
    assert rig.tick(50).kind is CommandKind.IDLE


def test_when_released_a_second_time_meanwhile_expect_it_to_come_to_rest_all_the_same() -> None:
    rig = moving()
    for _ in range(100):
        rig.executor.release()
        rig.tick()
    assert rig.command.kind is CommandKind.IDLE


@pytest.mark.parametrize('way', ['stopped', 'holding'])
def test_when_it_stands_already_expect_one_more_hold_at_most(way: str) -> None:
    rig = rig_of().started()
    if way == 'stopped':
        rig.executor.stop()
    rig.tick(3)
    rig.executor.release()
    assert [rig.tick().kind for _ in range(3)] == [CommandKind.HOLD] + 2 * [CommandKind.IDLE]


def test_when_started_after_others_moved_it_expect_it_to_set_out_from_where_it_is() -> None:
    rig = released(moving())
    rig.measured[:] = [0.9, -0.7]
    rig.tick()
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
    assert rig.tick().setpoints.tolist() == [0.9, -0.7]
    assert rig.reason == 'waiting_for_chunk'


def test_when_never_started_expect_a_release_to_change_nothing() -> None:
    rig = rig_of()
    rig.tick(2)
    rig.executor.release()
    rig.tick(2)
    assert (rig.command.kind, rig.reason) == (CommandKind.IDLE, 'not_started')


def test_when_started_while_it_comes_to_rest_expect_it_to_stay_started() -> None:
    limits = {name: ColumnLimits(acceleration=ACCELERATION) for name in 'ab'}
    rig = moving(limits=make_limits(('a', 'b'), limits))
    rig.executor.release()
    rig.tick()
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
    rig.tick(100)
    assert (rig.command.kind, rig.executor.mode) == (CommandKind.HOLD, Mode.RUNNING)


@pytest.mark.parametrize('action', ['brake', 'freeze'])
def test_a_velocity_is_commanded_to_zero_before_the_release(action: str) -> None:
    rig = Rig(
        columns=(Column('a', 'velocity'), Column('b', 'velocity')),
        on_stop=StopActions(released=action),  # type: ignore[arg-type]
    ).started()
    assert rig.submit([0.5] * 30).accepted
    rig.tick(10)
    assert rig.command.setpoints[0] > 0.0
    released(rig)
    assert rig.ticks[-2].command.kind is CommandKind.HOLD
    assert not rig.ticks[-2].command.setpoints.any()
