"""Joints without end stops: drivers that wrap their angle, and drivers that count turns."""

import math

import numpy as np
import pytest
from execution_rig import SWITCH, Rig, chunk_of, holding
from hypothesis import given
from hypothesis import strategies as st
from thorough import examples

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import CommandKind
from vla_runtime.execution.limits import ColumnLimits, make_limits

TURN = 2.0 * math.pi
MAX_STEP = 0.3
SPIN = (Column('spin', continuous=True),)
HORIZON = 20


def wrapped(angle: float) -> float:
    """The angle as a driver reports it that wraps at ±π."""
    return (angle + math.pi) % TURN - math.pi


class Spin(Rig):
    """One joint without end stops; `angle` counts turns, and the driver reports or wraps it."""

    def __init__(self, angle: float, *, wraps: bool, dry_run: bool = False) -> None:
        limit = ColumnLimits(velocity=2.0, acceleration=20.0, step_from_measured=MAX_STEP)
        super().__init__(
            holding(replan_interval=10, handover=SWITCH),
            SPIN,
            dry_run=dry_run,
            limits=make_limits(['spin'], {'spin': limit}),
        )
        self.angle, self.wraps = angle, wraps
        self.lag = 0.3
        self.robot_follows = False  # as the rig does it, which knows no turns

    def tick(self, count: int = 1, measure: bool = True):
        for _ in range(count):
            self.measured[0] = wrapped(self.angle) if self.wraps else self.angle
            command = super().tick(1, measure)
            if command.kind is not CommandKind.IDLE and not command.dry_run:
                gap = command.setpoints[0] - self.angle
                # To a driver that wraps, a whole turn is nothing.
                self.angle += self.lag * (wrapped(gap) if self.wraps else gap)
        return command

    def turn_by_hand(self, angle: float) -> None:
        """A person turns the joint, whose motor is off, faster than commands may follow.

        No faster than one and a half times that: it could not be told from a wrong reading.
        """
        lag, self.lag = self.lag, 0.0
        for at in np.linspace(self.angle, angle, round(abs(angle - self.angle) / 0.025)):
            self.angle = float(at)
            self.tick()
        self.tick(300)
        self.lag = lag

    def go(self, by: float) -> None:
        """Execute a chunk of a policy that thinks in angles within ±π, like most."""
        begin = self.command.setpoints[0]
        rows = [wrapped(begin + by * (row + 1) / HORIZON) for row in range(HORIZON)]
        result = self.submit(chunk_of(rows, ('spin',)))
        assert result.accepted, result.text
        self.tick(60)

    def away(self) -> float:
        """Distance of the newest command from the number that the driver reports."""
        return float(abs(self.command.setpoints[0] - self.measured[0]))


def started(angle: float, *, wraps: bool) -> Spin:
    made = Spin(angle, wraps=wraps)
    made.started()
    return made


# ---------------------------------------------------------------- the first command


@pytest.mark.parametrize('angle', [7.0, -9.5, 3.5, 100.0])
def test_when_the_driver_counts_turns_expect_the_first_command_at_its_own_number(angle):
    spin = started(angle, wraps=False)
    assert spin.command.kind is CommandKind.HOLD and spin.command.setpoints[0] == angle
    spin.go(0.5)
    assert CommandKind.TRACK in {tick.command.kind for tick in spin.ticks}
    assert spin.command.setpoints[0] == pytest.approx(angle + 0.25, abs=0.05)


def test_when_a_dry_run_spun_the_joint_expect_the_start_after_it_at_the_drivers_number():
    spin = Spin(0.4, wraps=False, dry_run=True)
    spin.started()
    for _ in range(20):
        spin.go(1.0)
    assert spin.command.setpoints[0] > TURN
    spin.executor.set_dry_run(False)
    # With the very state that the dry run saw last.
    assert spin.start().started
    assert spin.tick().setpoints[0] == 0.4


# ---------------------------------------------------------------- turned by hand


