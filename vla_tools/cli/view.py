"""Watch a robot on a page: joints, cameras, plan, latency, why it holds; start and stop it.

Without BAG the page shows the robot in the graph that ROS_DOMAIN_ID and
ROS_AUTOMATIC_DISCOVERY_RANGE choose, and its buttons ask the nodes. It is a process of its own that
hears alone: it may hang or die, and the robot's motion does not change.

With BAG the page shows a recording, with a time line.

Beyond this machine (--host) a key is needed: a browser asks for it as the password.

examples:
  vla_runtime view
  vla_runtime view --namespace /left --read-only
  vla_runtime view --urdf my_arm.urdf --port 9000
  vla_runtime view recordings/first
  openssl rand -hex 32 > key.txt
  vla_runtime view --host 0.0.0.0 --key-file key.txt

exit codes: 0 after SIGTERM or Ctrl-C; 2 where there is nothing to show, or an option is wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vla_runtime.cli._numbers import between
from vla_runtime.cli._packages import import_problem

# The demo and the launch files name it too.
VIEW_PORT = 8085
# Longest that a thread keeps the interpreter from a stop; Python's default is 5 ms.
_SWITCH_INTERVAL_S = 0.001
_INSTALL = "./run exec pip install -e '.[view]', or pip install '.[view]' in the source folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        'bag',
        nargs='?',
        type=Path,
        metavar='BAG',
        help='recording to show in place of a robot',
    )
    parser.add_argument(
        '--namespace', metavar='NS', help='of the robot (default: the only one there is)'
    )
    parser.add_argument(
        '--robot', metavar='FILE', help="robot file (default: that of the policy's description)"
    )
    parser.add_argument(
        '--urdf',
        type=Path,
        metavar='FILE',
        help="shape of the robot (default: the robot file's `urdf`, else topic robot_description)",
    )
    parser.add_argument(
        '--tip',
        metavar='LINK',
        help='link whose path is drawn (default: where the chain of commanded joints ends)',
    )
    parser.add_argument(
        '--host', default='127.0.0.1', help='address to listen on (default: %(default)s)'
    )
    parser.add_argument(
        '--port',
        type=between(0, 65535),
        default=VIEW_PORT,
        help='0: any that is free (default: %(default)s)',
    )
    parser.add_argument(
        '--key-file', type=Path, metavar='FILE', help='keys of who may look, one a line'
    )
    parser.add_argument('--read-only', action='store_true', help='no buttons: the page shows alone')


def main(arguments: argparse.Namespace) -> int:
    """Serve the page until a signal."""
    try:
        from vla_tools.serve.listener import address_of, listen
        from vla_tools.serve.security import required_keys
        from vla_tools.view.serving import named_robot, serve_bag, serve_live
        from vla_tools.view.source import ViewOptions

        options = ViewOptions(
            host=arguments.host,
            namespace=arguments.namespace,
            robot=named_robot(arguments.robot),
            urdf=arguments.urdf,
            tip=arguments.tip,
            read_only=arguments.read_only,
            keys=required_keys(arguments.host, arguments.key_file),
        )
        with listen(arguments.host, arguments.port) as listener:
            host, port = address_of(listener)
            address = f'http://[{host}]:{port}' if ':' in host else f'http://{host}:{port}'
            sys.setswitchinterval(_SWITCH_INTERVAL_S)

            def tell() -> None:
                print(f'ready: {address}', flush=True)

            if arguments.bag is None:
                serve_live(options, listener, tell)
            else:
                serve_bag(arguments.bag, options, listener, tell)
    except ImportError as error:
        print(f'error: {import_problem(error, "view", _INSTALL)}', file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0
