"""Measure a policy closed loop in a simulated world, over a declared set of conditions.

The same policy and chunk executor as on a robot, on a simulated clock: inference takes as long as
the study says, so the speed of the machine changes nothing. Results are study_NAME.json and
study_NAME.csv, and study.html, one page for all studies in the folder. The same command goes on
where it was interrupted.

examples:
  vla_runtime study --list
  vla_runtime study success
  vla_runtime study replan delay --episodes 40 --out demo_runs/study
  vla_runtime study all --bundle engines/mine --seed 1 --processes 8
  vla_runtime study families families_replan --bundle engines/my_act
  vla_runtime study eight_bits --bundle engines/demo   # and writes success into its receipt
  vla_runtime study precision --bundle engines/demo    # likewise, bfloat16 and float16
  vla_runtime study success --ray auto
  vla_runtime study --page --out benchmark/results
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vla_runtime.cli._files import bundle_folder, make_folder, output_folder
from vla_runtime.cli._numbers import MOST_PROCESSES, MOST_SEED, at_least, between
from vla_runtime.cli._packages import import_problem
from vla_runtime.files.quotes import counted, quoted
from vla_runtime.files.typed_yaml import did_you_mean
from vla_tools.cli._ray import add_ray_argument, ray_pool

if TYPE_CHECKING:
    from vla_runtime.processes.workers import Pool
    from vla_tabletop.study.catalogue import Study
    from vla_tabletop.study.condition import Condition
    from vla_tabletop.study.episode import EpisodeResult
    from vla_tabletop.study.results import Provenance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        'names', nargs='*', metavar='NAME', help='studies to run, or: all (of one policy)'
    )
    parser.add_argument('--list', action='store_true', help='what studies there are, and stop')
    parser.add_argument(
        '--page',
        action='store_true',
        help='write study.html anew from the results in --out, and stop',
    )
    parser.add_argument(
        '--bundle',
        type=Path,
        action='append',
        metavar='DIR',
        help="policy for the study's world (default: the tabletop's shipped one); for a study of "
        'families once for each family whose shipped one is not meant',
    )
    parser.add_argument(
        '--episodes', type=at_least(1), metavar='N', help="a condition (default: study's)"
    )
    parser.add_argument(
        '--seed', type=between(0, MOST_SEED), default=0, help='of scenes, tasks and noise'
    )
    parser.add_argument(
        '--processes',
        type=between(1, MOST_PROCESSES),
        metavar='N',
        help='one thread each (default: 2)',
    )
    add_ray_argument(parser, 'episodes')
    parser.add_argument(
        '--out',
        type=output_folder,
        default=Path('demo_runs/study'),
        metavar='DIR',
        help='where results go (default: %(default)s)',
    )
    parser.add_argument(
        '--work',
        type=output_folder,
        default=Path('demo_runs/study/conditions'),
        metavar='DIR',
        help='where finished conditions are kept; a change of the code or of the bundle runs them '
        'again (default: %(default)s)',
    )


def main(arguments: argparse.Namespace) -> int:
    """Run, write, show; 2 where the arguments or the bundle cannot be used."""
    try:
        return _main(arguments)
    except ImportError as error:
        how = "./run setup, or pip install '.[torch,sim,report]' in the source folder"
        print(f'error: {import_problem(error, "study", how)}', file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
    except KeyboardInterrupt:
        print('interrupted; the same command goes on where it was', file=sys.stderr)
        return 130
    return 2


def _main(arguments: argparse.Namespace) -> int:
    from vla_runtime.engines.preflight import require_packages

    require_packages('torch', 'mujoco', 'matplotlib')

    from vla_tabletop.study.catalogue import STUDIES

    names = arguments.names
    known = (*STUDIES, 'all')
    for name in names:
        if name not in known:
            raise ValueError(f'there is no study {quoted(name)}{did_you_mean(name, known)}')
    if arguments.list:
        for study in STUDIES.values():
            print(f'{study.name:12} {study.title}')
            print(
                f'{"":12} {counted(len(study.conditions), "condition")} of '
                f'{counted(study.episodes, "episode")}'
            )
        return 0
    if arguments.page:
        print(f'wrote {_write_page(arguments.out)}')
        return 0
    if not names:
        raise ValueError(f'no study named; expected one of {", ".join(known)}')
    if 'all' in names:
        names = [
            study.name
            for study in STUDIES.values()
            if not study.compares_families and study.world == 'tabletop'
        ]
    studies = _runnable([STUDIES[name] for name in names])
    bundles = [bundle_folder(named) for named in arguments.bundle or ()]
    chosen = [_bundles_of(study, bundles) for study in studies]
    _check(studies, chosen, arguments)
    for study, by_family in zip(studies, chosen, strict=True):
        _run(study, by_family, arguments)
    return 0


def _runnable(studies: Sequence[Study]) -> list[Study]:
    """Leave out, with a line for each, studies in int8 on a CPU without instructions for it."""
    from vla_runtime.engines.devices import check_int8

    in_int8 = {
        study.name for study in studies if any(one.precision == 'int8' for one in study.conditions)
    }
    try:
        if in_int8:
            check_int8()
        return list(studies)
    except ValueError as error:
        if len(in_int8) == len(studies):
            raise
        for name in sorted(in_int8):
            print(f'{name} is left out: {error}')
        return [study for study in studies if study.name not in in_int8]


def _bundles_of(study: Study, bundles: Sequence[Path]) -> dict[str, Path]:
    """Bundles by the `policy_family` of the conditions; a family not given uses the shipped one."""
    from vla_runtime.bundle.folder import read_bundle
    from vla_tabletop.training.recipes import SHIPPED

    if not study.compares_families:
        if len(bundles) > 1:
            raise ValueError(f'--bundle: study {study.name} runs one policy, not {len(bundles)}')
        if study.world != 'tabletop' and not bundles:
            raise ValueError(
                f'study {study.name} is of {study.world}, of which no policy ships: train one '
                f'(./run metaworld vla_runtime train-demo --world {study.world}) and name it with '
                '--bundle'
            )
        return {'': bundles[0] if bundles else bundle_folder(None)}
    wanted = dict.fromkeys(condition.policy_family for condition in study.conditions)
    family_of = {folder: read_bundle(folder, verify=False).spec.family for folder in bundles}
    for folder, family in family_of.items():
        if family not in wanted or list(family_of.values()).count(family) > 1:
            raise ValueError(
                f'--bundle {folder}: its family is {family}, and study {study.name} takes one '
                f'bundle of each of {", ".join(wanted)}'
            )
    named = {family: folder for folder, family in family_of.items()}
    return {family: named.get(family) or bundle_folder(None, SHIPPED[family]) for family in wanted}


def _check(
    studies: Sequence[Study], chosen: Sequence[dict[str, Path]], arguments: argparse.Namespace
) -> None:
    """Refuse options that would fail only after seconds or hours of work."""
    from vla_runtime.bundle.folder import read_bundle
    from vla_runtime.engines.preflight import check_backend, require_packages
    from vla_runtime.files.package_files import share_folder
    from vla_runtime.robot.file import find_robot, load_robot
    from vla_runtime.robot.match import match_robot
    from vla_tabletop.study.world_words import WORDS

    by_policy = [c for study in studies for c in study.conditions if c.chunk_source == 'policy']
    tabletop = load_robot(find_robot('tabletop', share_folder() / 'config' / 'robots'))
    for study, by_family in zip(studies, chosen, strict=True):
        if study.world == 'metaworld':
            require_packages('metaworld')
        if not any(condition.chunk_source == 'policy' for condition in study.conditions):
            continue
        for bundle in by_family.values():
            spec = read_bundle(bundle, verify=False).spec
            if study.world == 'tabletop':
                match_robot(tabletop, spec, bundle)
            elif spec.camera_names != WORDS[study.world].cameras:
                raise ValueError(
                    f'{bundle}: cameras {list(spec.camera_names)} are not those of {study.world}, '
                    f'{list(WORDS[study.world].cameras)}: name a policy that was trained there'
                )
    for backend in {condition.backend for condition in by_policy}:
        check_backend(backend, 'cpu')
    import vla_tabletop.sim.gl  # noqa: F401  (whether the simulated cameras can be rendered)
    from vla_tabletop.study.results import read_studies

    make_folder(arguments.out, '--out')
    make_folder(arguments.work, '--work')
    # The page shows them all, those of earlier runs too.
    read_studies(arguments.out)
    for by_family in chosen:
        _pool(by_family.values(), arguments)
    for study, by_family in zip(studies, chosen, strict=True):
        _check_settings(study, by_family)


def _check_settings(study: Study, by_family: Mapping[str, Path]) -> None:
    """Refuse a study with a condition that its policy cannot run: guidance without a tag, say."""
    from contextlib import closing

    from vla_runtime.policy import Policy
    from vla_tabletop.study.chunk_sources import settings_of

    for family, bundle in by_family.items():
        conditions = [
            condition
            for condition in study.conditions
            if (condition.policy_family, condition.backend) == (family, 'torch')
            and condition.chunk_source == 'policy'
        ]
        if not conditions:
            continue
        with closing(Policy.load(bundle, 'torch', precision='float32', threads=1)) as policy:
            for condition in conditions:
                try:
                    policy.check(settings_of(condition))
                except ValueError as error:
                    raise ValueError(f'{bundle}: cannot run study {study.name}: {error}') from None


def _write_page(folder: Path) -> Path:
    """Write study.html of the results in a folder."""
    from vla_runtime.files.atomic_write import write_text
    from vla_tabletop.study.page import study_page
    from vla_tabletop.study.results import read_studies

    studies = read_studies(folder)
    if not studies:
        raise ValueError(f'--out {folder}: there is no study_*.json to make a page of')
    page = folder / 'study.html'
    write_text(page, study_page(studies))
    return page


def _run(study: Study, bundles: dict[str, Path], arguments: argparse.Namespace) -> None:
    import torch

    from vla_runtime.bundle.folder import read_bundle
    from vla_runtime.files.package_files import code_version, source_digest
    from vla_tabletop.study.results import Provenance, study_record, write_study
    from vla_tabletop.study.runner import bundle_identity, episode_seeds, run_conditions

    # Tiny networks gain nothing from threads, and threads that spin on a busy machine lose tenfold.
    torch.set_num_threads(1)
    seeds = episode_seeds(arguments.seed, arguments.episodes or study.episodes)
    print(f'{study.name}: {study.title}')
    pool = _pool(bundles.values(), arguments)
    results = run_conditions(study.conditions, bundles, seeds, arguments.work, pool)
    named = ''.join(f'--bundle {folder} ' for folder in arguments.bundle or ())
    command = (
        f'vla_runtime study {study.name} {named}--episodes {len(seeds)} --seed {arguments.seed}'
    )
    provenance = Provenance(
        command=command,
        bundle='; '.join(
            read_bundle(folder, verify=False).spec.name for folder in bundles.values()
        ),
        bundle_sha256=' '.join(bundle_identity(folder) for folder in bundles.values()),
        seeds=(seeds[0], seeds[-1] + 1),
        code=code_version(),
        source_sha256=source_digest(),
    )
    record = study_record(study, provenance, results)
    written = write_study(arguments.out, record)
    page = _write_page(arguments.out)
    if study.judges:
        _judge(study, results, bundles[''], arguments, provenance)
    for condition in record['conditions']:
        label = ', '.join(f'{key} {value}' for key, value in condition['label'].items())
        for group, summary in condition['groups'].items():
            rate = summary['success']
            print(
                f'  {label}, {group}: {rate["count"]}/{summary["episodes"]} '
                f'[{100 * rate["low"]:.0f}, {100 * rate["high"]:.0f}]%'
            )
    for pair in record['same']:
        labels = ' and '.join(', '.join(label.values()) for label in pair['labels'])
        print(f'  {labels}: {pair["equal"]} of {pair["of"]} trajectories the same, bit for bit')
    print(f'wrote {", ".join(str(path) for path in [*written, page])}')


def _judge(
    study: Study,
    results: Mapping[Condition, Sequence[EpisodeResult]],
    bundle: Path,
    arguments: argparse.Namespace,
    provenance: Provenance,
) -> None:
    """Write success in a precision beside float32 into the receipts of the bundles that ran so."""
    from vla_runtime.bundle.folder import read_bundle
    from vla_runtime.bundle.success import (
        LEAST_EPISODES,
        JudgedCondition,
        success_fault,
        write_success,
    )
    from vla_tabletop.study.runner import bundle_of
    from vla_tabletop.study.statistics import compare

    if not arguments.bundle:
        print('  no receipt is written: name the policy with --bundle')
        return
    judged: dict[tuple[str, str, Path], list[JudgedCondition]] = {}
    for condition, episodes in results.items():
        reference = study.reference_of(condition)
        if reference is None or reference == condition:
            continue
        pairs = compare(episodes, results[reference])
        succeeded = sum(episode.success for episode in episodes)
        folder = bundle_of(condition, bundle, arguments.work)
        judged.setdefault((condition.backend, condition.precision, folder), []).append(
            JudgedCondition(condition.variant, len(episodes), succeeded, pairs.won, pairs.lost)
        )
    said = {'command': provenance.command, 'seeds': provenance.seeds, 'code': provenance.code}
    for (backend, precision, folder), conditions in judged.items():
        # A short trial must not replace an earlier record.
        if min(one.episodes for one in conditions) < LEAST_EPISODES:
            print(
                f'  {folder}: {precision} of {backend}: no receipt is written: fewer than '
                f'{LEAST_EPISODES} episodes a condition'
            )
            continue
        write_success(read_bundle(folder, verify=False), backend, precision, conditions, said)
        fault = success_fault(read_bundle(folder, verify=False), backend, precision)
        # Whether `auto` takes it is also up to the device and to the receipt of the ONNX files.
        decided = f'auto leaves it out: {fault}' if fault else 'success was kept'
        print(f'  {folder}: {precision} of {backend}: {decided}')


def _pool(bundles: Iterable[Path], arguments: argparse.Namespace) -> Pool | None:
    """Return what runs the episodes; None: this process."""
    from vla_runtime.processes.workers import workers

    if arguments.ray is not None:
        files = (path for bundle in bundles for path in bundle.rglob('*'))
        inputs = [arguments.work, *(path for path in files if path.is_file())]
        packages = ('torch', 'mujoco')
        return ray_pool(arguments.ray, '--processes', arguments.processes, inputs, packages)
    processes = 2 if arguments.processes is None else arguments.processes
    return None if processes == 1 else partial(workers, processes)