@pytest.mark.parametrize(('angle', 'other'), [(0.7, 0.7 + TURN), (-1.0, 4.0), (3.0, -3.0)])
def test_when_turned_by_hand_and_turns_are_counted_expect_the_hold_to_follow(angle, other):
    spin = started(angle, wraps=False)
    spin.executor.stop()
    spin.turn_by_hand(other)
    assert spin.away() <= 0.05 * MAX_STEP + 0.001
    assert spin.start().started
    spin.tick(50)
    assert spin.away() < 0.05 and spin.angle == pytest.approx(other, abs=0.05)
    spin.go(0.5)
    assert spin.away() < MAX_STEP


def test_when_turned_by_hand_and_the_driver_wraps_expect_the_command_to_stay():
    spin = started(0.7, wraps=True)
    spin.executor.stop()
    spin.state_arrives = False
    spin.tick(30)
    spin.angle += TURN
    spin.state_arrives = True
    spin.tick(55)
    assert spin.start().started
    spin.tick(5)
    assert spin.command.setpoints[0] == pytest.approx(0.7)


def test_when_a_turn_off_unseen_and_turns_are_counted_expect_no_turn_before_a_start():
    """More than a turn from zero: no driver that wraps says so."""
    spin = started(0.7, wraps=False)
    spin.state_arrives = False
    spin.tick(30)
    spin.angle += TURN
    spin.lag = 0.0
    spin.state_arrives = True
    spin.tick(60)
    assert spin.reason == 'state_implausible' and "'spin'" in spin.executor.detail
    # An encoder that lost count says the same: whether the joint was turned is for a person to see.
    held = spin.command.setpoints[0]
    spin.tick(200)
    assert abs(spin.command.setpoints[0] - held) <= 0.05 + 1e-9
    assert not spin.start().started
    assert spin.start().started
    spin.tick()
    assert abs(spin.command.setpoints[0] - held) <= 0.05 + 1e-9
    spin.tick(3000)
    assert spin.away() <= 1e-9


# ---------------------------------------------------------------- whatever the way


@examples(25)
@given(angle=st.floats(-3.1, 3.1), ways=st.lists(st.floats(-2.5, 2.5), min_size=1, max_size=8))
def test_both_drivers_are_commanded_alike_over_any_number_of_turns(angle, ways):
    wraps, counts, turned = (
        started(angle, wraps=True),
        started(angle, wraps=False),
        started(angle + 3 * TURN, wraps=False),
    )
    for way in ways:
        for spin in (wraps, counts, turned):
            spin.go(way)
            assert spin.reason != 'tracking_error', spin.executor.detail
    for one, other, third in zip(wraps.ticks, counts.ticks, turned.ticks, strict=True):
        if one.command.kind is CommandKind.IDLE:
            continue
        assert other.position == pytest.approx(one.position, abs=1e-9)
        assert third.position == pytest.approx(one.position + 3 * TURN, abs=1e-9)
    assert counts.away() <= MAX_STEP + 1e-9 and turned.away() <= MAX_STEP + 1e-9
    steps = np.diff([tick.position for tick in wraps.ticks[3:]])
    assert np.abs(steps).max() <= 2.0 * 0.01 * (1 + 1e-9)


@pytest.mark.parametrize('back', [1.0, -1.0])
def test_when_a_driver_wraps_from_zero_to_a_turn_expect_no_jump(back):
    spin = started(0.5 if back < 0.0 else TURN - 0.5, wraps=False)
    # A person turns it: what is started stops for that, what is stopped takes its command along.
    spin.executor.stop()
    at = spin.angle
    for tick in range(280):
        at += back * 0.01 * (tick < 200)
        spin.angle = at % TURN
        spin.lag = 0.0
        spin.tick()
        assert spin.reason == 'stopped'
    assert spin.command.setpoints[0] == pytest.approx(at, abs=0.02)
    steps = np.abs(np.diff([tick.position for tick in spin.ticks[3:]]))
    assert steps.max() <= 2.0 + 0.01
