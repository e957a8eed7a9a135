"""Chunks under `rtc` that were not tied to the plan; parameters that ask too much of a chunk."""

from __future__ import annotations

import numpy as np
import pytest
from execution_rig import Rig, holding

from vla_runtime.execution.handover import HandoverMode, HandoverParameters
from vla_runtime.execution.parameters import ExecutorParameters

JUMP = 0.05
HORIZON = 12


def cross_a_seam(mode: HandoverMode, *, tied: bool) -> Rig:
    """Executes a flat chunk, then another one that lies higher."""
    handover = HandoverParameters(mode=mode, blend_steps=4)
    rig = Rig(holding(replan_interval=5, handover=handover)).started()
    assert rig.submit(np.zeros((HORIZON, 2)), tied=tied).accepted
    rig.tick(18)
    assert rig.submit(np.full((HORIZON, 2), JUMP), tied=tied).accepted
    rig.run_until(lambda _: len(rig.executor.handovers) == 2)
    return rig


def velocity_jump(rig: Rig) -> float:
    return float(np.abs(rig.executor.handovers[-1].velocity_jump).max())


def test_when_a_chunk_under_rtc_is_not_tied_expect_a_blend_that_is_told() -> None:
    unconditioned, blended = cross_a_seam('rtc', tied=False), cross_a_seam('blend', tied=False)
    assert velocity_jump(unconditioned) == pytest.approx(velocity_jump(blended))
    assert unconditioned.executor.handovers[-1].mode == 'blend'
    assert unconditioned.executor.status().unconditioned
    assert not blended.executor.status().unconditioned


def test_when_a_chunk_under_rtc_is_tied_expect_its_rows_as_they_are() -> None:
    tied, switched = cross_a_seam('rtc', tied=True), cross_a_seam('switch', tied=False)
    assert velocity_jump(tied) == pytest.approx(velocity_jump(switched))
    assert tied.executor.handovers[-1].mode == 'rtc'
    assert not tied.executor.status().unconditioned


def test_when_the_first_chunk_under_rtc_sets_out_from_a_hold_expect_no_complaint() -> None:
    handover = HandoverParameters(mode='rtc')
    rig = Rig(holding(replan_interval=5, handover=handover)).started()
    assert rig.submit(np.zeros((HORIZON, 2)), tied=False).accepted
    rig.tick(8)
    assert rig.executor.handovers[-1].from_hold
    assert not rig.executor.status().unconditioned


@pytest.mark.parametrize(
    ('parameters', 'said'),
    [
        (
            holding(handover=HandoverParameters(blend_steps=13)),
            'blend_steps is 13 but a chunk has only 12 steps; set blend_steps between 1 and 12',
        ),
        (
            holding(max_overrun_steps=13),
            'max_overrun_steps is 13 but a chunk has only 12 steps; set max_overrun_steps '
            'between 0 and 12',
        ),
    ],
)
def test_when_more_steps_are_wanted_than_a_chunk_has_expect_both_numbers(
    parameters: ExecutorParameters, said: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        parameters.require_horizon(HORIZON)
    assert str(refusal.value) == said
    parameters.require_horizon(13)
