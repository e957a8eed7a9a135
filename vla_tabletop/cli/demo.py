"""Drive the simulated tabletop robot with a policy, in closed loop, and report on it.

Starts policy_node, executor_node and tabletop_node as on a real robot, gives one instruction after
the other, and writes a folder: bag/ (rosbag2, MCAP), parameters.yaml, log/ and report.html.
Ctrl-C ends it at any time, with the report written; so do SIGTERM and SIGHUP.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from vla_runtime.cli._files import bundle_folder, make_folder, output_folder
from vla_runtime.cli._numbers import MOST_SEED, at_least, between
from vla_runtime.cli._packages import import_problem
from vla_runtime.cli._server import add_server_arguments, is_server, server_at
from vla_runtime.files.atomic_write import WriteError
from vla_runtime.processes.interrupt import Interrupt, interruptible
from vla_runtime.recording.bag_writer import Reserve
from vla_tabletop.demo.console import say
from vla_tools.cli.view import VIEW_PORT

if TYPE_CHECKING:
    from vla_tabletop.demo.options import DemoOptions
    from vla_tabletop.demo.session import DemoResult

# Images of every instruction, and the curves of an hour.
_REPORT_BYTES = 16 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument('--seconds', type=float, default=30.0, help='closed loop (default: 30)')
    parser.add_argument(
        '--out', type=output_folder, metavar='DIR', help='new folder (default: demo_runs/DATE_TIME)'
    )
    parser.add_argument(
        '--bundle',
        metavar='DIR',
        help="policy bundle (default: the demo's), or ws://HOST:PORT of a server that has it "
        '(vla_runtime serve)',
    )
    parser.add_argument('--robot', default='tabletop', help='robot file (default: tabletop)')
    parser.add_argument(
        '--backend',
        help='runs the networks: torch or onnxruntime on the CPU (ONNX files that the bundle lacks '
        'are exported once, to $XDG_CACHE_HOME/vla_runtime or ~/.cache/vla_runtime), or tensorrt '
        "on the GPU, with engines that 'vla_runtime build' made; auto: the first in order that "
        'can run the bundle on this CPU (default: torch)',
    )
    parser.add_argument(
        '--replan-interval',
        type=at_least(1),
        metavar='S',
        help='steps (default: as config/executor.yaml)',
    )
    parser.add_argument('--cfg-beta', type=float, metavar='B', help='guide with this scale')
    parser.add_argument(
        '--seed', type=between(0, MOST_SEED), default=0, help='of scenes and instructions'
    )
    parser.add_argument('--namespace', default='', help='of all nodes (default: none)')
    parser.add_argument(
        '--record',
        nargs='?',
        type=output_folder,
        const=True,
        metavar='DIR',
        help='keep every frame that an inference used, so that the bag can be replayed '
        '(vla_runtime replay); the bag goes to DIR (default: bag in --out)',
    )
    group = add_server_arguments(parser)
    group.add_argument(
        '--jpeg-quality',
        type=between(0, 100),
        default=0,
        metavar='Q',
        help='of the images on their way to the server (default: 0, raw)',
    )
    parser.add_argument(
        '--view',
        nargs='?',
        type=between(1, 65535),
        const=VIEW_PORT,
        metavar='PORT',
        help=f'show it on a page, http://127.0.0.1:PORT (default: {VIEW_PORT})',
    )


def main(arguments: argparse.Namespace) -> int:
    """Run it; 0 after the time or Ctrl-C, 1 when something ended it, 2 for unusable arguments."""
    # Until the end: another Ctrl-C must cost neither the hold nor the report.
    with interruptible() as interrupt:
        return _run(arguments, interrupt)


def _run(arguments: argparse.Namespace, interrupt: Interrupt) -> int:
    from vla_runtime.engines.preflight import require_packages
    from vla_tabletop.demo.options import check_options

    try:
        _prepare_environment()
        options = _options(arguments)
        check_options(options)
        # The nodes may be started elsewhere.
        options = replace(
            options,
            bundle=options.bundle.resolve(),
            key_file=options.key_file and options.key_file.expanduser().resolve(),
            ca_file=options.ca_file and options.ca_file.expanduser().resolve(),
        )
        require_packages('rclpy', 'mujoco', 'rosbags', 'matplotlib')
        if options.view_port is not None:
            require_packages('viser', 'yourdfpy')
        make_folder(options.out, '--out')

        import vla_tabletop.sim.gl  # noqa: F401  (whether the simulated cameras can be rendered)
        from vla_tabletop.demo.session import run_session

        options = _with_networks(options)
        with Reserve(options.out, _REPORT_BYTES, 'the report'):
            result = run_session(options, interrupt, say)
    except ImportError as error:
        how = (
            "./run demo brings everything, or: pip install '.[torch,sim,report]' in the source "
            'folder and a sourced ROS 2'
        )
        say(f'error: {import_problem(error, "the demo", how)}', stream=sys.stderr)
        return 2
    except OSError as error:
        what = f'{error.filename}: {error.strerror}' if error.filename else error
        say(f'error: {what}', stream=sys.stderr)
        return 2
    except ValueError as error:
        say(f'error: {error}', stream=sys.stderr)
        return 2
    say('writing the report ...')
    problems = [*result.unwritten, *filter(None, [result.failure])]
    if not (problems or interrupt.how or result.telemetry.inferences):
        log = options.out / 'log' / 'policy.log'
        problems.append(f'the policy sent no chunk; {log} says why')
    try:
        _report(options, result, interrupt.how)
    except WriteError as error:
        problems.append(str(error))
    for problem in problems:
        say(f'error: {problem}', stream=sys.stderr)
    return 1 if problems else 0


def _options(arguments: argparse.Namespace) -> DemoOptions:
    from vla_tabletop.demo.options import DemoOptions

    out: Path = arguments.out or Path('demo_runs') / datetime.now().strftime('%Y-%m-%d_%H%M%S')
    place: str | None = arguments.bundle
    served = place is not None and is_server(place)
    if served and arguments.backend is not None:
        raise ValueError('--backend: the server decides what runs its policy; leave it out')
    return DemoOptions(
        seconds=arguments.seconds,
        out=out,
        bundle=bundle_folder(None if served or place is None else Path(place)),
        server=server_at(place, arguments) if served and place is not None else None,
        key_file=arguments.key_file,
        ca_file=arguments.ca_file,
        jpeg_quality=arguments.jpeg_quality,
        robot=arguments.robot,
        backend=arguments.backend or 'torch',
        replan_interval=arguments.replan_interval,
        cfg_beta=arguments.cfg_beta,
        seed=arguments.seed,
        namespace=arguments.namespace.strip('/'),
        record=arguments.record is not None,
        view_port=arguments.view,
        record_to=arguments.record if isinstance(arguments.record, Path) else None,
    )


def _with_networks(options: DemoOptions) -> DemoOptions:
    """Return options whose bundle has the files of its backend; make missing ones."""
    if options.backend != 'onnxruntime' or options.server is not None:
        return options
    from vla_convert.export.onnx.bundle import bundle_with_onnx
    from vla_runtime.files.cache_folder import cache_folder

    return replace(options, bundle=bundle_with_onnx(options.bundle, cache_folder(), tell=say))


def _prepare_environment() -> None:
    """Set what the launch files set, unless the user has: lossless images, this machine only."""
    from vla_runtime.files.package_files import share_folder
    from vla_runtime.nodes.middleware import lossless_images, stay_on_this_machine

    os.environ.update(lossless_images(os.environ, share_folder() / 'config'))
    # A simulated robot is nobody else's business on the network.
    stay_on_this_machine(os.environ)


def _report(options: DemoOptions, result: DemoResult, ended: str) -> None:
    from vla_tabletop.demo.report import write_report

    telemetry = result.telemetry
    facts = {
        'bundle': options.bundle.name if options.server is None else options.server.url,
        'robot': options.robot,
        'backend': options.backend,
        'seed': str(options.seed),
        'closed loop': f'{result.seconds:.1f} s' + (f', {ended}' if ended else ''),
        'machine': f'{platform.machine()}, {os.cpu_count()} CPUs, Python '
        f'{platform.python_version()}',
        'date': datetime.now().strftime('%Y-%m-%d %H:%M'),
    }
    path = options.out / 'report.html'
    write_report(
        path,
        telemetry,
        result.parameters,
        facts,
        result.joint_units,
        result.failure,
        images=options.images,
    )
    say(telemetry.score)
    say(f'chunks: {telemetry.chunks}')
    say(f'report: {path}')
    if options.record:
        say(f'recording: {options.bag} (vla_runtime replay {options.bag})')
