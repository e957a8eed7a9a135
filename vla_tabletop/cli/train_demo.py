"""Train a small policy of a family in a simulated world and write it as a bundle.

Three steps: the expert's data, the training, the bundle with its closed-loop check. Each goes on
where it was cut off when the same command is given again. Less than an hour on two CPU cores, on
Meta-World up to three. The data in the work folder serves every family.
With --from, training goes on from a bundle that this command made, on new data: give another --seed
than that one's.

examples:
  vla_runtime train-demo --out engines/demo
  vla_runtime train-demo --family act --out engines/demo_act
  vla_runtime train-demo --world metaworld --out engines/metaworld  # docs/howto/metaworld.md
  vla_runtime train-demo --out engines/more --from engines/demo --seed 1
  vla_runtime train-demo --out engines/mine --seed 1 --device cuda --work demo_runs/mine
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_runtime.cli._files import make_folder, output_folder
from vla_runtime.cli._numbers import MOST_PROCESSES, MOST_SEED, at_least, between
from vla_runtime.cli._packages import import_problem
from vla_runtime.engines.devices import MOST_THREADS
from vla_tabletop.training.recipes import DEMO_FAMILY, RECIPE_NAMES
from vla_tabletop.training.worlds import DEMO_WORLD, WORLD_NAMES

if TYPE_CHECKING:
    from vla_runtime.processing.prompts import PromptFormat
    from vla_tabletop.training.recipes.recipe import Recipe
    from vla_tabletop.training.samples import Prompting
    from vla_tabletop.training.start import Start, WorkLog
    from vla_tabletop.training.training import Training, TrainingSettings
    from vla_tabletop.training.vocabulary import Answers
    from vla_tabletop.training.world import TrainingSamples
    from vla_tabletop.training.worlds import WorldModule

# Steps of each stage from a bundle, whose network sees and grounds already.
ONWARD_STEPS = {'see': 0, 'ground': 200, 'act': 2000}
_STAGES = (
    'first stage: vision alone finds the patch of each block',
    'second stage: the prefix points at the named block and says where it is',
    "third stage: everything learns the expert's chunks, in the way of its head",
)
# From a bundle: enough to learn, too little to forget.
ONWARD_LEARNING_RATE = 5e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument('--out', type=Path, required=True, metavar='BUNDLE', help='bundle to make')
    parser.add_argument(
        '--family',
        default=DEMO_FAMILY,
        metavar='NAME',
        help=f'family of the policy: {", ".join(RECIPE_NAMES)} (default: %(default)s)',
    )
    parser.add_argument(
        '--world',
        choices=WORLD_NAMES,
        default=DEMO_WORLD,
        help='world that it learns in (default: %(default)s)',
    )
    parser.add_argument('--force', action='store_true', help='replace a bundle that lies there')
    parser.add_argument(
        '--work',
        type=output_folder,
        default=Path('demo_runs/train_demo'),
        metavar='DIR',
        help='data, and for each family checkpoint and loss plot; of a world that is not the '
        'tabletop in a folder of its name there (default: %(default)s)',
    )
    parser.add_argument(
        '--from',
        type=Path,
        dest='start',
        metavar='BUNDLE',
        help='train on from its weights, with its vocabulary and statistics, on new data',
    )
    parser.add_argument(
        '--seed', type=between(0, MOST_SEED), default=0, help='seed of data and training'
    )
    parser.add_argument(
        '--episodes',
        type=at_least(1),
        help="episodes of data (default: the world's)",
    )
    parser.add_argument(
        '--processes',
        type=between(1, MOST_PROCESSES),
        default=os.cpu_count() or 1,
        help='processes that generate data',
    )
    parser.add_argument(
        '--threads',
        type=between(1, MOST_THREADS),
        help="threads of PyTorch (default: PyTorch's own)",
    )
    parser.add_argument('--device', default='cpu', help='cpu or cuda (default: %(default)s)')
    for (stage, onward), what in zip(ONWARD_STEPS.items(), _STAGES, strict=True):
        parser.add_argument(
            f'--{stage}-steps',
            type=at_least(1 if stage == 'act' else 0),
            metavar='N',
            help=f"steps of the {what} (default: the family's, with --from {onward}; on "
            'Meta-World three times as many)',
        )
    parser.add_argument(
        '--check-episodes',
        type=at_least(0),
        metavar='N',
        help='closed-loop episodes a kind of task, on unseen scenes (default: 100, on Meta-World '
        '12)',
    )


def main(arguments: argparse.Namespace) -> int:
    """Generate, train, write; 2 where the arguments do not fit what lies in the work folder."""
    try:
        results = _main(arguments)
    except ImportError as error:
        how = "./run setup, or pip install '.[torch,sim,report]' in the source folder"
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

    from vla_runtime.files.package_files import code_version
    from vla_tabletop.training.recipes import find_recipe, require_recipe
    from vla_tabletop.training.start import Start, WorkLog
    from vla_tabletop.training.worlds import find_world

    require_recipe(arguments.family)
    world = find_world(arguments.world)
    require_packages(*world.PACKAGES)
    start = None
    if arguments.start is not None:
        start = Start.read(arguments.start, find_recipe(arguments.family), world.WORLD)
    make_folder(arguments.work, '--work')
    folder = _folder(arguments)
    work = folder / arguments.family
    make_folder(work, '--work')
    episodes = arguments.episodes or world.EPISODES
    world.claim(folder / 'data', arguments.seed, episodes)

    import torch

    from vla_runtime.engines.torch.weights import torch_device

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch_device(arguments.device)
    command = shlex.join(['vla_runtime', *sys.argv[1:]])
    log = WorkLog(work / 'runs.json', command, code_version())
    with log.timed('data'):
        world.generate(folder / 'data', arguments.seed, episodes, arguments.processes)
    return _train(arguments, find_recipe(arguments.family), world, start, log)


def _folder(arguments: argparse.Namespace) -> Path:
    work: Path = arguments.work
    return work if arguments.world == DEMO_WORLD else work / arguments.world


def _train(
    arguments: argparse.Namespace,
    recipe: Recipe,
    world: WorldModule,
    start: Start | None,
    log: WorkLog,
) -> dict[str, str]:
    import numpy as np

    from vla_runtime.declarations.pi0_fast import ACTION_TOKENIZER
    from vla_tabletop.training.demo_bundle import TOKENIZER_FILE, write_demo_bundle
    from vla_tabletop.training.loss_plot import plot_losses
    from vla_tabletop.training.training import Training
    from vla_tabletop.training.vocabulary import number_tokens

    work = _folder(arguments) / recipe.name
    data = _folder(arguments) / 'data'
    vocabulary, prompting = None, None
    if recipe.prompt is not None:
        vocabulary = work / TOKENIZER_FILE
        prompting = _prompting(recipe, recipe.prompt, world, vocabulary, start)
    samples = world.samples(data, recipe, prompting, start.statistics if start else None)
    answers, files = None, []
    if recipe.family.head == 'tokens' and vocabulary is not None:
        files = [work / ACTION_TOKENIZER]
        answers = _answers(recipe, world, samples, vocabulary, files[0], start)
    facts = json.dumps(world.facts(data, samples), sort_keys=True)
    digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
    training = Training(
        replace(_plan(arguments, recipe, start, world.WORLD.effort), data=digest),
        samples,
        np.zeros(0, dtype=np.int64) if vocabulary is None else number_tokens(vocabulary),
        0 if prompting is None else prompting.tokenizer.vocabulary_size,
        work,
        arguments.device,
        start,
        answers,
    )
    with log.timed('training'):
        training.run()
    plot_losses(training.history, work / 'loss.png')
    return write_demo_bundle(
        arguments.out,
        training.average,
        samples.statistics,
        vocabulary,
        _made(training, world, start, log, data),
        world.CHECK_EPISODES if arguments.check_episodes is None else arguments.check_episodes,
        arguments.force,
        world.WORLD,
        world.evaluate,
        files,
    )


def _prompting(
    recipe: Recipe, form: PromptFormat, world: WorldModule, vocabulary: Path, start: Start | None
) -> Prompting:
    """Copy the start's vocabulary into the work folder, or train one there."""
    from vla_tabletop.training.samples import Prompting
    from vla_tabletop.training.vocabulary import ACTION_SYMBOLS, train_vocabulary

    if start is None:
        symbols = ACTION_SYMBOLS if recipe.family.head == 'tokens' else ()
        train_vocabulary(vocabulary, len(world.WORLD.state), world.instructions(), symbols)
    elif start.tokenizer is not None:
        shutil.copyfile(start.tokenizer, vocabulary)
    return Prompting.of(recipe.name, form, vocabulary)


