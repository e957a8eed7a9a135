"""Units of a robot file that limits, URDF, training or the measured state contradict.

A driver in radians where the file says degrees is commanded 57 times too far. Files alone are never
certain (a motor may make many turns), so they give notes. A measured state that another unit alone
explains keeps the robot from starting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.bundle.statistics import seen_range
from vla_runtime.files.quotes import quoted
from vla_runtime.robot.limits import urdf_limits
from vla_runtime.robot.match import RobotMatch
from vla_runtime.robot.schema import SIZE, JointUnit, Robot, RobotJoint

Range = tuple[float, float]

# The unit that is meant where another one is written.
_OTHER: Mapping[JointUnit, JointUnit] = {
    'rad': 'deg',
    'deg': 'rad',
    'm': 'mm',
    'mm': 'm',
    '1': 'percent',
    'percent': '1',
}
# Units that no message of ROS has (REP 103).
_NOT_OF_ROS = ('deg', 'mm')
# Two turns: no joint that does not turn freely goes further.
_TURN_RAD = 2.0 * math.pi
_FURTHEST_RAD = 2.0 * _TURN_RAD
# Two numbers whose ratio is a factor times this, either way, differ by the factor.
_NEARLY = 1.5
# Share of a range by which a position may lie beside it.
_BESIDE = 0.1
# Joints that must tell, where one alone may be chance.
_TELLING = 2


@dataclass(frozen=True)
class _Joint:
    """One joint, its ranges in its unit.

    Attributes:
        limits: position limits, with the URDF's; infinite where there are none.
        turns: the URDF has it turn as far as the robot file says.
        trained: its range in training; None where unknown.
        speaks_ros: an output of a kind whose unit is ROS's carries its position.
        by_velocity: it is commanded by velocity, as wheels are, which turn for ever.
    """

    joint: RobotJoint
    where: str
    limits: Range
    turns: bool
    trained: Range | None
    speaks_ros: bool
    by_velocity: bool

    @property
    def reach(self) -> float:
        return max(map(abs, self.limits))

    @property
    def other_factor(self) -> float:
        """The size, in the joint's unit, of 1 in the unit that may be meant."""
        return _factor(self.joint.unit)


