"""Run the inferences of recordings again and compare the chunks with those that were published.

Nothing changed, on the machine that recorded: every chunk is the same, bit for bit. With another
bundle, backend or setting it is a what-if, and the differences are told by joint and by step.

examples:
  vla_runtime replay recordings/first
  vla_runtime replay recordings/first --set cfg_beta=1.5 --set cfg_enabled=true
  vla_runtime replay recordings/first --backend onnxruntime --json result.json
  vla_runtime replay recordings/first --bundle path/to/another

exit code: 0; 1 where nothing was changed and a chunk differs all the same; 2 for what cannot be
used.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from vla_runtime.cli._files import output_file
from vla_runtime.cli._numbers import at_least
from vla_runtime.cli._packages import import_problem
from vla_runtime.engines.preflight import BACKENDS

if TYPE_CHECKING:
    from vla_runtime.replay.setup import Changes
    from vla_runtime.replay.summary import ReplaySummary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        'recordings', nargs='+', type=Path, metavar='BAG', help='recording: a folder, or its file'
    )
    parser.add_argument(
        '--bundle', type=Path, metavar='DIR', help='policy bundle (default: the recorded one)'
    )
    parser.add_argument(
        '--backend', choices=BACKENDS, help='runs the networks (default: the recorded one)'
    )
    parser.add_argument('--device', help='cpu, cuda or cuda:N (default: the recorded one)')
    parser.add_argument(
        '--precision',
        choices=('float32', 'bfloat16', 'float16'),
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
    parser.add_argument(
        '--node', metavar='NAME', help='full name of the policy node, where several were recorded'
    )
    parser.add_argument('--json', type=output_file, metavar='FILE', help='write the result there')


def main(arguments: argparse.Namespace) -> int:
    """Replay; see the module for the exit code."""
    try:
        from vla_runtime.engines.preflight import require_packages

        require_packages('rosbags')
        changes = _changes(arguments)
        summaries = [_replay(path, changes, arguments.node) for path in arguments.recordings]
        if arguments.json:
            from vla_runtime.files.whole_files import write_text

            document = [summary.as_json() for summary in summaries]
            write_text(arguments.json, json.dumps(document, indent=1) + '\n')
    except ImportError as error:
        print(f'error: {import_problem(error, "replay", "pip install rosbags")}', file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 1 if any(summary.is_broken for summary in summaries) else 0


def _changes(arguments: argparse.Namespace) -> Changes:
    from vla_runtime.replay.setup import Changes
    from vla_runtime.ros.policy.settings import read_value

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


def _replay(path: Path, changes: Changes, node: str | None) -> ReplaySummary:
    from tqdm import tqdm

    from vla_runtime.recording.bag_reader import BagReader
    from vla_runtime.replay.recorded import read_run
    from vla_runtime.replay.rerun import Replay
    from vla_runtime.replay.summary import ReplaySummary

    begin_s = perf_counter()
    run = read_run(BagReader(path), node)
    summary = ReplaySummary(str(path), run.node)
    replay = Replay(run, changes)
    # disable=None: silent where the output is not a terminal.
    bar = tqdm(
        replay.inferences(),
        total=len(run.inferences),
        desc=path.name,
        unit='chunk',
        leave=False,
        disable=None,
    )
    for found in bar:
        summary.add(found)
    summary.finish(run, tuple(replay.differences), perf_counter() - begin_s)
    print('\n'.join(summary.lines()))
    return summary
