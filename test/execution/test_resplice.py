"""A plan that is spliced anew while its last step runs, and what a hold leaves of old chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from execution_rig import Rig

from vla_runtime.execution.command import Reason
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.parameters import ExecutorParameters

SLOPE = 0.02  # a step, so 0.5 a second


def ramp(count: int, start: float) -> list[float]:
    return [start + SLOPE * (i + 1) for i in range(count)]


def rig_in_the_last_step(mode: str, **changes: object) -> Rig:
    """At 500 Hz, no limits, cruising; a chunk is pending and the step before it has begun."""
    parameters = ExecutorParameters(
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


def test_when_the_robot_starved_expect_an_ensemble_without_the_chunks_of_before() -> None:
    rig = Rig(
        ExecutorParameters(replan_interval=5, handover=HandoverParameters(mode='ensemble'))
    ).started()
    rig.submit([0.05 * (i + 1) for i in range(50)])
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    rig.tick(6000)
    held = float(rig.measured[0])
    assert rig.submit([held] * 50, number=1).accepted
    rig.tick(40)
    assert float(rig.measured[0]) == pytest.approx(held, abs=1e-9)
