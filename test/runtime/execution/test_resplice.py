"""A plan that is spliced anew while its last step runs, and what a hold leaves of old chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from execution_rig import Rig, holding

from vla_runtime.execution.command import Reason
from vla_runtime.execution.config import Mode
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.limits import ColumnLimits, LimitActions, OnViolation, make_limits

SLOPE = 0.02  # a step, so 0.5 a second


def ramp(count: int, start: float) -> list[float]:
    return [start + SLOPE * (i + 1) for i in range(count)]


def rig_in_the_last_step(mode: str, **changes: object) -> Rig:
    """At 500 Hz, no limits, cruising; a chunk is pending and the step before it has begun."""
    parameters = holding(
        replan_interval=5,
        handover=HandoverParameters(mode=mode),  # type: ignore[arg-type]
        **changes,  # type: ignore[arg-type]
    )
    rig = Rig(parameters, period_ns=2_000_000).started()
    rig.submit(ramp(20, 0.0))
    rig.tick(60)
    assert rig.submit(ramp(20, float(rig.measured[0]))).accepted
    rig.tick(28)
    return rig


def speeds(rig: Rig, ticks: int) -> np.ndarray:
    before = len(rig.ticks) - 1
    rig.tick(ticks)
    positions = [tick.position for tick in rig.ticks[before:]]
    return np.diff(positions) / (rig.period_ns * 1e-9)


@pytest.mark.parametrize('mode', ['switch', 'blend', 'ensemble', 'rtc'])
@pytest.mark.parametrize('overrun', ['hold', 'continue'])
def test_when_parameters_change_in_the_last_step_expect_its_curve_to_stay(mode, overrun) -> None:
    changes = {'overrun': overrun, 'max_overrun_steps': 4 if overrun == 'continue' else 0}
    undisturbed = rig_in_the_last_step(mode, **changes)
    rig = rig_in_the_last_step(mode, **changes)
    rig.executor.set_parameters(replace(rig.parameters, request_timeout_s=1.0))
    np.testing.assert_allclose(speeds(rig, 30), speeds(undisturbed, 30), atol=1e-9)


@pytest.mark.parametrize('mode', ['switch', 'blend', 'ensemble', 'rtc'])
def test_when_a_newer_chunk_replaces_the_pending_one_expect_no_jump_within_the_step(mode) -> None:
    rig = rig_in_the_last_step(mode, overrun='continue', max_overrun_steps=4)
    rest_of_step = 11
    expected = speeds(rig_in_the_last_step(mode, overrun='continue', max_overrun_steps=4), 11)
    assert rig.submit([float(rig.measured[0])] * 20).accepted
    np.testing.assert_allclose(speeds(rig, rest_of_step), expected, atol=1e-9)
    assert np.abs(speeds(rig, 60)).max() <= 1.5 * SLOPE / 0.04 + 1e-9


@pytest.mark.parametrize('ticks', [100, 6000])
def test_when_the_robot_starved_expect_an_ensemble_without_the_chunks_of_before(ticks: int) -> None:
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
        assert rig.executor.start(rig.now_s, rig.ros_ns).started
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
    rig.executor.set_parameters(replace(parameters, handover=HandoverParameters(mode='switch')))
    return rig


def test_when_a_pending_chunk_would_be_too_fast_anew_expect_it_handed_over_as_it_was() -> None:
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


def test_when_a_pending_chunk_is_too_fast_anew_and_clamped_expect_it_counted_once() -> None:
    rig = rig_with_a_pending_blend('clamp')
    assert rig.executor.counters.clamped == 1
    rig.executor.set_parameters(replace(rig.executor.parameters, request_timeout_s=1.0))
    switch = HandoverParameters(mode='switch')
    rig.executor.set_parameters(replace(rig.executor.parameters, handover=switch))
    assert rig.executor.counters.clamped == 1
    rig.run_until(lambda command: command.chunk == 2)
    assert rig.executor.handovers[-1].mode == 'switch'
