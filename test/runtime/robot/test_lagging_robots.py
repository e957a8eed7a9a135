"""Every shipped robot with drives that lag, are off or are blocked: what stops it, and how soon."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from lagging_arm import FILES, LaggingArm
from thorough import thorough_but

from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.columns import CommandColumns
from vla_runtime.execution.command import Command, Reason
from vla_runtime.execution.config import Mode
from vla_runtime.robot.file import Robot, load_robot

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
    file, lag_s, speed, rate_hz, rest_s
):
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
def test_a_healthy_arm_with_other_drives_is_never_stopped(drives):
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
    file, when, lag_s, speed, rate_hz
):
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


# --- Each joint of the shipped robots is blocked in turn, through the real file and its match


class BlockedArm(LaggingArm):
    """A robot with a joint that something stops on its way.

    Args:
        robot: of a robot file.
        joint: joint that the policy moves.
        way: distance after which it is blocked.
    """

    def __init__(self, robot: Robot, joint: str, way: float) -> None:
        super().__init__(robot, joints=[joint], smoothing_s=0.045, share=0.5)
        self.at = self.names.index(joint)
        self.blocked_at = self.positions[self.at] + way

    def _drive(self, command: np.ndarray, dt_s: float) -> None:
        super()._drive(command, dt_s)
        self.driven[self.at] = min(self.driven[self.at], self.blocked_at)
        self.positions = self.driven - self.sag

    def _answer(self, place: np.ndarray, request: int | None) -> None:
        """Plan from where the robot is, as a real policy does."""
        super()._answer(self.positions.copy(), request)

    def push(self, seconds: float) -> Command:
        """Let the policy go on for so long, or until the robot is stopped."""
        self.start()
        self.goal = self.places[1]
        self.run(seconds)
        assert self.command is not None
        return self.command


def grips(*, wanted: bool) -> list:
    """Every joint of every shipped robot that may, or may not, hold an object.

    The last of a robot and one in the middle stand for all.
    """
    found = []
    for file in FILES:
        # The tabletop's gripper has no `grips`: max_step is its whole range.
        joints = [
            joint.name
            for joint in load_robot(file).joints
            if joint.grips is wanted and (file.stem, joint.name) != ('tabletop', 'gripper')
        ]
        kept = [joints[len(joints) // 2], joints[-1]] if joints else []
        for joint in joints:
            marks = () if joint in kept else pytest.mark.thorough
            found.append(pytest.param(file, joint, id=f'{file.stem}-{joint}', marks=marks))
    return found


@pytest.mark.parametrize(('file', 'joint'), grips(wanted=False))
def test_a_blocked_joint_stops_every_shipped_robot(file, joint):
    robot = load_robot(file)
    arm = BlockedArm(robot, joint, way=0.05)
    assert arm.push(10.0).reason is Reason.TRACKING_ERROR
    assert f"'{joint}' is blocked" in arm.executor.detail
    for _ in range(100):
        arm.tick()
    assert arm.command is not None
    near = 0.05 * robot.joint(joint).max_step
    assert abs(arm.command.setpoints[arm.at] - arm.positions[arm.at]) <= near * (1 + 1e-6)


@pytest.mark.parametrize(('file', 'joint'), grips(wanted=True))
def test_a_gripper_that_holds_an_object_stops_no_shipped_robot(file, joint):
    robot = load_robot(file)
    span = robot.joint(joint).upper - robot.joint(joint).lower
    arm = BlockedArm(robot, joint, way=0.1 * span)
    assert arm.push(5.0).reason is not Reason.TRACKING_ERROR, arm.executor.detail
