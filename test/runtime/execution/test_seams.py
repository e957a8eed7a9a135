"""Seams as the robot feels them: positions, velocities, limits, and what is reported."""

from dataclasses import replace

import numpy as np
import pytest
from execution_rig import STEP_NS, SWITCH, TWO, Rig, alike, holding
from thorough import thorough_but

from vla_runtime.execution.column_model import StartParameters
from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import ChunkRefusal, CommandKind, Reason
from vla_runtime.execution.config import Mode
from vla_runtime.execution.handover import HandoverMode, HandoverParameters, blend_weights
from vla_runtime.execution.limits import ColumnLimits, LimitActions, OnViolation, make_limits
from vla_runtime.execution.parameters import DelayParameters

PERIOD_NS = 2_000_000


def rig_with(mode: str, **handover: object) -> Rig:
    parameters = holding(replan_interval=6, handover=HandoverParameters(mode=mode, **handover))
    return Rig(parameters, period_ns=PERIOD_NS).started()


def cross_a_seam(rig: Rig, jump: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """Two ramps that disagree by `jump`; positions and velocities from the first command on."""
    ramp = 0.01 * np.arange(1, 31)
    rig.submit(list(ramp))
    rig.tick(50)
    step = rig.executor.status().step
    assert rig.submit(list(ramp + 0.01 * step + jump)).accepted
    rig.tick(110)
    tracked = [tick.command for tick in rig.ticks if tick.command.kind is CommandKind.TRACK]
    positions = np.array([command.setpoints[0] for command in tracked])
    velocities = np.array([command.velocities[0] for command in tracked])
    return positions, velocities


@pytest.mark.parametrize('mode', ['switch', 'blend', 'ensemble', 'rtc'])
def test_when_crossing_a_seam_expect_continuous_velocity_in_every_mode(mode):
    _, velocities = cross_a_seam(rig_with(mode))
    # At 500 Hz a jump would be the full difference of the ramps; continuity is small changes.
    assert np.abs(np.diff(velocities)).max() < 0.35
    assert np.abs(velocities).max() > 0.25


def test_when_blending_expect_a_softer_seam_than_switching():
    switched, blended = rig_with('switch'), rig_with('blend', blend_steps=5)
    _, fast = cross_a_seam(switched)
    _, soft = cross_a_seam(blended)
    assert np.abs(soft).max() < 0.6 * np.abs(fast).max()
    assert switched.executor.handovers[-1].position_jump == pytest.approx([0.05, 0.05])
    assert blended.executor.handovers[-1].position_jump == pytest.approx([0.05, 0.05])
    felt = [rig.executor.handovers[-1].velocity_jump[0] for rig in (switched, blended)]
    assert felt[0] == pytest.approx(0.05 / 0.04)
    assert abs(felt[1]) < 0.3 * felt[0]


def test_when_blending_expect_positions_to_fade_and_velocities_to_be_the_new_chunks():
    parameters = holding(replan_interval=6, handover=HandoverParameters('blend', blend_steps=4))
    columns = (Column('a'), Column('b', 'velocity', feedback=False))
    rig = Rig(parameters, columns, period_ns=STEP_NS).started()

    def rows(position: float, velocity: float) -> list[list[float]]:
        return [[position, velocity]] * 30

    rig.submit(rows(0.0, 0.2))
    rig.tick(5)
    moving = [tick.command.setpoints[1] for tick in rig.ticks if tick.command.setpoints[1] > 0]
    assert moving == pytest.approx([0.2] * len(moving))
    assert rig.submit(rows(0.05, 0.6)).accepted
    rig.tick(2)
    assert rig.executor.handovers[-1].mode == 'blend'
    position, velocity = rig.command.setpoints
    assert velocity == pytest.approx(0.6)
    assert 0.0 < position < 0.025


@pytest.mark.parametrize('mode', ['switch', 'blend', 'ensemble', 'rtc'])
def test_when_chunks_agree_expect_no_trace_of_the_seam(mode):
    positions, velocities = cross_a_seam(rig_with(mode, blend_steps=2), jump=0.0)
    times = (np.arange(len(positions)) + 1) * PERIOD_NS / 40e6
    # Past the acceleration from start_state, which is blended too.
    inside = slice(101, 155)
    assert positions[inside] == pytest.approx(0.01 * times[inside], abs=1e-9)
    assert velocities[inside] == pytest.approx(np.full(54, 0.25), abs=1e-6)


def test_when_a_chunk_takes_over_expect_a_report_with_both_jumps():
    rig = rig_with('switch')
    cross_a_seam(rig)
    first, second = rig.executor.handovers
    assert first.from_hold and first.step == 0 and first.chunk == 1
    assert first.position_jump == pytest.approx([0.01, 0.01])
    assert not second.from_hold and not second.late
    assert (second.step, second.chunk, second.join_index, second.mode) == (6, 2, 4, 'switch')


def test_when_ensembling_expect_the_weighted_mean_of_all_live_chunks():
    rig = rig_with('ensemble', ensemble_decay=0.5)
    rig.submit([0.0] * 30)
    rig.tick(20)
    rig.submit([0.1] * 30)
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    weight = np.exp(-0.5) / (1 + np.exp(-0.5))
    assert rig.command.setpoints == pytest.approx([0.1 * weight] * 2)


@pytest.mark.parametrize('ticks', [1, 5, 10, 15, 19])
def test_when_chunk_comes_in_the_last_step_expect_what_has_begun_to_stay_as_it_is(ticks):
    rig = rig_with('switch')
    rig.submit(list(0.01 * np.arange(1, 31)))
    rig.run_until(lambda command: command.step == 5)
    rig.tick(ticks - 1)  # the stop at the end of the plan has begun
    rig.submit(list(0.06 + 0.03 * np.arange(1, 31)))
    before = rig.command
    rig.period_ns = 1000
    rig.tick()
    assert rig.command.setpoints == pytest.approx(before.setpoints, abs=1e-6)
    assert rig.command.velocities == pytest.approx(before.velocities, abs=1e-3)


def test_when_a_fault_stopped_the_robot_expect_the_next_chunk_from_standstill():
    rig = rig_with('blend')
    rig.submit(list(0.01 * np.arange(1, 31)))
    rig.tick(60)
    rig.state_arrives = False
    rig.run_until(lambda command: command.reason is Reason.STATE_STALE)
    held = rig.command.setpoints.copy()
    rig.state_arrives = True
    rig.tick(3)
    assert rig.submit([float(held[0])] * 30).accepted
    rig.tick(50)
    assert rig.command.kind is CommandKind.TRACK
    assert rig.command.setpoints == pytest.approx(held)
    assert rig.executor.handovers[-1].from_hold


# --- Seams of chunks that come in time: no braking before them, and no step across them too large

SLOPE = 0.02  # a step, so 0.5 a second


def ramp(start: float, count: int = 30) -> list[float]:
    return [start + SLOPE * (row + 1) for row in range(count)]


@pytest.mark.parametrize('rate_hz', thorough_but([100, 210], [50, 100, 210, 500]))
@pytest.mark.parametrize('delay_steps', [0, 1, 3])
@pytest.mark.parametrize('mode', ['switch', 'blend', 'ensemble', 'rtc'])
@pytest.mark.parametrize(('overrun', 'extra'), [('hold', 0), ('hold', 4), ('continue', 0)])
def test_when_chunks_come_within_the_estimate_expect_no_braking_at_their_seams(
    mode, delay_steps, rate_hz, overrun, extra
):
    parameters = holding(
        replan_interval=6,
        overrun=overrun,
        max_overrun_steps=extra,
        handover=HandoverParameters(mode=mode),
        # Counted in steps that have begun.
        delay=DelayParameters(floor_steps=delay_steps + 1),
    )
    rig = Rig(parameters, period_ns=round(1e9 / rate_hz)).started()
    executor = rig.executor
    rig.submit(ramp(0.0))
    due_ns = None
    while len(executor.handovers) < 5:
        rig.tick()
        assert rig.command.kind is CommandKind.TRACK
        if executor.poll_request(rig.now_s, rig.ros_ns) is not None:
            observed_ns, step = rig.ros_ns, executor.status().step
            due_ns = rig.ros_ns + delay_steps * STEP_NS
        if due_ns is not None and rig.ros_ns >= due_ns:
            due_ns = None
            assert rig.submit(ramp(SLOPE * step), observation_ns=observed_ns).accepted
    assert executor.status().delay_estimate == delay_steps + 1
    speeds = [tick.command.velocities[0] for tick in rig.ticks if tick.command.step >= 6]
    assert speeds == pytest.approx([SLOPE / 0.04] * len(speeds), abs=1e-9)


# ---------------------------------------------------------------- how far across


def cross(action: OnViolation, jump: float, mode: str = 'switch', **start: object) -> Rig:
    """A robot in motion, and a second chunk that is offered and leads `jump` beside the first."""
    limits = alike(TWO, ColumnLimits(velocity=1.0), actions=LimitActions(velocity=action))
    parameters = holding(replan_interval=6, handover=HandoverParameters(mode=mode))
    rig = Rig(parameters, limits=limits, **start).started()
    rig.submit(ramp(0.0))
    rig.tick(10)
    row = np.array(ramp(SLOPE * rig.executor.status().step))
    rig.result = rig.submit(np.stack([row, row + jump], axis=1))
    return rig


@pytest.mark.parametrize('jump', [0.03, -0.07])
def test_when_a_step_across_the_seam_is_too_fast_expect_refusal_naming_the_joint(jump):
    rig = cross('reject', jump)
    result = rig.result
    assert result.refusal is ChunkRefusal.LIMIT
    assert "velocity of 'b'" in result.text and 'seam' in result.text
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert {chunk for _, chunk, _ in rig.executed()} == {1}


def test_when_a_step_across_the_seam_is_too_fast_and_clamped_expect_it_counted_and_slowed():
    rig = cross('clamp', 0.07)
    result = rig.result
    assert result.accepted and result.clamped and 'seam' in result.text
    assert rig.executor.counters.clamped == 1
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    positions = np.array([tick.command.setpoints for tick in rig.ticks])
    assert np.abs(np.diff(positions, axis=0)).max() <= 0.01 + 1e-12


@pytest.mark.parametrize(('mode', 'jump'), [('switch', 0.015), ('blend', 0.06)])
def test_when_the_step_across_the_seam_is_within_the_limit_expect_the_chunk_as_it_is(mode, jump):
    result = cross('reject', jump, mode).result
    assert result.accepted and not result.clamped


def test_when_setting_out_expect_the_start_tolerance_to_decide_and_not_the_speed():
    limits = alike(TWO, ColumnLimits(velocity=1.0), actions=LimitActions(velocity='reject'))
    start = StartParameters(tolerance=0.2, on_too_far='refuse')
    rig = Rig(holding(replan_interval=6), limits=limits, start=start).started()
    assert rig.submit([0.15] * 30).accepted
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    positions = np.array([tick.command.setpoints for tick in rig.ticks])
    assert np.abs(np.diff(positions, axis=0)).max() <= 0.01 + 1e-12


@pytest.mark.parametrize(('fastest', 'accepted'), [(1.05, False), (1.08, True)])
def test_when_a_cross_fade_is_too_fast_after_its_first_row_expect_refusal_all_the_same(
    fastest, accepted
):
    # 0.2 rad over 6 steps: the first step of the fade is slow, the middle ones go at 1.064/s.
    weights = np.concatenate([[0.0], blend_weights(6), [1.0]])
    speeds = np.diff(weights) * 0.2 / 0.04
    assert speeds[0] < 0.5 and speeds.max() == pytest.approx(1.064, abs=1e-3)
    limits = make_limits(
        TWO,
        dict.fromkeys(TWO, ColumnLimits(velocity=fastest)),
        actions=LimitActions(velocity='reject'),
    )
    handover = HandoverParameters(mode='blend', blend_steps=6)
    rig = Rig(holding(replan_interval=10, handover=handover), limits=limits).started()
    assert rig.submit([0.0] * 30).accepted
    rig.tick(10)
    result = rig.submit([0.2] * 30)
    assert result.accepted is accepted
    if not accepted:
        assert result.refusal is ChunkRefusal.LIMIT and 'seam' in result.text


# --- A plan that is spliced anew while its last step runs, and what a hold leaves of old chunks


def rig_in_the_last_step(mode: str, **changes: object) -> Rig:
    """At 500 Hz, no limits, cruising; a chunk is pending and the step before it has begun."""
    parameters = holding(replan_interval=5, handover=HandoverParameters(mode=mode), **changes)
    rig = Rig(parameters, period_ns=2_000_000).started()
    rig.submit(ramp(0.0, 20))
    rig.tick(60)
    assert rig.submit(ramp(float(rig.measured[0]), 20)).accepted
    rig.tick(28)
    return rig


def speeds_of(rig: Rig, ticks: int) -> np.ndarray:
    before = len(rig.ticks) - 1
    rig.tick(ticks)
    positions = [tick.position for tick in rig.ticks[before:]]
    return np.diff(positions) / (rig.period_ns * 1e-9)


@pytest.mark.parametrize('mode', ['switch', 'blend', 'ensemble', 'rtc'])
@pytest.mark.parametrize('overrun', ['hold', 'continue'])
def test_when_parameters_change_in_the_last_step_expect_its_curve_to_stay(mode, overrun):
    changes = {'overrun': overrun, 'max_overrun_steps': 4 if overrun == 'continue' else 0}
    undisturbed = rig_in_the_last_step(mode, **changes)
    rig = rig_in_the_last_step(mode, **changes)
    rig.executor.set_parameters(replace(rig.parameters, request_timeout_s=1.0))
    np.testing.assert_allclose(speeds_of(rig, 30), speeds_of(undisturbed, 30), atol=1e-9)


@pytest.mark.parametrize('mode', ['switch', 'blend', 'ensemble', 'rtc'])
def test_when_a_newer_chunk_replaces_the_pending_one_expect_no_jump_within_the_step(mode):
    rig = rig_in_the_last_step(mode, overrun='continue', max_overrun_steps=4)
    rest_of_step = 11
    expected = speeds_of(rig_in_the_last_step(mode, overrun='continue', max_overrun_steps=4), 11)
    assert rig.submit([float(rig.measured[0])] * 20).accepted
    np.testing.assert_allclose(speeds_of(rig, rest_of_step), expected, atol=1e-9)
    assert np.abs(speeds_of(rig, 60)).max() <= 1.5 * SLOPE / 0.04 + 1e-9


@pytest.mark.parametrize('ticks', [100, 6000])
def test_when_the_robot_starved_expect_an_ensemble_without_the_chunks_of_before(ticks):
    """A policy that is silent for longer than `restart_after_outage_s` needs a start besides."""
    rig = Rig(holding(replan_interval=5, handover=HandoverParameters(mode='ensemble'))).started()
    rig.submit([0.05 * (i + 1) for i in range(50)])
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    rig.tick(ticks)
    held = float(rig.measured[0])
    if ticks > 150:
        assert rig.executor.mode is Mode.STOPPED
        # No length that is said to be longer than itself.
        assert rig.executor.status().detail.count('1.5 s') == 1
        assert rig.start().started
        rig.tick()
    assert rig.submit([held] * 50, number=1).accepted
    rig.tick(40)
    assert float(rig.measured[0]) == pytest.approx(held, abs=1e-9)


# ---------------------------------------------------------------- the seam of what waits already

FASTEST = 1.0
JUMP = 0.15


def rig_with_a_pending_blend(action: OnViolation) -> Rig:
    """A chunk 0.15 rad beside the one in force waits; its blend is within the speed limit."""
    limits = make_limits(
        ('a', 'b'),
        dict.fromkeys(('a', 'b'), ColumnLimits(velocity=FASTEST)),
        actions=LimitActions(velocity=action),
    )
    handover = HandoverParameters(mode='blend', blend_steps=8)
    parameters = holding(replan_interval=10, handover=handover)
    rig = Rig(parameters, limits=limits).started()
    assert rig.submit([0.0] * 30).accepted
    rig.tick(10)
    assert rig.submit([JUMP] * 30).accepted
    assert rig.executor.counters.clamped == 0
    rig.executor.set_parameters(replace(parameters, handover=SWITCH))
    return rig


def test_when_a_pending_chunk_would_be_too_fast_anew_expect_it_handed_over_as_it_was():
    rig = rig_with_a_pending_blend('reject')
    assert rig.executor.counters.clamped == 0
    before = len(rig.ticks)
    rig.run_until(lambda command: command.chunk == 2)
    assert rig.executor.handovers[-1].mode == 'blend' == rig.executor.parameters.handover.mode
    rig.tick(30)
    assert np.diff([tick.position for tick in rig.ticks[before:]]).max() < 0.9 * FASTEST * 0.01
    assert not any(tick.command.limited for tick in rig.ticks[before:])
    assert rig.submit([JUMP] * 30).accepted
    rig.run_until(lambda command: command.chunk == 3)
    assert rig.executor.parameters.handover.mode == 'switch'


def test_when_a_pending_chunk_is_too_fast_anew_and_clamped_expect_it_counted_once():
    rig = rig_with_a_pending_blend('clamp')
    assert rig.executor.counters.clamped == 1
    rig.executor.set_parameters(replace(rig.executor.parameters, request_timeout_s=1.0))
    switch = SWITCH
    rig.executor.set_parameters(replace(rig.executor.parameters, handover=switch))
    assert rig.executor.counters.clamped == 1
    rig.run_until(lambda command: command.chunk == 2)
    assert rig.executor.handovers[-1].mode == 'switch'


# --- Chunks under `rtc` that were not tied to the plan; parameters that ask too much of a chunk

HIGHER = 0.05
HORIZON = 12


def cross_to_a_higher_chunk(mode: HandoverMode, *, tied: bool) -> Rig:
    """Executes a flat chunk, then another one that lies higher."""
    handover = HandoverParameters(mode=mode, blend_steps=4)
    rig = Rig(holding(replan_interval=5, handover=handover)).started()
    assert rig.submit(np.zeros((HORIZON, 2)), tied=tied).accepted
    rig.tick(18)
    assert rig.submit(np.full((HORIZON, 2), HIGHER), tied=tied).accepted
    rig.run_until(lambda _: len(rig.executor.handovers) == 2)
    return rig


def velocity_jump(rig: Rig) -> float:
    return float(np.abs(rig.executor.handovers[-1].velocity_jump).max())


@pytest.mark.parametrize(('tied', 'mode'), [(False, 'blend'), (True, 'switch')])
def test_a_chunk_under_rtc_that_is_not_tied_is_blended_and_told_and_a_tied_one_is_as_it_is(
    tied, mode
):
    rig, other = (
        cross_to_a_higher_chunk('rtc', tied=tied),
        cross_to_a_higher_chunk(mode, tied=False),
    )
    assert velocity_jump(rig) == pytest.approx(velocity_jump(other))
    assert rig.executor.handovers[-1].mode == ('rtc' if tied else 'blend')
    assert rig.executor.status().unconditioned is not tied
    assert not other.executor.status().unconditioned


def test_when_the_first_chunk_under_rtc_sets_out_from_a_hold_expect_no_complaint():
    handover = HandoverParameters(mode='rtc')
    rig = Rig(holding(replan_interval=5, handover=handover)).started()
    assert rig.submit(np.zeros((HORIZON, 2)), tied=False).accepted
    rig.tick(8)
    assert rig.executor.handovers[-1].from_hold
    assert not rig.executor.status().unconditioned
