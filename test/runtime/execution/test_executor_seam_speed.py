"""Seams of chunks that come in time: no braking before them, and no step across them too large."""

from __future__ import annotations

import numpy as np
import pytest
from execution_rig import STEP_NS, Rig, holding
from thorough import thorough_but

from vla_runtime.execution.column_model import StartParameters
from vla_runtime.execution.command import ChunkRefusal, CommandKind, Reason
from vla_runtime.execution.handover import HandoverParameters, blend_weights
from vla_runtime.execution.limits import ColumnLimits, LimitActions, OnViolation, make_limits
from vla_runtime.execution.parameters import DelayParameters

SLOPE = 0.02  # a step, so 0.5 a second
TWO = ('a', 'b')


def ramp(start: float, count: int = 30) -> list[float]:
    return [start + SLOPE * (row + 1) for row in range(count)]


# ---------------------------------------------------------------- in time


@pytest.mark.parametrize('rate_hz', thorough_but([100, 210], [50, 100, 210, 500]))
@pytest.mark.parametrize('delay_steps', [0, 1, 3])
@pytest.mark.parametrize('mode', ['switch', 'blend', 'ensemble', 'rtc'])
@pytest.mark.parametrize(('overrun', 'extra'), [('hold', 0), ('hold', 4), ('continue', 0)])
def test_when_chunks_come_within_the_estimate_expect_no_braking_at_their_seams(
    mode: str, delay_steps: int, rate_hz: int, overrun: str, extra: int
) -> None:
    parameters = holding(
        replan_interval=6,
        overrun=overrun,  # type: ignore[arg-type]
        max_overrun_steps=extra,
        handover=HandoverParameters(mode=mode),  # type: ignore[arg-type]
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
    limits = make_limits(
        TWO, dict.fromkeys(TWO, ColumnLimits(velocity=1.0)), actions=LimitActions(velocity=action)
    )
    parameters = holding(replan_interval=6, handover=HandoverParameters(mode=mode))  # type: ignore[arg-type]
    rig = Rig(parameters, limits=limits, **start).started()
    rig.submit(ramp(0.0))
    rig.tick(10)
    row = np.array(ramp(SLOPE * rig.executor.status().step))
    rig.result = rig.submit(np.stack([row, row + jump], axis=1))  # type: ignore[attr-defined]
    return rig


@pytest.mark.parametrize('jump', [0.03, -0.07])
def test_when_a_step_across_the_seam_is_too_fast_expect_refusal_naming_the_joint(
    jump: float,
) -> None:
    rig = cross('reject', jump)
    result = rig.result  # type: ignore[attr-defined]
    assert result.refusal is ChunkRefusal.LIMIT
    assert "velocity of 'b'" in result.text and 'seam' in result.text
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert {chunk for _, chunk, _ in rig.executed()} == {1}


def test_when_a_step_across_the_seam_is_too_fast_and_clamped_expect_it_counted_and_slowed() -> None:
    rig = cross('clamp', 0.07)
    result = rig.result  # type: ignore[attr-defined]
    assert result.accepted and result.clamped and 'seam' in result.text
    assert rig.executor.counters.clamped == 1
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    positions = np.array([tick.command.setpoints for tick in rig.ticks])
    assert np.abs(np.diff(positions, axis=0)).max() <= 0.01 + 1e-12


@pytest.mark.parametrize(('mode', 'jump'), [('switch', 0.015), ('blend', 0.06)])
def test_when_the_step_across_the_seam_is_within_the_limit_expect_the_chunk_as_it_is(
    mode: str, jump: float
) -> None:
    result = cross('reject', jump, mode).result  # type: ignore[attr-defined]
    assert result.accepted and not result.clamped


def test_when_setting_out_expect_the_start_tolerance_to_decide_and_not_the_speed() -> None:
    limits = make_limits(
        TWO, dict.fromkeys(TWO, ColumnLimits(velocity=1.0)), actions=LimitActions(velocity='reject')
    )
    start = StartParameters(tolerance=0.2, on_too_far='refuse')
    rig = Rig(holding(replan_interval=6), limits=limits, start=start).started()
    assert rig.submit([0.15] * 30).accepted
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    positions = np.array([tick.command.setpoints for tick in rig.ticks])
    assert np.abs(np.diff(positions, axis=0)).max() <= 0.01 + 1e-12


@pytest.mark.parametrize(('fastest', 'accepted'), [(1.05, False), (1.08, True)])
def test_when_a_cross_fade_is_too_fast_after_its_first_row_expect_refusal_all_the_same(
    fastest: float, accepted: bool
) -> None:
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
