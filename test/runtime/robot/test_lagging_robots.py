"""Every shipped robot with drives that lag: stopped only, and soon, where they are off."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from lagging_arm import LaggingArm
from shipped_robots import FILES
from thorough import thorough_but

from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.columns import CommandColumns
from vla_runtime.execution.command import Reason
from vla_runtime.execution.config import Mode
from vla_runtime.robot.file import load_robot

TABLETOP = next(file for file in FILES if file.stem == 'tabletop')
# Lag of the drives, s; speed of the policy, rad/s; rate of the joint states, Hz; rest, s.
LAGS, SPEEDS, RATES, RESTS = (0.0, 0.1, 0.25), (0.3, 1.0, 2.0), (10, 50, 500), (0.0, 0.5)
KEPT = [
    (TABLETOP, 0.15, 0.3, 100, 0.5),
    (TABLETOP, 0.25, 2.0, 10, 0.1),
    (TABLETOP, 0.1, 1.0, 500, 0.0),
    *((file, 0.25, 1.0, 100, 0.5) for file in FILES),
]
SETTINGS = [
    *KEPT,
    *(
        one
        for one in (
            *product([TABLETOP], LAGS, SPEEDS, RATES, RESTS),
            *product(FILES, (0.25,), (0.3, 2.0), (10, 100), (0.5,)),
        )
        if one not in KEPT
    ),
]


def named(value: object) -> str:
    return value.stem if isinstance(value, Path) else f'{value}'


def arm_of(file: Path, **drives: float) -> LaggingArm:
    arm = LaggingArm(load_robot(file), **drives)
    arm.start()
    return arm


def went_and_came(arm: LaggingArm, rest_s: float) -> str:
    """Move to and fro and to, with rests between; return what stopped the robot, if anything."""
    for place in (1, 0, 1):
        if arm.go(place, rest_s):
            return arm.executor.detail
    return ''


@pytest.mark.parametrize(
    ('file', 'lag_s', 'speed', 'rate_hz', 'rest_s'), thorough_but(KEPT, SETTINGS), ids=named
)
def test_a_healthy_arm_that_rests_and_sets_out_is_never_stopped(
    file: Path, lag_s: float, speed: float, rate_hz: float, rest_s: float
) -> None:
    arm = arm_of(file, lag_s=lag_s, speed=speed, rate_hz=rate_hz)
    assert went_and_came(arm, rest_s) == ''


@pytest.mark.parametrize(
    'drives',
    [
        pytest.param({'smoothing_s': 0.15, 'lag_s': 0.05}, id='low pass'),
        pytest.param(
            {'dead_way': 0.03, 'lag_s': 0.1, 'speed': 0.1, 'share': 0.05}, id='friction, slow'
        ),
        pytest.param({'dead_way': 0.03, 'lag_s': 0.1, 'sag': 0.04}, id='friction and sag'),
        pytest.param({'measured_late_s': 0.1, 'lag_s': 0.1}, id='states arrive late'),
        pytest.param({'joints': ('shoulder_pan',), 'lag_s': 0.2}, id='one joint'),
        pytest.param({'speed': 0.03, 'lag_s': 0.25, 'rate_hz': 10.0, 'share': 0.03}, id='creeps'),
    ],
)
def test_a_healthy_arm_with_other_drives_is_never_stopped(drives: dict) -> None:
    assert went_and_came(arm_of(TABLETOP, **drives), 0.5) == ''


WHEN = ('from the start', 'in motion', 'in a rest')
OFF_KEPT = [
    *((TABLETOP, when, 0.1, 1.0, rate) for when in WHEN for rate in (10, 100)),
    *((file, 'from the start', 0.25, 1.0, 100) for file in FILES),
]
OFF = [
    *OFF_KEPT,
    *(
        one
        for one in product([TABLETOP], WHEN, (0.0, 0.25), (0.3, 1.0), RATES)
        if one not in OFF_KEPT
    ),
]


@pytest.mark.parametrize(
    ('file', 'when', 'lag_s', 'speed', 'rate_hz'), thorough_but(OFF_KEPT, OFF), ids=named
)
def test_motors_that_are_off_are_found_within_three_tenths_of_way_that_matters(
    file: Path, when: str, lag_s: float, speed: float, rate_hz: float
) -> None:
    """Way that matters: two commands have gone on by 0.05 rad (`hold_follows`) without joints."""
    arm = arm_of(file, lag_s=lag_s, speed=speed, rate_hz=rate_hz)
    if when != 'from the start':
        arm.go(1, 1.0)
        arm.go(0, 1.0)
    arm.goal = arm.places[1]
    if when == 'in motion':
        arm.run(0.3 * float(np.abs(arm.places[1] - arm.places[0]).max()) / speed)
    arm.off[:] = True
    assert arm.command is not None
    base, gone_s = arm.command.setpoints.copy(), None
    allowed = ColumnModel(CommandColumns(arm.columns), arm.limits).follows
    watched = ~np.isinf(arm.limits.tracking_error)
    for _ in range(400):
        arm.tick()
        run = np.abs(arm.command.setpoints - base)
        if gone_s is None and np.count_nonzero((run > allowed)[watched]) >= 2:
            gone_s = arm.now_s
        if arm.executor.mode is Mode.STOPPED:
            break
    assert arm.executor.mode is Mode.STOPPED and arm.command.reason in (
        Reason.TRACKING_ERROR,
        Reason.BRAKING,
    )
    assert 'does not follow' in arm.executor.detail
    # Nothing shows before the next measurement.
    assert gone_s is None or arm.now_s - gone_s <= 0.3 + 1.0 / rate_hz + 1e-6
