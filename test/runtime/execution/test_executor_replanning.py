"""Request, hand-over, execution, overrun and refusal of chunks, counted in steps."""

import pytest
from execution_rig import STEP_NS, SWITCH, Rig, holding

from vla_runtime.execution.column_model import StartParameters
from vla_runtime.execution.command import ChunkRefusal, CommandKind, Reason
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.parameters import DelayParameters
from vla_runtime.execution.watchdog import WatchdogParameters

FLAT = [0.0] * 20


def rig_of(**changes: object) -> Rig:
    values: dict[str, object] = {'replan_interval': 5, 'handover': SWITCH}
    return Rig(holding(**{**values, **changes})).started()


def rows_executed_of(rig: Rig, chunk: int) -> list[int]:
    return [row for _, number, row in rig.executed() if number == chunk]


# ---------------------------------------------------------------- the replan interval


def test_when_next_chunk_is_there_expect_it_to_take_over_after_the_interval():
    rig = rig_of()
    rig.submit(FLAT)
    rig.tick(8)
    result = rig.submit(FLAT)
    assert (result.join_step, result.join_index) == (5, 3)
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert rows_executed_of(rig, 1) == [0, 1, 2, 3, 4]
    assert rows_executed_of(rig, 2) == [3, 4, 5, 6, 7]


def test_when_observation_is_mid_step_expect_that_step_to_be_row_zero():
    rig = rig_of()
    rig.submit(FLAT)
    rig.tick(10)  # now in step 2, half way
    for back_ns, index in ((0, 3), (19_000_000, 3), (21_000_000, 4), (99_000_000, 5)):
        result = rig.submit(FLAT, observation_ns=rig.ros_ns - back_ns, number=100 - index)
        if back_ns == 0:
            assert result.join_index == index
        else:
            assert result.refusal is ChunkRefusal.OUT_OF_ORDER
            fresh = rig_of()
            fresh.submit(FLAT)
            fresh.tick(10)
            assert fresh.submit(FLAT, fresh.ros_ns - back_ns).join_index == index


def test_when_robot_held_since_the_observation_expect_no_steps_counted_for_it():
    rig = rig_of()
    rig.submit(FLAT)
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    observed_ns = rig.ros_ns
    rig.tick(60)  # 15 steps' worth of time
    result = rig.submit(FLAT, observation_ns=observed_ns)
    assert (result.join_step, result.join_index) == (5, 0)


def test_when_a_newer_chunk_comes_before_the_boundary_expect_it_to_replace_the_waiting_one():
    rig = rig_of()
    rig.submit(FLAT)
    rig.tick(5)
    rig.submit(FLAT)
    rig.tick(5)
    rig.submit(FLAT)
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert rows_executed_of(rig, 2) == []
    assert rows_executed_of(rig, 3) == [3, 4, 5, 6, 7]
    assert rig.executor.counters.superseded == 1


def test_when_chunk_has_one_row_expect_it_executed():
    rig = rig_of(replan_interval=1)
    assert rig.submit([0.02]).accepted
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert rig.executed() == [(0, 1, 0)]
    assert rig.command.setpoints == pytest.approx([0.02, 0.02])


def test_when_interval_exceeds_the_horizon_expect_refusal_with_the_numbers():
    rig = rig_of(replan_interval=12)
    result = rig.submit([0.0] * 10)
    assert result.refusal is ChunkRefusal.INTERVAL_EXCEEDS_HORIZON
    assert '12' in result.text and '10' in result.text


def test_when_interval_plus_delay_exceed_the_horizon_expect_warning_with_the_numbers():
    rig = rig_of(replan_interval=8)
    rig.submit([0.0] * 10)
    rig.tick(10)
    result = rig.submit([0.0] * 10)
    assert result.accepted and result.join_index == 6
    assert 'replan_interval 8 + delay 6' in result.text and 'only 4 steps' in result.text
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert rows_executed_of(rig, 2) == [6, 7, 8, 9]
    assert rig.executor.counters.short == 1


# ---------------------------------------------------------------- asking


def test_when_started_expect_a_chunk_wanted_once():
    rig = rig_of()
    assert rig.executor.wants_chunk
    request = rig.poll()
    assert request is not None and len(request.rows) == 0
    assert rig.poll() is None


# Where the robot would hold, its last step brakes, but along a straight line.
@pytest.mark.parametrize(
    ('overrun', 'interpolation', 'step'),
    [('continue', 'cubic', 6), ('hold', 'cubic', 5), ('hold', 'linear', 6)],
)
def test_a_request_goes_out_as_many_steps_early_as_the_delay(overrun, interpolation, step):
    given = {'overrun': overrun, 'max_overrun_steps': 2 * (overrun == 'continue')}
    delay = DelayParameters(floor_steps=4)
    rig = rig_of(replan_interval=10, delay=delay, interpolation=interpolation, **given)
    rig.submit(FLAT)
    rig.run_until(lambda _: rig.executor.wants_chunk)
    assert rig.executor.status().step == step


