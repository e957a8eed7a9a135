"""What the doctor looks for in a graph, by the files: without ROS 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vla_runtime.bundle.folder import Bundle, BundleError
from vla_runtime.bundle.writer import bundle_notes
from vla_runtime.models.shapes.bundle_contents import check_contents
from vla_runtime.nodes.doctor.findings import Finding, note, ok, problem
from vla_runtime.remote.contract import Contract
from vla_runtime.robot.limits import beyond_urdf
from vla_runtime.robot.match import MatchedOutput, MatchError, match_robot
from vla_runtime.robot.schema import Robot, RobotCamera
from vla_runtime.robot.unit_slips import Range, UnitCheck, trained_ranges

AREA = 'files'


@dataclass(frozen=True)
class Subject:
    """A robot, and what a policy needs of it; all of it without one.

    Attributes:
        cameras: those that are needed.
        outputs: as matched with the bundle, or the robot file's alone.
        step_hz: steps a second of the policy; None without one.
        trained: range of each joint in training; empty without a bundle.
    """

    robot: Robot
    units: UnitCheck
    cameras: tuple[RobotCamera, ...]
    outputs: tuple[MatchedOutput, ...]
    step_hz: float | None = None
    trained: Mapping[str, Range] = field(default_factory=dict)


def bring_together(
    robot: Robot | None, policy: Bundle | Contract | None, place: str = ''
) -> tuple[list[Finding], Subject | None]:
    """Judge the files as `check` does; where they do not fit, look for the robot file's own.

    `place` is the bundle's folder, or the server's address.
    """
    found = [] if policy is None else [_of_policy(policy, place)]
    if robot is None:
        return found, None
    joints, cameras = len(robot.joints), len(robot.cameras)
    found.insert(
        0, ok(AREA, 'robot', f'{robot.name} ({robot.file}), {joints} joints, {cameras} cameras')
    )
    if beyond := beyond_urdf(robot):
        found.append(
            note(
                AREA,
                'urdf',
                f'{robot.urdf} says nothing about {", ".join(beyond)}',
                'the robot file alone limits them: are its limits right?',
            )
        )
    subject = Subject(robot, UnitCheck(robot), robot.cameras, outputs_of(robot))
    if policy is not None:
        try:
            subject = _matched(robot, policy, place)
            found.append(ok(AREA, 'fit', 'names, units, cameras and outputs'))
        except MatchError as error:
            mend = f'mend the named fields; vla_runtime check {robot.file} {place}'
            found += [problem(AREA, 'fit', line, mend) for line in str(error).splitlines()]
    found += [
        note(AREA, 'units', text, f'correct unit or limits in {robot.file} where it is so')
        for text in subject.units.notes()
    ]
    return found, subject


def outputs_of(robot: Robot) -> tuple[MatchedOutput, ...]:
    """Return the outputs of a robot file alone, each with all of its joints."""
    places = {joint.name: at for at, joint in enumerate(robot.joints)}
    return tuple(
        MatchedOutput(
            output,
            columns=tuple(places[name] for name in output.joints),
            message_names=tuple(robot.joint(name).in_commands for name in output.joints),
        )
        for output in robot.outputs
    )


def _of_policy(policy: Bundle | Contract, place: str) -> Finding:
    if isinstance(policy, Bundle):
        try:
            check_contents(policy)
        except BundleError as error:
            return problem(AREA, 'policy', str(error), 'copy or export the bundle again')
    spec = policy.spec
    text = f'{spec.name} ({place}), {1.0 / spec.step_time_s:g} steps a second'
    if isinstance(policy, Contract):
        text += f', {policy.backend} on {policy.device} in {policy.precision}'
    if notes := bundle_notes(spec, policy.statistics):
        return note(AREA, 'policy', '; '.join([text, *notes]))
    return ok(AREA, 'policy', text)


def _matched(robot: Robot, policy: Bundle | Contract, place: str) -> Subject:
    match = match_robot(robot, policy.spec, place)
    trained = trained_ranges(policy.spec, policy.statistics, match)
    cameras = {camera.name: camera for camera in match.cameras.values()}
    return Subject(
        robot,
        UnitCheck(robot, match, trained),
        tuple(cameras.values()),
        match.outputs,
        1.0 / policy.spec.step_time_s,
        trained,
    )
