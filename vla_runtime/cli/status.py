"""Say in five seconds whether the robot moves, and if it does not, why.

The nodes in the graph are heard, and nothing is changed: what each says, the reason of a hold or a
stop, what ~/start would answer now, how old the data are, and the page that says what to do.

ROS_DOMAIN_ID and ROS_AUTOMATIC_DISCOVERY_RANGE choose the graph, as for the nodes.

examples:
  vla_runtime status
  vla_runtime status --watch
  vla_runtime status --namespace /left
  vla_runtime status --json | jq -r '.robots[].why'

exit code: 0 where every robot moves or is ready for ~/start; 1 where something is wrong, or a robot
is held, or no policy node answers, or a node is not active; 2 where none of these nodes is in the
graph. Warnings of one camera, such as a picture that repeats, are printed and do not change it.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_runtime.nodes.graph_status import GraphStatus
    from vla_runtime.nodes.robot_report import RobotReport

_WATCH_PERIOD_S = 1.0
_CLEAR = '\033[2J\033[H'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--namespace', metavar='NS', help='look at the robot in this one alone')
    parser.add_argument('--json', action='store_true', help='print everything as JSON')
    parser.add_argument(
        '--watch', action='store_true', help='look again every second, until Ctrl-C'
    )


def main(arguments: argparse.Namespace) -> int:
    """Return the exit code that the module says."""
    from vla_runtime.nodes.graph_status import full_namespace, joined
    from vla_runtime.nodes.robot_report import exit_code

    robots: list[RobotReport] = []
    try:
        namespace = full_namespace(arguments.namespace)
        with joined() as graph:
            robots = graph.wait(namespace)
            _show(robots, graph, as_json=arguments.json)
            while arguments.watch:
                time.sleep(_WATCH_PERIOD_S)
                robots = graph.look(namespace)
                if sys.stdout.isatty():
                    print(_CLEAR, end='')
                _show(robots, graph, as_json=arguments.json)
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if not arguments.watch:
            raise
    return exit_code(robots)


def _show(robots: list[RobotReport], graph: GraphStatus, *, as_json: bool) -> None:
    from vla_runtime.nodes.graph_status import where
    from vla_runtime.nodes.robot_report import exit_code

    now_s = time.monotonic()
    if as_json:
        import json

        document: dict[str, Any] = {
            'graph': where(),
            'exit_code': exit_code(robots),
            'namespaces': graph.namespaces(),
            'robots': [robot.as_json(now_s) for robot in robots],
        }
        print(json.dumps(document), flush=True)
        return
    if not robots and (others := graph.namespaces()):
        print(f'no node of vla_runtime is in this namespace, but in {", ".join(others)}')
    elif not robots:
        print(
            f'no node of vla_runtime is in this graph ({where()}).\n'
            '  Is it launched, in a shell with the same two variables? On the same network, if it '
            'runs on another computer?\n'
            '  what to do: docs/howto/why_stopped.md#nothing-in-the-graph'
        )
    for robot in robots:
        print('\n'.join(robot.lines(now_s)))
    sys.stdout.flush()