class UnitCheck:
    """The units of a robot's joints; `match` is None for the robot file alone."""

    def __init__(
        self,
        robot: Robot,
        match: RobotMatch | None = None,
        trained: Mapping[str, Range] | None = None,
    ) -> None:
        self._robot = robot
        self._in_urdf = urdf_limits(robot)
        places = {} if match is None else {name: at for at, name in enumerate(match.column_names)}
        self._joints = []
        for index, joint in enumerate(robot.joints):
            low, high = _or_infinite(joint.lower, joint.upper)
            if match is not None and joint.name in places:
                at = places[joint.name]
                low, high = match.limits.lower[at], match.limits.upper[at]
            its = self._in_urdf.get(joint.name)
            furthest = 0.0 if its is None else max(abs(its.lower), abs(its.upper))
            self._joints.append(
                _Joint(
                    joint,
                    f'joints[{index}]',
                    (float(low), float(high)),
                    turns=math.isfinite(furthest) and furthest > _FURTHEST_RAD,
                    trained=(trained or {}).get(joint.name),
                    speaks_ros=any(
                        output.kind == 'joint_trajectory' and joint.name in output.joints
                        for output in robot.outputs
                    ),
                    by_velocity=any(
                        output.interface == 'velocity' and joint.name in output.joints
                        for output in robot.outputs
                    ),
                )
            )

    # The files.

    def notes(self) -> list[str]:
        return [*self._of_limits(), *self._of_urdf(), *self._of_ros(), *self._of_training()]

    def _of_limits(self) -> list[str]:
        found = ', '.join(
            f'{quoted(one.joint.name)} to {one.reach:g} rad ({one.reach / _TURN_RAD:.0f} turns)'
            for one in self._joints
            if _turns_far(one, one.reach) and math.isfinite(one.reach)
        )
        if not found:
            return []
        return [
            f'joints may go {found}: are these degrees? Then the driver speaks deg (unit: deg), or '
            'the limits are to be in rad'
        ]

    def _of_urdf(self) -> list[str]:
        notes = []
        for one in self._joints:
            its, (low, high) = self._in_urdf.get(one.joint.name), _written(one.joint)
            if its is None or not math.isfinite(high):
                continue
            reach, theirs = (max(map(abs, pair)) for pair in ((low, high), (its.lower, its.upper)))
            if _differ_by_a_unit(reach, theirs, one.joint.unit):
                unit = one.joint.unit
                notes.append(
                    f'{one.where}: lower and upper of {quoted(one.joint.name)} are {low:g} to '
                    f'{high:g} {unit}, and the URDF has {its.lower:.4g} to {its.upper:.4g} {unit}: '
                    f'are they in {_OTHER[unit]}?'
                )
        return notes

    def _of_ros(self) -> list[str]:
        names = [
            one.joint.name
            for one in self._joints
            if one.speaks_ros and one.joint.command_unit in _NOT_OF_ROS
        ]
        if not names:
            return []
        units = {joint.command_unit for joint in self._robot.joints if joint.name in names}
        return [
            f'{", ".join(map(quoted, names))} in {" and ".join(sorted(units))} go out as '
            'joint_trajectory, and ROS speaks rad and m (REP 103), also in joint states: does the '
            'driver speak other units?'
        ]

    def _of_training(self) -> list[str]:
        known = [
            (one, trained)
            for one in self._joints
            if (trained := one.trained) is not None and math.isfinite(one.reach)
        ]
        found = ', '.join(
            f'{quoted(one.joint.name)} {low:.4g} to {high:.4g} {one.joint.unit} (limits '
            f'{one.limits[0]:g} to {one.limits[1]:g})'
            for one, (low, high) in known
            if _fits_only_otherwise(
                one, max(low, high, key=abs), min(one.other_factor, 1.0 / one.other_factor)
            )
        )
        notes = [
            f'joints were far outside of their limits in training, {found}: are unit and limits '
            'those of the driver? Is the unit of the bundle right (export --units)?'
        ] * bool(found)
        arms = [
            (one, max(map(abs, trained)))
            for one, trained in known
            if SIZE[one.joint.unit][0] != 'none' and not one.joint.grips
        ]
        times = [max(one.other_factor, 1.0 / one.other_factor) for one, _ in arms]
        if len(arms) >= _TELLING and all(
            reach * by <= _NEARLY * one.reach for (one, reach), by in zip(arms, times, strict=True)
        ):
            one, reach = arms[0]
            notes.append(
                f'in training no joint came further than a fortieth of its limits '
                f'({quoted(one.joint.name)} {reach:.3g} of {one.reach:g} {one.joint.unit}): is the '
                "unit of the bundle right (export --units)? Are the limits in the joints' unit?"
            )
        return notes

    # The measured state.

    def why_not_start(self, measured: Mapping[str, float]) -> str:
        """Return why these positions by joint are not in the robot file's units; else empty."""
        known = [
            (one, measured[one.joint.name]) for one in self._joints if one.joint.name in measured
        ]
        for one, value in known:
            if _fits_only_otherwise(one, value, one.other_factor):
                low, high = one.limits
                return self._refusal(
                    [(one, value)], f'far outside of its limits {low:g} to {high:g}'
                )
            told = one.by_velocity or (one.trained is not None and _inside(value, one.trained))
            if _turns_far(one, value) and _inside(value, one.limits) and not told:
                return self._refusal(
                    [(one, value)],
                    f'{abs(value) / _TURN_RAD:.0f} turns',
                    'A joint that really turns so far has continuous: true, or a URDF that says so',
                )
        return self._smaller(known)

    def _smaller(self, known: list[tuple[_Joint, float]]) -> str:
        """Find numbers that are too small: of a driver in rad or m, where deg or mm is written."""
        telling: list[tuple[_Joint, float]] = []
        for one, value in known:
            times = one.other_factor
            if times < 1.0 or SIZE[one.joint.unit][0] == 'none':
                continue
            if not _inside(value * times, one.limits):
                # The other unit would not do either.
                return ''
            trained = one.limits if one.trained is None else one.trained
            if one.joint.grips or (_inside(value, trained) and _inside(value, one.limits, 0.0)):
                continue
            if not _inside(value * times, trained):
                return ''
            telling.append((one, value))
        wanted = 1 if telling and all(one.speaks_ros for one, _ in telling) else _TELLING
        if len(telling) < wanted:
            return ''
        return self._refusal(
            telling,
            'outside of its limits or of where it was in training',
            'If the units are right, move the robot to where the policy was trained to begin, '
            'then call ~/start',
        )

    def _refusal(self, found: list[tuple[_Joint, float]], fault: str, otherwise: str = '') -> str:
        seen = ', '.join(f'{quoted(one.joint.name)} at {value:.4g}' for one, value in found)
        (one, value), unit = found[0], found[0][0].joint.unit
        text = (
            f'{seen}: as {unit} that is {fault}, and as {_OTHER[unit]} it is '
            f'{value * _factor(unit):.4g} {unit} and fits. Does the driver speak {_OTHER[unit]}? '
            f'{self._robot.file} says {one.where}.unit: {unit}; correct unit and limits there'
        )
        return f'{text}. {otherwise}' if otherwise else text


