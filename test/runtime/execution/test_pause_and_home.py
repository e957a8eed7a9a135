"""A person pauses a robot, lets it go on, and sends it home: within the limits, without a jump."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from execution_rig import RAMP, TWO, Rig, Tick, alike, holding

from vla_runtime.execution.column_model import ColumnModel, StartParameters
from vla_runtime.execution.columns import Column, CommandColumns
from vla_runtime.execution.command import ChunkRefusal, Reason
from vla_runtime.execution.home import HomePose
from vla_runtime.execution.limits import ColumnLimits
from vla_runtime.execution.states import State
from vla_runtime.execution.stopping import StopActions

PERIOD_S = 0.01
LIMIT = ColumnLimits(-2.0, 2.0, velocity=1.5, acceleration=6.0)
SPEED = 0.4


def rig_of(home: Mapping[str, float] | None = None, **config: Any) -> Rig:
    rig = Rig(
        holding(replan_interval=20),
        limits=alike(TWO, LIMIT),
        start=StartParameters(approach_speed=SPEED),
        control_period_s=PERIOD_S,
        home={'a': 0.5, 'b': -0.5} if home is None else home,
        **config,
    )
    return rig.started()


def moving(**config: Any) -> Rig:
    rig = rig_of(**config)
    assert rig.submit(RAMP).accepted
    rig.tick(20)
    assert rig.reason == 'tracking'
    return rig


def assert_within_limits(ticks: Sequence[Tick]) -> None:
    """No step beyond the velocity, and no change of it beyond the acceleration, by their times."""
    places = np.array([tick.command.setpoints for tick in ticks])
    times = np.array([tick.now_s for tick in ticks])[:, None]
    speeds = np.diff(places, axis=0) / np.diff(times, axis=0)
    changes = np.diff(speeds, axis=0) / np.diff(times[1:], axis=0)
    assert np.abs(speeds).max() <= LIMIT.velocity * (1 + 1e-6)
    assert np.abs(changes).max() <= LIMIT.acceleration * (1 + 1e-6)


def pause(rig: Rig) -> None:
    assert rig.executor.pause().started
    rig.run_until(lambda command: rig.executor.at_rest)
    rig.tick()
    assert rig.executor.state is State.PAUSED


def test_a_pause_brakes_within_the_limits_and_stays_where_it_came_to_rest():
    rig = moving()
    pause(rig)
    assert_within_limits(rig.ticks)
    rested = rig.command.setpoints.copy()
    rig.tick(500)
    assert rig.reason == 'paused' and np.abs(rig.command.setpoints - rested).max() <= 0.05
    assert not rig.command.settled, 'the hold of a pause is sent on and on'


def test_a_pause_freezes_where_the_robot_file_says_so():
    rig = moving(on_stop=StopActions(paused='freeze'))
    before = rig.command.setpoints.copy()
    rig.executor.pause()
    assert (rig.tick().setpoints == before).all() and rig.reason == 'paused'


def test_in_a_pause_chunks_are_refused_and_not_asked_for():
    rig = moving()
    pause(rig)
    assert rig.submit([0.0] * 20).refusal is ChunkRefusal.PAUSED
    assert rig.poll() is None


def test_an_answer_to_a_request_from_before_a_pause_is_not_taken_after_it():
    rig = rig_of()
    request = rig.poll()
    assert request is not None
    pause(rig)
    assert rig.executor.resume(rig.ros_ns).started
    again = rig.poll()
    assert again is not None and again.request != request.request


def test_a_resumed_robot_asks_anew_and_goes_on_from_where_it_is():
    rig = moving()
    pause(rig)
    rig.tick(300)
    assert rig.executor.resume(rig.ros_ns).started
    rig.tick(3)
    assert rig.executor.state is State.WAITING and rig.poll() is not None
    assert rig.submit([rig.ticks[-1].position + step for step in RAMP]).accepted
    rig.tick(30)
    assert rig.reason == 'tracking'
    assert_within_limits(rig.ticks)


def test_a_policy_is_not_given_up_for_what_it_did_not_answer_in_a_pause():
    rig = moving()
    pause(rig)
    rig.tick(1000)
    rig.executor.resume(rig.ros_ns)
    rig.tick(100)
    assert rig.reason == 'waiting_for_chunk'


def test_a_pause_of_a_stopped_robot_is_refused_and_a_start_ends_one():
    rig = moving()
    rig.executor.stop()
    rig.tick(100)
    assert not rig.executor.pause().started and not rig.executor.resume(rig.ros_ns).started
    rig.start()
    pause(rig)
    assert 'resume' in rig.start().text
    rig.executor.stop()
    rig.tick(100)
    assert rig.start().started and not rig.executor.paused


def test_a_fault_in_a_pause_holds_and_leads_back_to_the_pause():
    rig = moving()
    pause(rig)
    rig.state_arrives = False
    rig.tick(30)
    assert rig.executor.state is State.HOLDING and rig.reason == 'state_stale'
    rig.state_arrives = True
    rig.tick(3)
    assert rig.executor.state is State.PAUSED


# ---------------------------------------------------------------- home


def go_home(rig: Rig, **given: Any) -> Any:
    return rig.executor.go_home(rig.now_s, rig.ros_ns, **given)


@pytest.mark.parametrize('way', ['waiting', 'moving', 'paused', 'stopped'])
def test_home_is_reached_within_the_limits_at_the_approach_speed(way):
    rig = rig_of() if way == 'waiting' else moving()
    if way == 'paused':
        pause(rig)
    if way == 'stopped':
        rig.executor.stop()
        rig.tick(200)
    result = go_home(rig)
    assert result.started, result.text
    begun = len(rig.ticks)
    rig.run_until(lambda _: rig.executor.state is State.APPROACHING)
    rig.run_until(lambda _: rig.executor.state is State.PAUSED)
    assert np.allclose(rig.command.setpoints, [0.5, -0.5], atol=0.005)
    assert_within_limits(rig.ticks[begun - 1 :])
    on_its_way = [t.command for t in rig.ticks[begun:] if t.command.reason is Reason.APPROACHING]
    assert max(np.abs(one.velocities).max() for one in on_its_way) <= SPEED * (1 + 1e-6)


def test_home_is_refused_from_far_away_unless_a_person_has_looked():
    rig = rig_of(home={'a': 1.5})
    refused = go_home(rig)
    assert not refused.started and "'a'" in refused.text and 'data: true' in refused.text
    rig.tick(50)
    assert rig.reason == 'waiting_for_chunk' and (rig.command.setpoints == 0.0).all()
    assert go_home(rig, far=True).started
    rig.run_until(lambda _: rig.executor.state is State.PAUSED and rig.ticks[-1].position > 1.0)
    assert rig.command.setpoints[1] == 0.0, 'a joint without a place in it stays'


def test_a_stop_and_a_reset_end_the_way_home():
    for call in ('stop', 'reset'):
        rig = rig_of()
        go_home(rig)
        rig.tick(30)
        if call == 'stop':
            rig.executor.stop()
        else:
            rig.executor.reset(7)
        rig.tick(100)
        assert 0.0 < rig.ticks[-1].position < 0.4
        assert_within_limits(rig.ticks)


def test_a_robot_that_may_not_start_does_not_go_home():
    rig = rig_of()
    rig.executor.stop()
    rig.tick(100)
    rig.state_arrives = False
    rig.tick(50)
    result = go_home(rig)
    assert not result.started and result.reason is Reason.STATE_STALE
    assert rig.executor.state is State.STOPPED


def test_a_robot_without_a_home_says_what_to_write():
    assert 'home:' in go_home(rig_of(home={})).text


def model_of(column: Column, **limit: float) -> ColumnModel:
    columns = CommandColumns((column,))
    return ColumnModel(columns, alike(columns.names, ColumnLimits(-2.0, 2.0, **limit)))


@pytest.mark.parametrize(
    ('column', 'home'),
    [
        (Column('a'), {'b': 0.0}),
        (Column('a'), {'a': 2.5}),
        (Column('a', kind='velocity'), {'a': 0.0}),
    ],
)
def test_a_home_that_cannot_be_is_refused_with_the_joints_name(column, home):
    with pytest.raises(ValueError, match=f"'{next(iter(home))}'"):
        HomePose(model_of(column), home)


def test_a_gripper_is_never_far_from_home():
    model = model_of(Column('a'), tracking_error=np.inf)
    assert HomePose(model, {'a': 2.0}).why_not(np.array([-2.0]), far=False) == ''


def test_a_resume_on_the_way_home_is_refused_and_the_way_goes_on():
    rig = rig_of()
    go_home(rig)
    rig.tick(40)
    assert rig.executor.state is State.APPROACHING and rig.executor.goes_home
    refused = rig.executor.resume(rig.ros_ns)
    assert not refused.started and '~/resume' in refused.text
    rig.run_until(lambda _: not rig.executor.goes_home, 500)
    assert rig.executor.state is State.PAUSED and abs(rig.ticks[-1].position - 0.5) <= 0.01
    assert rig.executor.resume(rig.ros_ns).started
    # A pause ends the way, wherever the robot is.
    go_home(rig)
    pause(rig)
    assert rig.executor.resume(rig.ros_ns).started
