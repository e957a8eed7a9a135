"""Run the inferences of recordings again and compare the chunks with those that were published.

Nothing changed, on the machine that recorded: every chunk is the same, bit for bit. With another
bundle, backend or setting it is a what-if, and the differences are given by joint and by step.

examples:
  vla_runtime replay recordings/first
  vla_runtime replay recordings/first --set cfg_beta=1.5
  vla_runtime replay recordings/first --backend onnxruntime --json result.json
  vla_runtime replay recordings/first --page replay.html
  vla_runtime replay recordings/first --rerun replay.rrd
  vla_runtime replay recordings/first --live --rate 2
  vla_runtime replay recordings/first --bundle path/to/another
  vla_runtime replay any_bag --open-loop --bundle path/to/bundle --robot so101 \\
      --instruction 'pick up the cup'

  vla_runtime replay recordings --out results
  vla_runtime replay recordings --out results --ray auto

exit code: 0; 1 where nothing was changed and a chunk differs all the same, or where live and
offline differ; 2 for what cannot be used, be it one recording of many (the others are replayed all
the same), and where not one chunk could be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from vla_runtime.cli._files import make_folder, output_file, output_folder
from vla_runtime.cli._numbers import MOST_PROCESSES, at_least, between
from vla_runtime.cli._packages import import_problem
from vla_runtime.engines.preflight import BACKENDS, PRECISIONS, require_packages
from vla_tools.cli._ray import add_ray_argument, ray_pool

if TYPE_CHECKING:
    from vla_runtime.processes.workers import Pool
    from vla_tools.cli._live import LiveResult
    from vla_tools.replay.open_loop_run import OpenLoopResult
    from vla_tools.replay.page import ReplayPage
    from vla_tools.replay.recorded import RecordedRun
    from vla_tools.replay.rerun import ReplayedInference
    from vla_tools.replay.rerun_log import RerunLog
    from vla_tools.replay.setup import Changes
    from vla_tools.replay.summary import ReplaySummary
    from vla_tools.replay.units import Json, Unit

    # Episode, number and stamp to the inference.
    Offline = dict[tuple[int, int, int], ReplayedInference]

_EVERY_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        'recordings',
        nargs='+',
        type=Path,
        metavar='BAG',
        help='recording: a folder, or its file; or a folder of recordings',
    )
    _add_changes(parser)
    parser.add_argument(
        '--node', metavar='NAME', help='full name of the policy node, where several were recorded'
    )
    _add_open_loop(parser)
    parser.add_argument(
        '--live',
        action='store_true',
        help='play it through a real policy node as well, on simulated time and a ROS domain of '
        'its own',
    )
    parser.add_argument(
        '--rate',
        type=float,
        metavar='R',
        help='--live: times as fast as recorded (default: as fast as the node answers)',
    )
    parser.add_argument(
        '--page',
        type=output_file,
        metavar='FILE',
        help='write an HTML page: chunks over the images that they saw, latency, holds, hand-overs',
    )
    parser.add_argument(
        '--rerun',
        type=_rerun_target,
        metavar='FILE',
        help='write it for the Rerun viewer, FILE.rrd, or send it to one: rerun+http://HOST:PORT/'
        'proxy (needs rerun-sdk)',
    )
    parser.add_argument(
        '--out',
        type=output_folder,
        metavar='DIR',
        help='several recordings: folder of their results, where the same command goes on after an '
        'interruption (default: replay_results)',
    )
    parser.add_argument(
        '--workers',
        type=between(1, MOST_PROCESSES),
        metavar='N',
        help='several recordings: processes (default: one a core)',
    )
    add_ray_argument(parser, 'recordings')
    parser.add_argument(
        '--json',
        type=output_file,
        metavar='FILE',
        help='write the result there (-: standard output)',
    )


def _add_changes(parser: argparse.ArgumentParser) -> None:
    """Declare the options that make a replay differ from the recording; `_changes` reads them."""
    parser.add_argument(
        '--bundle', type=Path, metavar='DIR', help='policy bundle (default: the recorded one)'
    )
    parser.add_argument(
        '--backend', choices=BACKENDS, help='runs the networks (default: the recorded one)'
    )
    parser.add_argument('--device', help='cpu, cuda or cuda:N (default: the recorded one)')
    parser.add_argument(
        '--precision',
        choices=PRECISIONS,
        help="number format of the networks' large matrices (default: the recorded one)",
    )
    parser.add_argument(
        '--threads',
        type=at_least(1),
        metavar='N',
        help='CPU threads (default: as recorded; others change the last bits)',
    )
    parser.add_argument(
        '--set',
        action='append',
        default=[],
        metavar='NAME=VALUE',
        help="setting of every inference, by the policy node's parameter; may be repeated",
    )


def _add_open_loop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--open-loop',
        action='store_true',
        help='predict along any bag that has the cameras and joints of a robot file, and compare '
        'with the motion that followed',
    )
    parser.add_argument(
        '--robot', metavar='FILE', help='--open-loop: robot file (default: the recorded one)'
    )
    parser.add_argument(
        '--namespace',
        metavar='NS',
        help='--open-loop: of the robot, in a bag of several (default: the only one)',
    )
    parser.add_argument(
        '--instruction', metavar='TEXT', help='--open-loop: the task (default: as recorded)'
    )
    parser.add_argument(
        '--every',
        type=float,
        metavar='S',
        help=f'--open-loop: seconds between two predictions (default: {_EVERY_S:g})',
    )


def main(arguments: argparse.Namespace) -> int:
    """Replay; see the module for the exit code."""
    try:
        require_packages('rosbags')
        from vla_runtime.recording.bag_reader import find_recordings
        from vla_tools.replay.batch import write_summary

        changes = _changes(arguments)
        recordings = find_recordings(arguments.recordings)
        several = len(recordings) > 1 or arguments.ray is not None or arguments.out is not None
        _check_together(arguments, several)
        if several:
            results = _several(recordings, changes, arguments)
        else:
            results = [_one(recordings[0], changes, arguments)]
        if arguments.json:
            write_summary(arguments.json, results)
    except ImportError as error:
        print(f'error: {import_problem(error, "replay", "pip install rosbags")}', file=sys.stderr)
        return 2
    except (ValueError, OSError, RuntimeError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    if any(result['is_broken'] for result in results):
        return 1
    if not any(result.get('compared') or result.get('predictions') for result in results):
        was_run = any(result.get('replayed') for result in results)
        what = 'recorded chunk could be compared' if was_run else 'inference could be run again'
        print(f'error: not one {what}', file=sys.stderr)
        return 2
    failed = sum(_compared_nothing(result) for result in results)
    if failed:
        print(f'error: {failed} of {len(results)} recordings cannot be used', file=sys.stderr)
    return 2 if failed else 0


def _compared_nothing(result: Json) -> bool:
    return 'error' in result or (result.get('inferences', 0) > 0 and not result['compared'])


def _check_together(arguments: argparse.Namespace, several: bool) -> None:
    """Refuse options that do not go together, or would have no effect."""
    if arguments.live and (arguments.open_loop or several):
        raise ValueError(
            '--live plays one recording here: not several, no --open-loop, --ray or --out'
        )
    for option, value in (('--page', arguments.page), ('--rerun', arguments.rerun)):
        if value and (arguments.open_loop or several):
            raise ValueError(
                f'{option} shows the replay of one recording here: not several, no --open-loop, '
                '--ray or --out'
            )
    if arguments.page and arguments.page == arguments.json:
        raise ValueError(f'--page and --json are both {arguments.page}: name two files')
    for option, value in (
        ('--robot', arguments.robot),
        ('--instruction', arguments.instruction),
        ('--every', arguments.every),
        ('--namespace', arguments.namespace),
    ):
        if value is not None and not arguments.open_loop:
            raise ValueError(f'{option} is for --open-loop: a replay takes what was recorded')
    if arguments.open_loop and arguments.node:
        raise ValueError(
            '--node is not for --open-loop, which runs no recorded inference; see --namespace'
        )
    if arguments.workers is not None and not several:
        raise ValueError('--workers is for several recordings, or one with --out')
    if arguments.rate is not None and not arguments.live:
        raise ValueError('--rate is for --live: offline, inferences run as fast as they can')
    for option, value in (('--rate', arguments.rate), ('--every', arguments.every)):
        if value is not None and not 0.0 < value < float('inf'):
            raise ValueError(f'{option} {value:g}: expected more than 0')


def _changes(arguments: argparse.Namespace) -> Changes:
    from vla_runtime.nodes.policy.settings import read_value
    from vla_tools.replay.setup import Changes

    settings: dict[str, Any] = {}
    for text in arguments.set:
        name, equals, value = text.partition('=')
        if not equals:
            raise ValueError(f'--set {text}: expected NAME=VALUE, such as cfg_beta=1.5')
        settings[name.strip()] = read_value(name.strip(), value.strip())
    return Changes(
        bundle=arguments.bundle,
        backend=arguments.backend,
        device=arguments.device,
        precision=arguments.precision,
        threads=arguments.threads,
        settings=settings,
    )


def _one(path: Path, changes: Changes, arguments: argparse.Namespace) -> Json:
    """Replay one recording, and print what was found."""
    if arguments.open_loop:
        result: ReplaySummary | OpenLoopResult = _open_loop(path, changes, arguments)
    else:
        result = _replay(path, changes, arguments)
    print('\n'.join(result.lines()))
    return result.as_json()


def _live(run: RecordedRun, changes: Changes, offline: Offline, rate: float) -> LiveResult:
    require_packages('rclpy')
    from vla_runtime.nodes.player.live import own_domain
    from vla_tools.cli._live import play_live

    own_domain()
    return play_live(run, changes, offline, rate)


def _several(
    recordings: Sequence[Path], changes: Changes, arguments: argparse.Namespace
) -> list[Json]:
    """Replay recordings in several processes or on a cluster, and print their totals."""
    from tqdm import tqdm

    from vla_tools.replay import batch
    from vla_tools.replay.units import OpenLoopOptions, Unit

    options = None
    if arguments.open_loop:
        options = OpenLoopOptions(
            _robot_file(arguments.robot),
            arguments.instruction,
            arguments.every or _EVERY_S,
            arguments.namespace,
        )
    units = [Unit(path, changes, arguments.node, options) for path in recordings]
    out: Path = arguments.out or Path('replay_results')
    make_folder(out, '--out')
    made = batch.run_batch(units, out, _pool(units, arguments))
    bar = tqdm(made, total=len(units), desc='replay', unit='bag', leave=False, disable=None)
    results = [result for _, result in bar]
    batch.write_summary(out / batch.SUMMARY, results)
    results.sort(key=lambda result: result['recording'])
    print('\n'.join(batch.lines(results)))
    print(f'summary: {out / batch.SUMMARY}')
    return results


def _pool(units: Sequence[Unit], arguments: argparse.Namespace) -> Pool:
    from vla_runtime.processes.workers import workers
    from vla_tools.replay.batch import cores

    threads = arguments.threads or 1
    if arguments.ray is None:
        return partial(workers, arguments.workers or cores(threads))
    return ray_pool(
        arguments.ray,
        '--workers',
        arguments.workers,
        inputs=sorted({path for unit in units for path in unit.inputs()}),
        packages=('rosbags',),
        cpus=threads,
        gpus=int((arguments.device or '').startswith('cuda')),
    )


def _open_loop(path: Path, changes: Changes, arguments: argparse.Namespace) -> OpenLoopResult:
    from tqdm import tqdm

    from vla_runtime.robot.file import load_robot
    from vla_tools.replay.open_loop_run import run_open_loop

    file = _robot_file(arguments.robot)
    robot = None if file is None else load_robot(file)
    return run_open_loop(
        path,
        changes,
        robot=robot,
        instruction=arguments.instruction,
        every_s=arguments.every or _EVERY_S,
        namespace=arguments.namespace,
        progress=lambda made: tqdm(made, desc=path.name, unit='chunk', leave=False, disable=None),
    )


def _robot_file(named: str | None) -> Path | None:
    from vla_runtime.files.package_files import share_folder
    from vla_runtime.robot.file import find_robot

    if named is None:
        return None
    return find_robot(named, share_folder() / 'config' / 'robots')


def _replay(path: Path, changes: Changes, arguments: argparse.Namespace) -> ReplaySummary:
    from tqdm import tqdm

    from vla_runtime.recording.bag_reader import BagReader
    from vla_tools.replay.recorded import SkippedInference, read_run
    from vla_tools.replay.rerun import Replay
    from vla_tools.replay.summary import ReplaySummary

    begin_s = perf_counter()
    run = read_run(BagReader(path), arguments.node)
    summary = ReplaySummary(str(path), run.node)
    page = _page(len(run.inferences)) if arguments.page else None
    rerun_log = _rerun_log(arguments.rerun, path.name) if arguments.rerun else None
    replay = Replay(run, changes)
    bar = tqdm(
        replay.inferences(),
        total=len(run.inferences),
        desc=path.name,
        unit='chunk',
        leave=False,
        disable=None,
    )
    offline: Offline = {}
    for found in bar:
        summary.add(found)
        if page is not None:
            page.add(found)
        if rerun_log is not None:
            rerun_log.add(found)
        if arguments.live and not isinstance(found, SkippedInference):
            recorded = found.recorded
            key = recorded.episode, recorded.number, recorded.stamp_ns
            # Without images, to save memory.
            offline[key] = replace(found, messages={})
    summary.finish(run, tuple(replay.differences), perf_counter() - begin_s)
    if page is not None or rerun_log is not None:
        from vla_tools.replay.page import read_events

        events = read_events(run.reader, run.node)
        if page is not None:
            page.write(arguments.page, summary, events)
        if rerun_log is not None:
            rerun_log.finish(events)
    if arguments.live and run.inferences:
        summary.live = _live(run, changes, offline, arguments.rate or 0.0)
    return summary


def _rerun_log(target: str, name: str) -> RerunLog:
    require_packages('rerun')
    from vla_tools.replay.rerun_log import RerunLog

    return RerunLog(target, name)


def _rerun_target(text: str) -> str:
    return text if '://' in text else str(output_file(text))


def _page(inferences: int) -> ReplayPage:
    from vla_tools.replay.page import ReplayPage

    return ReplayPage(inferences)
