"""Seams as the robot feels them: positions, velocities, and what is reported."""

from __future__ import annotations

import numpy as np
import pytest
from execution_rig import STEP_NS, Rig, holding

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import CommandKind, Reason
from vla_runtime.execution.handover import HandoverParameters

PERIOD_NS = 2_000_000


def rig_with(mode: str, **handover: object) -> Rig:
    parameters = holding(
        replan_interval=6,
        handover=HandoverParameters(mode=mode, **handover),  # type: ignore[arg-type]
    )
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
def test_when_crossing_a_seam_expect_continuous_velocity_in_every_mode(mode: str) -> None:
    _, velocities = cross_a_seam(rig_with(mode))
    # At 500 Hz a jump would be the full difference of the ramps; continuity is small changes.
    assert np.abs(np.diff(velocities)).max() < 0.35
    assert np.abs(velocities).max() > 0.25


def test_when_blending_expect_a_softer_seam_than_switching() -> None:
    switched, blended = rig_with('switch'), rig_with('blend', blend_steps=5)
    _, fast = cross_a_seam(switched)
    _, soft = cross_a_seam(blended)
    assert np.abs(soft).max() < 0.6 * np.abs(fast).max()
    assert switched.executor.handovers[-1].position_jump == pytest.approx([0.05, 0.05])
    assert blended.executor.handovers[-1].position_jump == pytest.approx([0.05, 0.05])
    felt = [rig.executor.handovers[-1].velocity_jump[0] for rig in (switched, blended)]
    assert felt[0] == pytest.approx(0.05 / 0.04)
    assert abs(felt[1]) < 0.3 * felt[0]


def test_when_blending_expect_positions_to_fade_and_velocities_to_be_the_new_chunks() -> None:
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
def test_when_chunks_agree_expect_no_trace_of_the_seam(mode: str) -> None:
    positions, velocities = cross_a_seam(rig_with(mode, blend_steps=2), jump=0.0)
    times = (np.arange(len(positions)) + 1) * PERIOD_NS / 40e6
    # Past the acceleration from start_state, which is blended too.
    inside = slice(101, 155)
    assert positions[inside] == pytest.approx(0.01 * times[inside], abs=1e-9)
    assert velocities[inside] == pytest.approx(np.full(54, 0.25), abs=1e-6)


def test_when_a_chunk_takes_over_expect_a_report_with_both_jumps() -> None:
    rig = rig_with('switch')
    cross_a_seam(rig)
    first, second = rig.executor.handovers
    assert first.from_hold and first.step == 0 and first.chunk == 1
    assert first.position_jump == pytest.approx([0.01, 0.01])
    assert not second.from_hold and not second.late
    assert (second.step, second.chunk, second.join_index, second.mode) == (6, 2, 4, 'switch')


def test_when_ensembling_expect_the_weighted_mean_of_all_live_chunks() -> None:
    rig = rig_with('ensemble', ensemble_decay=0.5)
    rig.submit([0.0] * 30)
    rig.tick(20)
    rig.submit([0.1] * 30)
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    weight = np.exp(-0.5) / (1 + np.exp(-0.5))
    assert rig.command.setpoints == pytest.approx([0.1 * weight] * 2)


@pytest.mark.parametrize('ticks', [1, 5, 10, 15, 19])
def test_when_chunk_comes_in_the_last_step_expect_what_has_begun_to_stay_as_it_is(
    ticks: int,
) -> None:
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


def test_when_no_chunk_follows_expect_the_last_step_to_come_to_rest_smoothly() -> None:
    rig = rig_with('switch')
    rig.submit(list(0.01 * np.arange(1, 31)))
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    velocities = np.array([tick.command.velocities[0] for tick in rig.ticks])
    assert velocities.max() > 0.24
    assert np.abs(np.diff(velocities)).max() < 0.06


def test_when_a_fault_stopped_the_robot_expect_the_next_chunk_from_standstill() -> None:
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