def trained_ranges(
    spec: BundleSpec, statistics: Mapping[str, np.ndarray], match: RobotMatch
) -> dict[str, Range]:
    """Return the range of each robot joint in training, in its unit; none of those never moved."""
    seen = seen_range(spec, 'state', statistics)
    if seen is None:
        return {}
    ends = np.sort([match.state.to_robot(values) for values in seen], axis=0)
    names = {joint for joint in match.state_joints if joint in match.measured_joints}
    return {
        name: (float(low), float(high))
        for name, low, high in zip(match.state_joints, *ends, strict=True)
        if name in names and high - low > 1e-6
    }


def _or_infinite(lower: float | None, upper: float | None) -> Range:
    return (
        -math.inf if lower is None else lower,
        math.inf if upper is None else upper,
    )


def _written(joint: RobotJoint) -> Range:
    return _or_infinite(joint.lower, joint.upper)


def _turns_far(one: _Joint, value: float) -> bool:
    """Return whether a position in rad is further than joints turn, unless the URDF says so."""
    joint = one.joint
    return (
        joint.unit == 'rad'
        and not joint.continuous
        and not one.turns
        and abs(value) > _FURTHEST_RAD
    )


def _inside(value: float, where: Range, share: float = _BESIDE) -> bool:
    """Return whether a position is in a range, or no more than a share of it beside."""
    low, high = where
    if not math.isfinite(high - low):
        return True
    return low - share * (high - low) <= value <= high + share * (high - low)


def _fits_only_otherwise(one: _Joint, value: float, times: float) -> bool:
    """Return whether a position is a whole range outside, and that many times it is inside."""
    low, high = one.limits
    reach = high - low
    if not math.isfinite(reach) or low - reach <= value <= high + reach:
        return False
    return _inside(value * times, one.limits)


def _factor(unit: JointUnit) -> float:
    return SIZE[_OTHER[unit]][1] / SIZE[unit][1]


def _differ_by_a_unit(first: float, second: float, unit: JointUnit) -> bool:
    """Return whether two reaches differ by the factor between a unit and the one it may be."""
    if not (0.0 < first < math.inf and 0.0 < second < math.inf):
        return False
    ratio = abs(math.log(first / second)) - abs(math.log(_factor(unit)))
    return abs(ratio) < math.log(_NEARLY)
