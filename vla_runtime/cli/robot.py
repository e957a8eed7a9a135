"""Write a robot file from the running graph, check its joints by hand, measure a gripper.

`new` writes a draft from what the graph shows: joint states, URDF, cameras, controllers, and how
far a hand moves each joint. Every guess is marked; nothing is commanded.

`joints` asks for each joint of a robot file to be moved by hand, and says which one moved.

`gripper` reads a gripper's position closed and open: `zero` and `one` of the robot file.

The drivers are on, and the motors without torque where a hand is to move them.

examples:
  vla_runtime robot new --out my_robot.yaml
  vla_runtime robot new --out my_robot.yaml --no-hand
  vla_runtime robot joints my_robot.yaml
  vla_runtime robot gripper my_robot.yaml --joint gripper

exit code: 0; 1 where a joint is not the one that was to be moved, nothing moved, or joints were not
looked at; 2 where the graph or a file cannot be used.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vla_runtime.cli._files import output_file
from vla_runtime.cli._numbers import seconds

if TYPE_CHECKING:
    from vla_runtime.nodes.doctor.streams import Stream
    from vla_runtime.robot.schema import Robot, RobotJoint

# A joint that a hand moved goes at least so far, and another one no further than this share of it.
_LEAST = 0.02
_READS_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title='what', metavar='WHAT', required=True)
    new = verbs.add_parser('new', help='write a draft of a robot file from the running graph')
    new.add_argument(
        '--out', type=output_file, required=True, metavar='FILE', help='robot file to write'
    )
    new.add_argument('--name', metavar='NAME', help="robot's name (default: that of the file)")
    new.add_argument('--force', action='store_true', help='replace it, and the URDF beside it')
    new.add_argument('--no-hand', action='store_true', help='do not ask for joints to be moved')
    new.set_defaults(what=_new)
    joints = verbs.add_parser('joints', help='move each joint by hand, and see which one it is')
    gripper = verbs.add_parser('gripper', help="measure a gripper's zero and one")
    for one, call in ((joints, _joints), (gripper, _gripper)):
        one.add_argument(
            'robot', metavar='ROBOT', help='robot file, or the name of one of config/robots'
        )
        one.set_defaults(what=call)
    gripper.add_argument(
        '--joint', metavar='NAME', help='which joint (default: the one that grips)'
    )
    gripper.add_argument(
        '--zero',
        choices=['closed', 'open'],
        default='closed',
        help='end that the policy calls 0 (default: %(default)s, as LeRobot and ALOHA do)',
    )
    for one in (new, joints, gripper):
        one.add_argument('--namespace', metavar='NS', help="namespace of the robot's nodes")
        one.add_argument(
            '--seconds',
            type=seconds,
            default=3.0,
            metavar='S',
            help='look at the graph for so long (default: %(default)g)',
        )


def main(arguments: argparse.Namespace) -> int:
    try:
        return int(arguments.what(arguments))
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2


# A new robot file.


def _new(arguments: argparse.Namespace) -> int:
    from vla_runtime.files.atomic_write import write_text
    from vla_runtime.nodes.doctor.graph import joined
    from vla_runtime.nodes.robot_survey import RobotSurvey, spun
    from vla_runtime.robot.draft import MARK, write_draft
    from vla_runtime.robot.file import load_robot

    out: Path = arguments.out
    # The graph's URDF is written beside it.
    urdf = out.with_suffix('.urdf')
    for file in (out, urdf):
        if file.exists() and not arguments.force:
            mend = 'name another file, or replace what is there with --force'
            raise ValueError(f'--out {out}: {file} is there; {mend}')
    print('looking at the graph ...', flush=True)
    with joined(_namespace(arguments)) as node, spun(node):
        survey = RobotSurvey(node)
        survey.listen(arguments.seconds)
        for stream in survey.joint_streams:
            stream.spans.clear()
        if not arguments.no_hand and any(stream.names for stream in survey.joint_streams):
            names = [name for stream in survey.joint_streams for name in stream.names]
            _ask_each(names, survey.joint_streams, str)
        seen = survey.result()
    name = arguments.name or out.stem
    text = write_draft(
        name, seen, urdf.name if seen.urdf else '', shlex.join(['vla_runtime', *sys.argv[1:]])
    )
    if seen.urdf:
        write_text(urdf, seen.urdf)
    write_text(out, text)
    print(
        f'{out}: {len(seen.joints)} joints, {len(seen.cameras)} cameras, {len(seen.outputs)} '
        f'outputs{f", {urdf}" if seen.urdf else ", no URDF"}; {text.count(MARK) - 1} guesses to '
        'look at'
    )
    try:
        load_robot(out)
    except ValueError as error:
        print(f'  to be mended first: {error}')
    print(f'  then: vla_runtime check {out}; vla_runtime doctor --robot {out}')
    return 0


def _ask_each(
    names: Sequence[str], streams: Sequence[Stream], called: Callable[[str], str]
) -> tuple[list[str], list[str]]:
    """Ask for each joint to be moved by hand.

    Return the names of those for which another one or nothing moved, and of those that nobody was
    asked for any more.

    Args:
        names: as in messages.
        called: name for the person.
    """
    print('Take the torque off. Move each joint to both of its ends by hand, then press Enter.')
    print('An empty answer goes on, s skips the joint, q ends this.')
    wrong: list[str] = []
    left = list(names)
    kept: dict[str, tuple[float, float]] = {}
    for name in names:
        for stream in streams:
            stream.spans.clear()
        answer = _answer(f"  move '{called(name)}': ")
        if answer in (None, 'q'):
            break
        left.remove(name)
        if answer == 's':
            continue
        spans = {joint: span for stream in streams for joint, span in stream.spans.items()}
        ways = {joint: high - low for joint, (low, high) in spans.items()}
        most = max(ways, key=lambda joint: ways[joint], default='')
        if not most or ways[most] < _LEAST:
            print('    nothing moved')
            wrong.append(name)
            continue
        low, high = spans[most]
        if most != name:
            print(f"    PROBLEM: '{most}' moved, {low:.3g} to {high:.3g}: are the names swapped?")
            wrong.append(name)
        else:
            print(f'    moved from {low:.3g} to {high:.3g}')
        kept[most] = spans[most]
    for stream in streams:
        stream.spans.clear()
        stream.spans.update({name: span for name, span in kept.items() if name in stream.names})
    return wrong, left


def _answer(question: str) -> str | None:
    """Return what the person types; None where nobody does."""
    try:
        return input(question).strip().lower()
    except EOFError:
        print()
        return None


# A robot file that is there.


def _joints(arguments: argparse.Namespace) -> int:
    from vla_runtime.nodes.doctor.graph import joined
    from vla_runtime.nodes.robot_survey import spun

    robot = _robot(arguments)
    with joined(_namespace(arguments)) as node, spun(node):
        streams = _listen(node, robot, arguments.seconds)
        names = {joint.in_messages: joint.name for joint in robot.joints}
        wrong, left = _ask_each(list(names), streams, lambda name: names[name])
    for what, found in (('to look at', wrong), ('not looked at', left)):
        if found:
            print(f'{what}: {", ".join(names[name] for name in found)}')
    return 1 if wrong or left else 0


def _gripper(arguments: argparse.Namespace) -> int:
    import time

    from vla_runtime.nodes.doctor.graph import joined
    from vla_runtime.nodes.robot_survey import spun

    robot = _robot(arguments)
    joint = _gripping(robot, arguments.joint)
    topic = robot.joint_source(joint.name).topic
    ends: dict[str, float] = {}
    with joined(_namespace(arguments)) as node, spun(node):
        (stream,) = [
            one for one in _listen(node, robot, arguments.seconds) if one.source.topic == topic
        ]
        if joint.in_messages not in stream.names:
            seen = ', '.join(stream.names) or 'none'
            raise ValueError(f"'{joint.in_messages}' is not in {stream.topic} (seen: {seen})")
        for end, how in (('closed', 'Close the gripper fully'), ('open', 'Open it fully')):
            if _answer(f'{how}, by hand or with its driver, then press Enter: ') is None:
                raise ValueError('nobody answers: run it in a terminal')
            stream.spans.clear()
            time.sleep(_READS_S)
            if joint.in_messages not in stream.spans:
                raise ValueError(f'{stream.topic}: joint states have stopped coming')
            ends[end] = sum(stream.spans[joint.in_messages]) / 2.0
            print(f'  {end}: {ends[end]:.5g} {joint.unit}')
    if abs(ends['open'] - ends['closed']) < 1e-4:
        print(f"'{joint.name}' did not move between the two: is it the gripper's joint?")
        return 1
    zero, one = ('closed', 'open') if arguments.zero == 'closed' else ('open', 'closed')
    print(f"write under '{joint.name}' of {robot.file}:")
    print(f'    zero: {ends[zero]:.5g}\n    one: {ends[one]:.5g}')
    return 0


def _gripping(robot: Robot, named: str | None) -> RobotJoint:
    """Return the joint that is meant; ValueError names those that there are."""
    joints = [joint for joint in robot.joints if named in (joint.name, None)]
    gripping = [joint for joint in joints if joint.grips] if named is None else joints
    if len(gripping) == 1:
        return gripping[0]
    names = ', '.join(joint.name for joint in gripping or robot.joints)
    if named is not None:
        raise ValueError(f"--joint '{named}' is not in {robot.file} (it has {names})")
    what = 'several joints grip' if gripping else 'no joint has grips: true'
    raise ValueError(f'{robot.file}: {what}; name one with --joint ({names})')


def _robot(arguments: argparse.Namespace) -> Robot:
    from vla_runtime.files.package_files import share_folder
    from vla_runtime.robot.file import find_robot, load_robot

    return load_robot(find_robot(arguments.robot, share_folder() / 'config' / 'robots'))


def _namespace(arguments: argparse.Namespace) -> str:
    from vla_runtime.nodes.graph_status import check_domain, full_namespace

    check_domain()
    return full_namespace(arguments.namespace) or ''


def _listen(node: object, robot: Robot, patience_s: float) -> list[Stream]:
    """Listen to the robot's joint states until each topic has some (ValueError: none come)."""
    import time

    from vla_runtime.nodes.doctor.streams import Streams

    streams = Streams(node)  # type: ignore[arg-type]
    for source in robot.joint_states:
        streams.listen(source)
    end_s = time.monotonic() + 3.5 + patience_s
    while time.monotonic() < end_s and not all(one.names for one in streams.all):
        time.sleep(0.05)
    if silent := [one.topic for one in streams.all if not one.names]:
        raise ValueError(
            f'no joint states come on {", ".join(silent)}: vla_runtime doctor --robot '
            f'{robot.file} says why'
        )
    return streams.all
