"""Joint limits from a URDF: what the robot file may tighten and never loosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np

from vla_runtime.execution.limits import ColumnLimits, Limits
from vla_runtime.files.quotes import quoted
from vla_runtime.files.typed_yaml import did_you_mean


def read_urdf_limits(urdf: str) -> dict[str, ColumnLimits]:
    """Limits of every movable joint of a URDF, by joint name.

    `<limit lower upper velocity>` (http://wiki.ros.org/urdf/XML/joint); soft limits of a
    `<safety_controller>` are used where they are tighter. Continuous joints have no position
    limits.

    Args:
        urdf: the XML text.

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
    limits = {}
    for joint in robot.findall('joint'):
        kind = joint.get('type', '')
        if kind in ('revolute', 'prismatic', 'continuous'):
            limits[joint.get('name', '')] = _joint_limits(joint, kind)
    return limits


def _joint_limits(joint: ElementTree.Element, kind: str) -> ColumnLimits:
    name = joint.get('name', '')
    limit, safety = joint.find('limit'), joint.find('safety_controller')
    if limit is None:
        if kind == 'continuous':
            return ColumnLimits()
        raise ValueError(f'URDF: joint {quoted(name)} is {kind} and has no <limit>')
    velocity = _number(name, limit, 'velocity', np.inf)
    if kind == 'continuous':
        return ColumnLimits(velocity=velocity)
    # The URDF schema's default for a left-out bound is 0.
    lower, upper = _number(name, limit, 'lower', 0.0), _number(name, limit, 'upper', 0.0)
    if safety is not None:
        lower = max(lower, _number(name, safety, 'soft_lower_limit', lower))
        upper = min(upper, _number(name, safety, 'soft_upper_limit', upper))
    return ColumnLimits(lower=lower, upper=upper, velocity=velocity)


def _number(joint: str, element: ElementTree.Element, field: str, default: float) -> float:
    text = element.get(field)
    if text is None:
        return default
    where = f'URDF: joint {quoted(joint)} <{element.tag} {field}={quoted(text)}>'
    try:
        value = float(text)
    except ValueError as error:
        raise ValueError(f'{where} is not a number') from error
    # Nothing compares with not-a-number, and an infinite limit is none.
    if not math.isfinite(value):
        raise ValueError(f'{where} is not finite; give the limit, or leave the field out')
    return value


def tighten_with_urdf(limits: Limits, urdf: str, joints: Mapping[str, str] | None = None) -> Limits:
    """The robot file's limits within those of the URDF.

    A limit that the robot file leaves out is the URDF's.

    Args:
        limits: the robot file's.
        urdf: the URDF's XML text.
        joints: column name to URDF joint name; columns left out are no joints. All columns under
            their own names when not given.

    Raises:
        ValueError: a joint is missing from the URDF, or the robot file allows more than the URDF.
    """
    known = read_urdf_limits(urdf)
    joints = joints if joints is not None else {name: name for name in limits.names}
    lower, upper, velocity = limits.lower.copy(), limits.upper.copy(), limits.velocity.copy()
    for column, joint in joints.items():
        if column not in limits.names:
            raise ValueError(
                f"limits: '{column}' is not commanded; columns are {list(limits.names)}"
            )
        if joint not in known:
            raise ValueError(
                f'URDF: no movable joint {quoted(joint)}{did_you_mean(joint, sorted(known))}; fix '
                "the robot file's joint names or give it the right URDF"
            )
        index, allowed = limits.names.index(column), known[joint]
        for field, mine, its, sign in (
            ('lower', lower, allowed.lower, -1.0),
            ('upper', upper, allowed.upper, 1.0),
            ('velocity', velocity, allowed.velocity, 1.0),
        ):
            if np.isfinite(mine[index]) and sign * (mine[index] - its) > 1e-9:
                raise ValueError(
                    f"limits: '{column}' {field} {mine[index]:g} allows more than the URDF's "
                    f"{its:g} (joint '{joint}'); a robot file can only tighten"
                )
            mine[index] = max(mine[index], its) if sign < 0.0 else min(mine[index], its)
    return replace(limits, lower=lower, upper=upper, velocity=velocity)