def _answers(
    recipe: Recipe,
    world: WorldModule,
    samples: TrainingSamples,
    text: Path,
    action: Path,
    start: Start | None,
) -> Answers:
    """Copy the start's action tokenizer into the work folder, or train one there."""
    from vla_runtime.processing.tokenizer import Tokenizer
    from vla_tabletop.training.vocabulary import Answers, train_action_vocabulary

    if start is not None:
        (file,) = start.files
        shutil.copyfile(file, action)
    elif not action.exists():
        train_action_vocabulary(action, samples)
    size = Tokenizer.load(text).vocabulary_size
    return Answers(text, action, world.WORLD.fit(recipe.dims(size)))


def _plan(
    arguments: argparse.Namespace, recipe: Recipe, start: Start | None, effort: int
) -> TrainingSettings:
    from vla_tabletop.training.training import TrainingSettings

    usual = recipe.steps if start is None else ONWARD_STEPS
    usual = {stage: count * effort for stage, count in usual.items()}
    steps: dict[str, Any] = {}
    for stage in ONWARD_STEPS:
        chosen = getattr(arguments, f'{stage}_steps')
        steps[f'{stage}_steps'] = usual[stage] if chosen is None else chosen
    plan = TrainingSettings(family=recipe.name, seed=arguments.seed, draws=recipe.draws, **steps)
    if start is None:
        return plan
    return replace(plan, learning_rate=ONWARD_LEARNING_RATE, start=start.sha256)


def _made(
    training: Training, world: WorldModule, start: Start | None, log: WorkLog, data: Path
) -> dict[str, Any]:
    """Return how the policy was made, for the receipt."""
    made = {
        'runs': log.runs,
        'data': world.facts(data, training.samples),
        'training': asdict(training.plan),
        'last_check': training.history[-1],
    }
    if start is not None:
        made['start'] = start.made
    return made
