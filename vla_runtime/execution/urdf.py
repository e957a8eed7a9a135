"""Joint limits from a URDF: what the robot file may tighten and never loosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal
from xml.etree import ElementTree

import numpy as np

from vla_runtime.execution.limits import ColumnLimits, Limits
from vla_runtime.files.quotes import quoted

# A robot file in degrees rounds what a URDF has in radians.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class UrdfJoint:
    """A movable joint.

    Attributes:
        unit: of its limits: m of a prismatic joint, rad of the others.
        limits: its limits; infinite where the URDF has none.
        why: what stands in place of a limit, in words that follow one; '' where nothing does.
    """

    unit: Literal['rad', 'm']
    limits: ColumnLimits
    why: str = ''


def read_urdf_limits(urdf: str) -> dict[str, UrdfJoint]:
    """Limits of every movable joint of a URDF text, by joint name.

    `<limit lower upper velocity>` (http://wiki.ros.org/urdf/XML/joint); soft limits of a
    `<safety_controller>` are used where they are tighter. Continuous joints have no position
    limits. A velocity that is not positive, and bounds without any way between them, are no limits:
    CAD exporters write 0 where the designer gave nothing.

    Raises:
        ValueError: not XML, no robot, or a limit that is not a finite number.
    """
    if not urdf.strip():
        raise ValueError('URDF: is empty; expected XML with an outermost <robot>')
    try:
        robot = ElementTree.fromstring(urdf)
    except ElementTree.ParseError as error:
        raise ValueError(f'URDF: not valid XML ({error})') from error
    if robot.tag != 'robot':
        raise ValueError(f'URDF: the outermost element is {quoted(robot.tag)}, expected <robot>')
    joints = {}
    for joint in robot.findall('joint'):
        kind = joint.get('type', '')
        if kind in ('revolute', 'prismatic', 'continuous'):
            joints[joint.get('name', '')] = _joint(joint, kind)
    return joints


def _joint(joint: ElementTree.Element, kind: str) -> UrdfJoint:
    name, limit = joint.get('name', ''), joint.find('limit')
    unit: Literal['rad', 'm'] = 'm' if kind == 'prismatic' else 'rad'
    if limit is None:
        if kind == 'continuous':
            return UrdfJoint(unit, ColumnLimits())
        raise ValueError(f'URDF: joint {quoted(name)} is {kind} and has no <limit>')
    why = ''
    velocity = _number(name, limit, 'velocity', np.inf)
    if velocity <= 0.0:
        why, velocity = f', which has velocity {velocity:g}', np.inf
    if kind == 'continuous':
        return UrdfJoint(unit, ColumnLimits(velocity=velocity), why)
    # The URDF schema's default for a left-out bound is 0.
    lower, upper = _number(name, limit, 'lower', 0.0), _number(name, limit, 'upper', 0.0)
    if lower > upper:
        raise ValueError(f'URDF: joint {quoted(name)} has lower {lower:g} above upper {upper:g}')
    if lower == upper:
        why += f', which has lower and upper {lower:g}'
        return UrdfJoint(unit, ColumnLimits(velocity=velocity), why)
    lower, upper = _within_soft_limits(joint, name, lower, upper)
    return UrdfJoint(unit, ColumnLimits(lower=lower, upper=upper, velocity=velocity), why)


def _within_soft_limits(
    joint: ElementTree.Element, name: str, lower: float, upper: float
) -> tuple[float, float]:
    safety = joint.find('safety_controller')
    if safety is None:
        return lower, upper
    soft_lower = max(lower, _number(name, safety, 'soft_lower_limit', lower))
    soft_upper = min(upper, _number(name, safety, 'soft_upper_limit', upper))
    return (soft_lower, soft_upper) if soft_lower < soft_upper else (lower, upper)


def _number(joint: str, element: ElementTree.Element, field: str, default: float) -> float:
    text = element.get(field)
    if text is None:
        return default
    where = f'URDF: joint {quoted(joint)} <{element.tag} {field}={quoted(text)}>'
    try:
        value = float(text)
    except ValueError as error:
        unexpanded = '; expand the file with xacro first' if '${' in text else ''
        raise ValueError(f'{where} is not a number{unexpanded}') from error
    # Nothing compares with not-a-number, and an infinite limit is none.
    if not math.isfinite(value):
        raise ValueError(f'{where} is not finite; give the limit, or leave the field out')
    return value


def tighten_with_urdf(limits: Limits, urdf: Mapping[str, ColumnLimits]) -> Limits:
    """The robot file's limits within those of the URDF, which stand where the robot file has none.

    `urdf` holds its limits by column, in the column's unit.

    Raises:
        ValueError: the robot file allows more than the URDF.
    """
    lower, upper, velocity = limits.lower.copy(), limits.upper.copy(), limits.velocity.copy()
    for column, allowed in urdf.items():
        if column not in limits.names:
            raise ValueError(
                f"limits: '{column}' is not commanded; columns are {list(limits.names)}"
            )
        index = limits.names.index(column)
        for field, mine, its, sign in (
            ('lower', lower, allowed.lower, -1.0),
            ('upper', upper, allowed.upper, 1.0),
            ('velocity', velocity, allowed.velocity, 1.0),
        ):
            slack = 1e-9 + _ROUNDING * abs(its)
            if np.isfinite(mine[index]) and sign * (mine[index] - its) > slack:
                raise ValueError(
                    f"limits: '{column}' {field} {mine[index]:g} allows more than the URDF's "
                    f'{its:g}; a robot file can only tighten'
                )
            mine[index] = max(mine[index], its) if sign < 0.0 else min(mine[index], its)
    return replace(limits, lower=lower, upper=upper, velocity=velocity)
