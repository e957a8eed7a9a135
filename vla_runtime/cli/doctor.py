"""Look at everything between the drivers and the policy, and say what to do about each fault.

Machine: Python, ROS 2, middleware, shared memory, clock, PyTorch, CUDA, TensorRT. Graph: domain,
topics with their types, rates and quality of service, clocks, joints and cameras against the robot
file, controllers, nodes. Policy: does it fit the robot, which backend runs it, engines of another
GPU. Nothing is changed and nothing moves.

`check` reads the same files on any machine, and prints every name and unit. `status` asks the
running nodes why they hold, and disturbs none: the doctor listens to images as a policy node does.

ROS_DOMAIN_ID and ROS_AUTOMATIC_DISCOVERY_RANGE choose the graph, as for the nodes.

examples:
  vla_runtime doctor
  vla_runtime doctor --robot my_robot.yaml
  vla_runtime doctor --robot so101 --bundle engines/pick --namespace /left
  vla_runtime doctor --robot so101 --bundle ws://box:8000
  vla_runtime doctor --robot so101 --json | jq -r '.findings[] | select(.level == "problem").mend'

exit code: 0 where all is well; 1 where something is a problem; 2 where the arguments or a file
cannot be used.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vla_runtime.cli._numbers import seconds
from vla_runtime.cli._server import add_server_arguments, contract_at, is_server

if TYPE_CHECKING:
    from vla_runtime.nodes.doctor.findings import Finding
    from vla_runtime.nodes.doctor.subject import Subject
    from vla_runtime.robot.schema import Robot

_LISTEN_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--robot', metavar='ROBOT', help='robot file, or the name of one of config/robots'
    )
    parser.add_argument(
        '--bundle', metavar='BUNDLE', help='policy bundle that is to drive it, or ws://HOST:PORT'
    )
    parser.add_argument('--namespace', metavar='NS', help="namespace of the robot's nodes")
    parser.add_argument(
        '--seconds',
        type=seconds,
        default=_LISTEN_S,
        metavar='S',
        help='listen to the topics for so long (default: %(default)g)',
    )
    parser.add_argument('--json', action='store_true', help='print everything as JSON')
    add_server_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Return the exit code that the module says."""
    from vla_runtime.bundle.folder import BundleError
    from vla_runtime.files.package_files import share_folder
    from vla_runtime.nodes.doctor.machine import machine_findings
    from vla_runtime.nodes.middleware import lossless_images
    from vla_runtime.robot.file import find_robot, load_robot

    robot = None
    try:
        if arguments.robot is not None:
            robot = load_robot(find_robot(arguments.robot, share_folder() / 'config' / 'robots'))
        files, subject = _of_files(robot, arguments)
    except (BundleError, ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    # As the launch files do for the nodes.
    os.environ.update(lossless_images(os.environ, share_folder() / 'config'))
    found = [*machine_findings(os.environ), *files]
    try:
        if not any(one.what == 'ROS 2' and one.level == 'problem' for one in found):
            found += _of_graph(subject, arguments)
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return _show(found, as_json=arguments.json)


def _of_files(
    robot: Robot | None, arguments: argparse.Namespace
) -> tuple[list[Finding], Subject | None]:
    """Bring the files together, as `check` does; return what is to be looked for in the graph."""
    from vla_runtime.bundle.folder import read_bundle
    from vla_runtime.nodes.doctor.findings import problem
    from vla_runtime.nodes.doctor.policies import engine_findings
    from vla_runtime.nodes.doctor.subject import bring_together
    from vla_runtime.remote.connection import ServerLostError

    place = arguments.bundle
    if place is None:
        return bring_together(robot, None)
    if is_server(place):
        try:
            return bring_together(robot, contract_at(place, arguments), place)
        except ServerLostError as error:
            found, subject = bring_together(robot, None)
            mend = 'start vla_runtime serve there, or mend the address: docs/howto/serve.md'
            return [*found, problem('files', 'server', str(error), mend)], subject
    bundle = read_bundle(Path(place).expanduser(), verify=False)
    found, subject = bring_together(robot, bundle, str(bundle.folder))
    return [*found, *engine_findings(bundle)], subject


def _of_graph(subject: Subject | None, arguments: argparse.Namespace) -> list[Finding]:
    from vla_runtime.files.standard_output import native_output_aside
    from vla_runtime.nodes.doctor.graph import graph_findings
    from vla_runtime.nodes.graph_status import check_domain, full_namespace

    check_domain()
    namespace = full_namespace(arguments.namespace)
    with native_output_aside():
        return graph_findings(subject, namespace or '', arguments.seconds)


def _show(found: list[Finding], *, as_json: bool) -> int:
    from vla_runtime.nodes.doctor.findings import report

    code = 1 if any(one.level == 'problem' for one in found) else 0
    if as_json:
        import json

        document = {'exit_code': code, 'findings': [one.as_json() for one in found]}
        print(json.dumps(document))
    else:
        print('\n'.join(report(found)))
    return code
