"""Measured joints against the robot file: names, units, limits, joints that are swapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from vla_runtime.nodes.doctor.findings import Finding, note, ok, problem
from vla_runtime.nodes.doctor.streams import Stream
from vla_runtime.robot.limits import urdf_limits
from vla_runtime.robot.schema import Robot, RobotLeader
from vla_runtime.robot.unit_slips import Range, UnitCheck

AREA = 'joints'
# Share of a joint's range by which it may lie beside it: end stops are not exact.
_BESIDE, _FAR = 0.02, 0.1
# A controller and its driver differ by the motion of a few milliseconds.
_AGREES = 0.1
_SWAPPED = (
    "mend the names in the driver's configuration, or name and message_name in the robot file; "
    'then move one joint by hand and look (vla_runtime robot joints ROBOT)'
)


def joint_findings(
    robot: Robot,
    streams: Mapping[str, Stream],
    units: UnitCheck,
    trained: Mapping[str, Range],
    feedback: Mapping[str, float],
) -> list[Finding]:
    """Judge the positions that came.

    Args:
        streams: joint states by the robot file's topic.
        units: units of the robot file, with the bundle's where there is one.
        trained: range of each joint in training; empty without a bundle.
        feedback: positions by the joints' names in messages, as controllers measure them.
    """
    measured: dict[str, float] = {}
    missing: list[Finding] = []
    for joint in robot.joints:
        stream = streams[robot.joint_source(joint.name).topic]
        if joint.in_messages in stream.names:
            measured[joint.name] = stream.names[joint.in_messages]
        elif stream.arrivals_s:
            seen = ', '.join(stream.names) or 'none'
            missing.append(
                problem(
                    AREA,
                    joint.name,
                    f"'{joint.in_messages}' is not in {stream.topic} (seen: {seen})",
                    f"mend name or message_name of the joint in {robot.file}, or the driver's",
                )
            )
    if not measured:
        return missing
    found = missing + _swapped_by_feedback(robot, measured, feedback)
    if not found:
        found += _swapped_by_range(robot, measured, trained)
    if not found and (slip := units.why_not_start(measured)):
        found.append(problem(AREA, 'units', slip, f'correct unit and limits in {robot.file}'))
    if not any(one.level == 'problem' for one in found):
        found += _outside(robot, measured)
    if all(value == 0.0 for value in measured.values()):
        found.append(
            note(
                AREA,
                'positions',
                'every joint is at exactly 0',
                'does it stand there? Else the driver has not heard from the robot yet',
            )
        )
    if found:
        return found
    where = ', '.join(f'{name} {value:.3g}' for name, value in measured.items())
    return [ok(AREA, f'{len(measured)} of {len(robot.joints)}', where)]


def leader_findings(robot: Robot, leader: RobotLeader, stream: Stream) -> list[Finding]:
    """Name the joints that the leader should lead and does not say."""
    names = [item.name or robot.joint(item.joint).in_messages for item in leader.joints]
    missing = [name for name in names if name not in stream.names]
    if not missing or not stream.arrivals_s:
        return []
    seen = ', '.join(stream.names) or 'none'
    text = f'{", ".join(missing)} not in {stream.topic} (seen: {seen})'
    return [problem(AREA, 'leader', text, f'mend leader.joints[].name in {robot.file}')]


def _ranges(robot: Robot) -> dict[str, Range]:
    """Return the position limits of the joints that have some, with the URDF's."""
    of_urdf, found = urdf_limits(robot), {}
    for joint in robot.joints:
        if joint.continuous:
            continue
        if joint.lower is not None and joint.upper is not None:
            found[joint.name] = (joint.lower, joint.upper)
        elif joint.name in of_urdf:
            its = of_urdf[joint.name]
            found[joint.name] = (its.lower, its.upper)
    return found


def _fits(value: float, where: Range, share: float = _BESIDE) -> bool:
    low, high = where
    return low - share * (high - low) <= value <= high + share * (high - low)


def _swapped_by_feedback(
    robot: Robot, measured: Mapping[str, float], feedback: Mapping[str, float]
) -> list[Finding]:
    """Compare with what a controller measures of the same joints."""
    known = {
        joint.name: feedback[joint.in_messages]
        for joint in robot.joints
        if joint.in_messages in feedback and joint.name in measured
    }
    found = []
    for first, second in combinations(known, 2):
        straight = max(abs(measured[one] - known[one]) for one in (first, second))
        crossed = max(
            abs(measured[one] - known[other]) for one, other in ((first, second), (second, first))
        )
        if straight > _AGREES > crossed:
            found.append(
                _swap(
                    first,
                    second,
                    measured,
                    f'their controller has {known[first]:.3g} and {known[second]:.3g}',
                )
            )
    return found


def _swapped_by_range(
    robot: Robot, measured: Mapping[str, float], trained: Mapping[str, Range]
) -> list[Finding]:
    """Find two joints that are where they cannot be, and both could be if they are swapped.

    No joint is far beyond its limits. Beyond where it was in training it may be: there it takes
    both.
    """
    limits = _ranges(robot)
    for source, ranges, least in (('limits', limits, 1), ('range in training', trained, 2)):
        known = [name for name in measured if name in ranges]
        out = {name for name in known if not _fits(measured[name], ranges[name], _FAR)}
        pairs = [
            pair
            for pair in combinations(known, 2)
            if len(out & {*pair}) >= least
            and out <= {*pair}
            and _fits(measured[pair[0]], ranges[pair[1]])
            and _fits(measured[pair[1]], ranges[pair[0]])
        ]
        if pairs:
            how = f'{" and ".join(sorted(out))} outside of the {source}, inside if swapped'
            if len(pairs) > 1:
                how += f' ({", ".join(" with ".join(pair) for pair in pairs)})'
            return [_swap(*pairs[0], measured, how)]
    return []


def _swap(first: str, second: str, measured: Mapping[str, float], how: str) -> Finding:
    where = f'at {measured[first]:.3g} and {measured[second]:.3g}'
    return problem(AREA, f'{first}, {second}', f'swapped? {where}: {how}', _SWAPPED)


def _outside(robot: Robot, measured: Mapping[str, float]) -> Sequence[Finding]:
    return [
        note(
            AREA,
            name,
            f'at {measured[name]:.3g}, outside of {low:g} to {high:g}',
            'the executor brings it back inside at its approach speed; are unit and limits right?',
        )
        for name, (low, high) in _ranges(robot).items()
        if name in measured and not _fits(measured[name], (low, high))
    ]
