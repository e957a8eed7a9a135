"""Check a robot file, alone or with a policy bundle, as a launch would, and start nothing.

The robot file is read with its URDF. With a bundle, names, units, cameras, limits and outputs are
brought together, and every conflict is told at once. Topics, drivers and devices are not looked at.
The policy may be one on a server.

examples:
  vla_runtime check so101
  vla_runtime check my_robot.yaml path/to/bundle
  vla_runtime check my_robot.yaml ws://box:8000

exit code: 0; 2 where a launch would refuse the files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vla_runtime.cli._server import add_server_arguments, contract_at, is_server

if TYPE_CHECKING:
    from vla_runtime.bundle.folder import Bundle
    from vla_runtime.remote.contract import Contract
    from vla_runtime.robot.schema import Robot


# As `ros2 topic list -t` writes them.
_JOINT_STATE = 'sensor_msgs/msg/JointState'
_IMAGE_TYPES = {'raw': 'sensor_msgs/msg/Image', 'compressed': 'sensor_msgs/msg/CompressedImage'}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'robot', metavar='ROBOT', help='robot file, or the name of one of config/robots'
    )
    parser.add_argument(
        'bundle',
        nargs='?',
        metavar='BUNDLE',
        help='policy bundle that is to drive it, or ws://HOST:PORT',
    )
    add_server_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    from vla_runtime.bundle.folder import BundleError, read_bundle
    from vla_runtime.bundle.summary import line
    from vla_runtime.files.package_files import share_folder
    from vla_runtime.models.shapes.bundle_contents import check_contents
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
        place = arguments.bundle
        if is_server(place):
            policy: Bundle | Contract = contract_at(place, arguments)
        else:
            policy = bundle = read_bundle(Path(place).expanduser())
            check_contents(bundle)
            place = str(bundle.folder)
        print(line('policy', f'{policy.spec.name} ({place})'))
        for text in (*_of_both(robot, policy, place), *_of_units(robot, policy, place)):
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
    lines += [line('measured', f'{source.topic} [{_JOINT_STATE}]') for source in robot.joint_states]
    lines += [
        line('camera', f'{camera.name}: {camera.topic} [{_IMAGE_TYPES[camera.type]}]')
        for camera in robot.cameras
    ]
    lines += [line('output', f'{output.kind}: {output.topic}') for output in robot.outputs]
    if robot.leader is not None:
        joints = ', '.join(item.joint for item in robot.leader.joints)
        text = f'{robot.leader.topic} [{_JOINT_STATE}] leads {joints} ({robot.leader.mode})'
        lines.append(line('leader', text))
    if beyond := beyond_urdf(robot):
        text = f'{robot.urdf} says nothing about {", ".join(beyond)}: the robot file alone limits'
        lines.append(line('note', text))
    return lines


def _of_units(robot: Robot, policy: Bundle | Contract | None, place: str = '') -> list[str]:
    from vla_runtime.bundle.summary import line
    from vla_runtime.robot.match import match_robot
    from vla_runtime.robot.unit_slips import UnitCheck, trained_ranges

    if policy is None:
        return [line('units', note) for note in UnitCheck(robot).notes()]
    match = match_robot(robot, policy.spec, place)
    trained = trained_ranges(policy.spec, policy.statistics, match)
    return [line('units', note) for note in UnitCheck(robot, match, trained).notes()]


def _of_both(robot: Robot, policy: Bundle | Contract, place: str) -> list[str]:
    """Match the files; return what becomes of the policy's names on this robot."""
    from vla_runtime.bundle.summary import line
    from vla_runtime.bundle.writer import bundle_notes
    from vla_runtime.robot.match import match_robot

    match = match_robot(robot, policy.spec, place)
    spec = policy.spec
    pairs = {
        'state': zip(spec.state_names, match.state_joints, strict=True),
        'action': zip(spec.action_names, match.action_names, strict=True),
        'camera': ((name, camera.topic) for name, camera in match.cameras.items()),
    }
    lines = [
        line(what, f'{theirs} -> {ours}') for what, both in pairs.items() for theirs, ours in both
    ]
    rate = f'{1.0 / spec.step_time_s:g} steps a second: control_rate_hz must be that or more'
    notes = bundle_notes(spec, policy.statistics)
    return [*lines, line('rate', rate), *(line('note', note) for note in notes)]
