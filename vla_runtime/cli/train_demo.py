"""Train the demo policy on the simulated tabletop and write it as a bundle.

Three steps; each goes on where it was cut off when the same command is given again: the
expert's data, the training, the bundle with its closed-loop check. About an hour on two CPU cores.
With --from, training goes on from a bundle that this command made, on new data: give another --seed
than that one's.

examples:
  vla_runtime train-demo --out engines/demo
  vla_runtime train-demo --out engines/more --from engines/demo --seed 1
  vla_runtime train-demo --out engines/mine --seed 1 --device cuda --work demo_runs/mine
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_runtime.cli._files import make_folder
from vla_runtime.cli._numbers import MOST_SEED, at_least, between
from vla_runtime.cli._packages import import_problem
from vla_runtime.engines.preflight import MOST_THREADS

if TYPE_CHECKING:
    from vla_runtime.processing.tokenizer import Tokenizer
    from vla_runtime.tabletop.training.demo_network import Start
    from vla_runtime.tabletop.training.training import Training, TrainingSettings
    from vla_runtime.tabletop.training.work_log import WorkLog

# Steps of each stage from nothing, and from a bundle, whose network sees and grounds already.
STAGE_STEPS = (('see', 500, 0), ('ground', 1200, 200), ('act', 4000, 2000))
# From a bundle: enough to learn, too little to forget.
ONWARD_LEARNING_RATE = 5e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument('--out', type=Path, required=True, metavar='BUNDLE', help='bundle to make')
    parser.add_argument('--force', action='store_true', help='replace a bundle that lies there')
    parser.add_argument(
        '--work',
        type=Path,
        default=Path('demo_runs/train_demo'),
        metavar='DIR',
        help='data, checkpoint and loss plot (default: %(default)s)',
    )
    parser.add_argument(
        '--from',
        type=Path,
        dest='start',
        metavar='BUNDLE',
        help='train on from its weights, with its vocabulary and statistics, on new data',
    )
    parser.add_argument(
        '--seed', type=between(0, MOST_SEED), default=0, help='of data and training'
    )
    parser.add_argument(
        '--episodes',
        type=at_least(1),
        default=3000,
        help='of data (default: %(default)s)',
    )
    parser.add_argument(
        '--processes', type=at_least(1), default=os.cpu_count() or 1, help='that generate data'
    )
    parser.add_argument(
        '--threads',
        type=between(1, MOST_THREADS),
        help="of PyTorch (default: PyTorch's own)",
    )
    parser.add_argument('--device', default='cpu', help='cpu or cuda (default: %(default)s)')
    for stage, from_nothing, onward in STAGE_STEPS:
        parser.add_argument(
            f'--{stage}-steps',
            type=at_least(1 if stage == 'act' else 0),
            help=f'of this stage (default: {from_nothing}; with --from {onward})',
        )
    parser.add_argument(
        '--check-episodes',
        type=at_least(0),
        default=100,
        help='closed-loop episodes a family, on unseen scenes (default: %(default)s)',
    )


def main(arguments: argparse.Namespace) -> int:
    """Generate, train, write; 2 where the arguments do not fit what lies in the work folder."""
    try:
        results = _main(arguments)
    except ImportError as error:
        how = "pip install 'vla_runtime[torch,sim,report]', or ./run setup"
        print(f'error: {import_problem(error, "train-demo", how)}', file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print('interrupted; the same command goes on where it was', file=sys.stderr)
        return 130
    print(f'wrote {arguments.out}')
    for what, rate in results.items():
        print(f'  {what}: {rate}')
    return 0


def _main(arguments: argparse.Namespace) -> dict[str, str]:
    from vla_runtime.bundle.writer import check_target
    from vla_runtime.engines.preflight import check_backend, require_packages

    # Before hours of work, not after; and before PyTorch is imported, which takes seconds.
    check_target(arguments.out, arguments.force)
    require_packages('torch', 'mujoco', 'matplotlib')
    check_backend('torch', arguments.device)

    from vla_runtime.files.code_version import code_version
    from vla_runtime.tabletop.training.dataset import DatasetSettings, claim, generate
    from vla_runtime.tabletop.training.demo_network import Start
    from vla_runtime.tabletop.training.work_log import WorkLog

    start = None if arguments.start is None else Start.read(arguments.start)
    make_folder(arguments.work, '--work')
    data = DatasetSettings(seed=arguments.seed, episodes=arguments.episodes)
    claim(arguments.work / 'data', data)

    import torch

    from vla_runtime.engines.torch.engine import torch_device

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch_device(arguments.device)
    command = shlex.join(['vla_runtime', *sys.argv[1:]])
    log = WorkLog(arguments.work / 'runs.json', command, code_version())
    with log.timed('data'):
        generate(arguments.work / 'data', data, arguments.processes)
    return _train(arguments, start, log)


def _train(arguments: argparse.Namespace, start: Start | None, log: WorkLog) -> dict[str, str]:
    from vla_runtime.tabletop.training.dataset import load
    from vla_runtime.tabletop.training.demo_bundle import TOKENIZER_FILE, write_demo_bundle
    from vla_runtime.tabletop.training.loss_plot import plot_losses
    from vla_runtime.tabletop.training.samples import Samples
    from vla_runtime.tabletop.training.training import Training
    from vla_runtime.tabletop.training.vocabulary import number_tokens

    work = arguments.work
    vocabulary = work / TOKENIZER_FILE
    tokenizer = _tokenizer(vocabulary, start)
    samples = Samples(load(work / 'data'), tokenizer, start.statistics if start else None)
    training = Training(
        _plan(arguments, start),
        samples,
        number_tokens(vocabulary),
        tokenizer.vocabulary_size,
        work,
        arguments.device,
        start,
    )
    with log.timed('training'):
        training.run()
    plot_losses(training.history, work / 'loss.png')
    return write_demo_bundle(
        arguments.out,
        training.average,
        training.average.dims,
        samples.statistics,
        vocabulary,
        _made(training, start, log, work),
        arguments.check_episodes,
        arguments.force,
    )


def _tokenizer(vocabulary: Path, start: Start | None) -> Tokenizer:
    """Put the vocabulary into the work folder: the start's own, or a new one."""
    from vla_runtime.processing.tokenizer import Tokenizer
    from vla_runtime.tabletop.sim.world import JOINT_NAMES
    from vla_runtime.tabletop.training.vocabulary import train_vocabulary

    if start is None:
        return train_vocabulary(vocabulary, len(JOINT_NAMES))
    shutil.copyfile(start.tokenizer, vocabulary)
    return Tokenizer.load(vocabulary)


def _plan(arguments: argparse.Namespace, start: Start | None) -> TrainingSettings:
    from vla_runtime.tabletop.training.training import TrainingSettings

    steps = {}
    for stage, from_nothing, onward in STAGE_STEPS:
        chosen = getattr(arguments, f'{stage}_steps')
        if chosen is None:
            chosen = from_nothing if start is None else onward
        steps[f'{stage}_steps'] = chosen
    if start is None:
        return TrainingSettings(seed=arguments.seed, **steps)
    return TrainingSettings(
        seed=arguments.seed, learning_rate=ONWARD_LEARNING_RATE, start=start.sha256, **steps
    )


def _made(training: Training, start: Start | None, log: WorkLog, work: Path) -> dict[str, Any]:
    """Return how the policy was made, for the receipt."""
    data = training.samples.data
    made = {
        'runs': log.runs,
        'data': {
            **json.loads((work / 'data' / 'dataset.json').read_text()),
            'frames': len(data.state),
            'expert_success': float(data.success.mean()),
            'advantage_positive': float(data.positive.mean()),
        },
        'training': asdict(training.plan),
        'last_check': training.history[-1],
    }
    if start is not None:
        made['start'] = start.made
    return made
