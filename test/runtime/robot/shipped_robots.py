"""The robots that ship and are commanded by joints, each with a policy of its names and units."""

from __future__ import annotations

from dataclasses import replace

from paths import ROOT
from tiny_policy import tiny_spec

from vla_runtime.bundle.schema import ActionSpec, StateSpec
from vla_runtime.robot.file import Robot, load_robot
from vla_runtime.robot.match import RobotMatch, match_robot

FILES = [
    file
    for file in sorted((ROOT / 'config' / 'robots').glob('*.yaml'))
    if all(output.joints for output in load_robot(file).outputs)
]


def matched(robot: Robot) -> RobotMatch:
    """The robot with a policy that speaks its own names and units and needs no camera."""
    spec = replace(
        tiny_spec(),
        cameras=(),
        state=tuple(StateSpec(joint.name, joint.unit) for joint in robot.joints),
        actions=tuple(ActionSpec(joint.name, joint.unit, 'absolute') for joint in robot.joints),
    )
    return match_robot(robot, spec, 'bundle')