def test_when_delays_were_observed_expect_requests_to_go_out_earlier():
    rig = rig_of(replan_interval=10)
    asked_at = []
    rig.submit(FLAT)
    for _ in range(6):
        rig.run_until(lambda _: rig.poll() is not None)
        observed_ns = rig.ros_ns
        step = rig.executor.status().step
        asked_at.append(10 * (step // 10 + 1) - step)
        rig.tick(26)  # 6.5 steps
        assert rig.submit(FLAT, observation_ns=observed_ns).accepted
    assert rig.executor.status().delay_estimate == 7
    # And one, so that the chunk is there before the last step begins to brake.
    assert asked_at[-1] == 8
    starved = [tick for tick in rig.ticks[-120:] if tick.command.reason is Reason.STARVED]
    assert not starved


def test_when_robot_waits_for_a_late_chunk_expect_the_wait_to_count_as_delay():
    rig = rig_of(replan_interval=5, delay=DelayParameters(floor_steps=1))
    rig.submit(FLAT)
    rig.run_until(lambda command: command.step == 4)
    observed_ns = rig.ros_ns
    rig.tick(40)  # the rest of a step of plan and 9.25 steps of hold
    result = rig.submit(FLAT, observation_ns=observed_ns)
    assert result.join_index == 1 and result.delay_steps == 11
    assert rig.executor.status().delay_estimate == 11


def test_when_first_inference_is_slow_expect_it_not_to_count():
    rig = rig_of(delay=DelayParameters(floor_steps=2))
    observed_ns = rig.ros_ns
    rig.tick(100)
    assert rig.submit(FLAT, observation_ns=observed_ns).delay_steps == 25
    assert rig.executor.status().delay_estimate == 2


def test_when_synchronous_expect_execute_hold_ask_go_on():
    rig = rig_of(replan_mode='synchronous', overrun='continue', max_overrun_steps=3)
    rig.submit(FLAT)
    wanted = []
    for _ in range(20):
        rig.tick()
        if rig.command.kind is CommandKind.TRACK and rig.command.step < 4:
            wanted.append(rig.executor.wants_chunk)
    assert not any(wanted)
    rig.run_until(lambda command: command.kind is CommandKind.HOLD)
    assert rig.reason == 'synchronous_wait' and rig.executor.wants_chunk
    rig.tick(50)
    assert rig.reason == 'synchronous_wait'
    assert rig.submit(FLAT).join_index == 0
    rig.tick()
    assert rig.command.kind is CommandKind.TRACK
    assert rig.executor.counters.starved_ticks == 0


# ---------------------------------------------------------------- late chunks


@pytest.mark.parametrize('more', [0, 3])
def test_when_late_expect_at_most_so_many_steps_more_and_then_a_hold(more):
    rig = rig_of(overrun='continue' if more else 'hold', max_overrun_steps=more)
    rig.submit([0.01 * (row + 1) for row in range(20)])
    rig.tick(60)
    assert rig.command.kind is CommandKind.HOLD and rig.reason == 'starved'
    assert rows_executed_of(rig, 1) == list(range(5 + more))
    assert rig.command.setpoints == pytest.approx([0.01 * (5 + more)] * 2)
    overrun = [tick for tick in rig.ticks if tick.command.reason is Reason.OVERRUN]
    assert rig.executor.counters.overrun_steps == more
    assert 4 * more - 1 <= len(overrun) <= 4 * more + (more > 0)
    assert rig.executor.counters.overrun_ticks == len(overrun)


def test_when_chunk_comes_during_overrun_expect_it_at_the_next_step():
    rig = rig_of(overrun='continue', max_overrun_steps=9)
    rig.submit(FLAT)
    rig.tick(12)
    observed_ns = rig.ros_ns  # in step 3, where it ends
    rig.tick(14)  # 6.5 steps
    result = rig.submit(FLAT, observation_ns=observed_ns)
    assert (result.join_step, result.join_index) == (7, 4)
    rig.tick(6)
    assert rows_executed_of(rig, 1) == [0, 1, 2, 3, 4, 5, 6]
    assert rows_executed_of(rig, 2)[0] == 4
    assert rig.executor.handovers[-1].late and rig.executor.counters.late == 1


def test_when_useful_part_is_past_expect_chunk_dropped_with_the_numbers():
    rig = rig_of(replan_interval=5)
    rig.submit([0.0] * 20)
    rig.tick(2)
    result = rig.submit([0.0] * 5)
    assert result.refusal is ChunkRefusal.USEFUL_PART_PAST
    assert '5 rows' in result.text and 'row 5' in result.text


# ---------------------------------------------------------------- live parameters


def test_when_interval_changes_expect_it_at_the_next_boundary():
    rig = rig_of()
    rig.submit(FLAT)
    rig.tick(5)
    rig.executor.set_parameters(holding(replan_interval=2, handover=SWITCH))
    assert rig.executor.status().parameters.replan_interval == 5
    rig.submit(FLAT)
    rig.run_until(lambda command: command.chunk == 2)
    assert rig.executor.status().parameters.replan_interval == 2
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert rows_executed_of(rig, 1) == [0, 1, 2, 3, 4]
    assert rows_executed_of(rig, 2) == [4, 5]


def test_when_parameters_change_while_a_chunk_waits_expect_them_at_its_boundary():
    rig = rig_of()
    rig.submit(FLAT)
    rig.tick(5)
    rig.submit([0.1] * 20)
    rig.executor.set_parameters(
        holding(replan_interval=3, handover=HandoverParameters(mode='blend', blend_steps=2))
    )
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert rows_executed_of(rig, 2) == [4, 5, 6]
    assert rig.executor.handovers[-1].mode == 'blend'


@pytest.mark.parametrize('ways', [('linear', 'cubic'), ('cubic', 'linear')])
def test_when_interpolation_changes_expect_the_step_in_progress_undisturbed(ways):
    old, new = (holding(replan_interval=5, handover=SWITCH, interpolation=way) for way in ways)
    rig = Rig(old).started()
    rig.submit([0.02, 0.03, 0.09, 0.1, 0.2] + [0.2] * 15)
    rig.tick(9)
    rig.executor.set_parameters(new)
    rig.submit(FLAT)
    before = rig.command
    rig.period_ns = 1000
    rig.tick()
    assert rig.command.setpoints == pytest.approx(before.setpoints, abs=1e-5)


def test_when_holding_expect_parameters_at_once():
    rig = rig_of()
    rig.executor.set_parameters(holding(replan_interval=2))
    assert rig.executor.status().parameters.replan_interval == 2


def test_when_interval_is_set_beyond_the_known_horizon_expect_error():
    rig = rig_of()
    rig.submit(FLAT)
    with pytest.raises(ValueError, match='20'):
        rig.executor.set_parameters(holding(replan_interval=21))


# ---------------------------------------------------------------- episodes


def test_when_reset_expect_nothing_of_the_last_episode_left():
    rig = rig_of()
    rig.submit([0.01 * row for row in range(20)])
    for _ in range(3):
        observed_ns = rig.ros_ns
        rig.tick(12)
        rig.submit([0.1] * 20, observation_ns=observed_ns)
    assert rig.executor.status().delay_estimate > 1
    before = rig.command.setpoints
    observed_ns = rig.ros_ns
    rig.executor.reset(1)
    rig.tick()
    assert rig.command.kind is CommandKind.HOLD
    assert (rig.command.setpoints == before).all()
    status = rig.executor.status()
    assert (status.episode, status.step, status.delay_estimate) == (1, 0, 1)
    assert rig.submit(FLAT, observed_ns).refusal is ChunkRefusal.OBSERVATION_UNKNOWN
    assert rig.executor.committed_plan(rig.ros_ns).rows.shape == (0, 2)


def test_when_episode_runs_in_simulated_time_expect_steps_to_follow_it():
    rig = Rig(
        holding(replan_interval=5, handover=SWITCH),
        watchdog=WatchdogParameters(motion_clock='ros', clock_timeout_s=0.2),
    ).started()
    rig.submit(FLAT)
    rig.ros_ns += STEP_NS
    rig.now_s += 0.005
    rig.measure()
    rig.tick_now()
    assert rig.executor.status().step == 1


def test_when_the_first_chunk_of_a_restarted_policy_is_refused_expect_one_restart_counted():
    start = StartParameters(tolerance=0.1, on_too_far='refuse')
    rig = Rig(holding(replan_interval=5, handover=SWITCH), start=start).started()
    assert rig.submit(FLAT, number=500).accepted
    rig.executor.stop()
    rig.run_until(lambda command: rig.executor.at_rest)
    assert rig.start().started
    rig.tick()
    assert rig.submit([0.5] * 20, number=1).refusal is ChunkRefusal.START_TOO_FAR
    assert rig.submit(FLAT, number=2).accepted
    assert rig.executor.counters.policy_restarts == 1


def test_when_the_plan_ends_expect_parameters_that_waited_for_a_boundary_in_force():
    rig = rig_of()
    rig.submit(FLAT)
    rig.tick(8)
    changed = holding(replan_interval=7, handover=SWITCH)
    rig.executor.set_parameters(changed)
    assert rig.executor.parameters.replan_interval == 5
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert rig.executor.parameters == changed
