"""The robot files that ship, each with a policy that speaks its own names and units."""

from __future__ import annotations

from dataclasses import replace

from paths import ROOT
from tiny_policy import tiny_spec

from vla_runtime.bundle.schema import ActionSpec, StateSpec
from vla_runtime.robot.file import Robot
from vla_runtime.robot.match import RobotMatch, match_robot

FILES = sorted((ROOT / 'config' / 'robots').glob('*.yaml'))


def matched(robot: Robot) -> RobotMatch:
    """The robot with a policy that speaks its own names and units and needs no camera."""
    spec = replace(
        tiny_spec(),
        cameras=(),
        state=tuple(StateSpec(joint.name, joint.unit) for joint in robot.joints),
        actions=tuple(ActionSpec(joint.name, joint.unit, 'absolute') for joint in robot.joints),
    )
    return match_robot(robot, spec, 'bundle')
