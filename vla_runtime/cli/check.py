"""Check a robot file, alone or with a policy bundle, as a launch would, and start nothing.

The robot file is read with its URDF. With a bundle, names, units, cameras, limits and outputs are
brought together, and every conflict is told at once. Topics, drivers and devices are not looked at.

examples:
  vla_runtime check so101
  vla_runtime check my_robot.yaml path/to/bundle

exit code: 0; 2 where a launch would refuse the files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vla_runtime.bundle.folder import Bundle
    from vla_runtime.robot.schema import Robot


# As `ros2 topic list -t` writes them.
_IMAGE_TYPES = {'raw': 'sensor_msgs/msg/Image', 'compressed': 'sensor_msgs/msg/CompressedImage'}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'robot', metavar='ROBOT', help='robot file, or the name of one of config/robots'
    )
    parser.add_argument(
        'bundle', nargs='?', type=Path, metavar='BUNDLE', help='policy bundle that is to drive it'
    )


def main(arguments: argparse.Namespace) -> int:
    from vla_runtime.bundle.folder import BundleError, read_bundle
    from vla_runtime.bundle.summary import line
    from vla_runtime.families.bundle_contents import check_contents
    from vla_runtime.files.package_files import share_folder
    from vla_runtime.robot.file import find_robot, load_robot

    try:
        file = find_robot(arguments.robot, share_folder() / 'config' / 'robots')
        robot = load_robot(file)
        print(line('robot', f'{robot.name} ({file})'))
        for text in _of_robot(robot):
            print(text)
        if arguments.bundle is None:
            for text in _of_units(robot, None):
                print(text)
            return 0
        bundle = read_bundle(arguments.bundle.expanduser())
        check_contents(bundle)
        print(line('policy', f'{bundle.spec.name} ({bundle.folder})'))
        for text in (*_of_both(robot, bundle), *_of_units(robot, bundle)):
            print(text)
    except (BundleError, ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    print('the robot file and the bundle fit')
    return 0


def _of_robot(robot: Robot) -> list[str]:
    from vla_runtime.bundle.summary import line
    from vla_runtime.robot.limits import beyond_urdf

    lines = [line('joints', ', '.join(f'{joint.name} [{joint.unit}]' for joint in robot.joints))]
    lines += [
        line('measured', f'{source.topic} [sensor_msgs/msg/JointState]')
        for source in robot.joint_states
    ]
    lines += [
        line('camera', f'{camera.name}: {camera.topic} [{_IMAGE_TYPES[camera.type]}]')
        for camera in robot.cameras
    ]
    lines += [line('output', f'{output.kind}: {output.topic}') for output in robot.outputs]
    if beyond := beyond_urdf(robot):
        text = f'{robot.urdf} says nothing about {", ".join(beyond)}: the robot file alone limits'
        lines.append(line('note', text))
    return lines


def _of_units(robot: Robot, bundle: Bundle | None) -> list[str]:
    from vla_runtime.bundle.summary import line
    from vla_runtime.robot.match import match_robot
    from vla_runtime.robot.unit_slips import UnitCheck, trained_ranges

    if bundle is None:
        return [line('units', note) for note in UnitCheck(robot).notes()]
    match = match_robot(robot, bundle.spec, bundle.folder)
    trained = trained_ranges(bundle.spec, bundle.statistics, match)
    return [line('units', note) for note in UnitCheck(robot, match, trained).notes()]


def _of_both(robot: Robot, bundle: Bundle) -> list[str]:
    """Match the files; return what becomes of the policy's names on this robot."""
    from vla_runtime.bundle.summary import line
    from vla_runtime.bundle.writer import bundle_notes
    from vla_runtime.robot.match import match_robot

    match = match_robot(robot, bundle.spec, bundle.folder)
    spec = bundle.spec
    pairs = {
        'state': zip(spec.state_names, match.state_joints, strict=True),
        'action': zip(spec.action_names, match.action_names, strict=True),
        'camera': ((name, camera.topic) for name, camera in match.cameras.items()),
    }
    lines = [
        line(what, f'{theirs} -> {ours}') for what, both in pairs.items() for theirs, ours in both
    ]
    rate = f'{1.0 / spec.step_time_s:g} steps a second: control_rate_hz must be that or more'
    notes = bundle_notes(spec, bundle.statistics)
    return [*lines, line('rate', rate), *(line('note', note) for note in notes)]
