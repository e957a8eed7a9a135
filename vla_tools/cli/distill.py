"""Distil a flow policy to a student of one or a few denoise steps.

The action expert alone learns, from the teacher's own chunks on the observations of a data set in
LeRobot's format; vision and prefix stay the teacher's. The new bundle is used like any other, and
its live denoise_steps is one of --steps. Given again, the same command goes on where it was cut
off. Export and build the student anew for ONNX Runtime and TensorRT.

examples:
  vla_runtime distill engines/pick --steps 1,2 --data datasets/pick --out engines/pick_fast
  vla_runtime distill engines/pick --steps 2 --data datasets/pick --out engines/pick_2 --device cuda

exit codes: 0 written; 2 the policy has no flow, or bundle, data set or arguments do not fit.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from vla_runtime.cli._files import bundle_folder, output_folder
from vla_runtime.cli._numbers import MOST_SEED, at_least, between
from vla_runtime.cli._packages import import_problem
from vla_runtime.engines.devices import MOST_THREADS
from vla_runtime.family.declaration import MOST_FLOW_STEPS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument('bundle', type=Path, metavar='BUNDLE', help='the teacher')
    parser.add_argument(
        '--steps',
        type=_steps,
        default=(1, 2),
        metavar='N,N',
        help='numbers of denoise steps that the student learns (default: 1,2)',
    )
    parser.add_argument(
        '--data', type=Path, required=True, metavar='DATASET', help='observations, LeRobot v2 or v3'
    )
    parser.add_argument('--out', type=Path, required=True, metavar='DIR', help='bundle to make')
    parser.add_argument('--force', action='store_true', help='replace a bundle that lies there')
    parser.add_argument(
        '--work',
        type=output_folder,
        metavar='DIR',
        help='where the checkpoint is kept (default: the new bundle with .distill behind its name)',
    )
    parser.add_argument(
        '--updates', type=at_least(1), default=800, help='optimiser steps (default: %(default)s)'
    )
    parser.add_argument(
        '--frames',
        type=at_least(64),
        default=4096,
        help='frames of the data set that are drawn (default: %(default)s)',
    )
    parser.add_argument('--seed', type=between(0, MOST_SEED), default=0, help='of frames and noise')
    parser.add_argument('--device', default='cpu', help='cpu or cuda (default: %(default)s)')
    parser.add_argument(
        '--threads',
        type=between(1, MOST_THREADS),
        help="threads of PyTorch (default: PyTorch's own)",
    )


def _steps(text: str) -> tuple[int, ...]:
    try:
        steps = tuple(sorted({int(part) for part in text.split(',')}))
    except ValueError:
        steps = ()
    if not steps or not 1 <= steps[0] <= steps[-1] <= MOST_FLOW_STEPS:
        raise argparse.ArgumentTypeError(
            f"'{text}': expected numbers from 1 to {MOST_FLOW_STEPS}, separated by commas"
        )
    return steps


def main(arguments: argparse.Namespace) -> int:
    """Distil and write; 2 where the arguments do not fit."""
    try:
        _main(arguments)
    except ImportError as error:
        how = "./run setup, or pip install '.[torch,dataset,video]' in the source folder"
        print(f'error: {import_problem(error, "distill", how)}', file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print('interrupted; the same command goes on where it was', file=sys.stderr)
        return 130
    print(f'wrote {arguments.out}')
    return 0


def _main(arguments: argparse.Namespace) -> None:
    from vla_runtime.bundle.folder import read_bundle
    from vla_runtime.bundle.writer import check_target
    from vla_runtime.engines.preflight import check_backend, require_packages
    from vla_runtime.files.package_files import code_version

    # Before work that takes minutes.
    check_target(arguments.out, arguments.force)
    require_packages('torch', 'pyarrow')
    check_backend('torch', arguments.device)
    teacher = read_bundle(bundle_folder(arguments.bundle))

    import torch

    from vla_tools.dataset.observations import read_observations
    from vla_tools.distillation.bundle import write_student
    from vla_tools.distillation.student import (
        Distillation,
        DistillationSettings,
        check_teacher,
        data_identity,
        teacher_identity,
    )

    # The bundle first: reading the data set may take long.
    check_teacher(teacher.spec)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    observations = read_observations(arguments.data, teacher.spec, arguments.frames, arguments.seed)
    settings = DistillationSettings(
        steps=arguments.steps,
        teacher_steps=teacher.spec.denoise_steps,
        updates=arguments.updates,
        seed=arguments.seed,
        teacher=teacher_identity(teacher),
        data=data_identity(arguments.data, observations),
        frames=len(observations),
    )
    work = arguments.work or arguments.out.with_name(arguments.out.name + '.distill')
    distillation = Distillation(teacher, observations, settings, work, arguments.device)
    distillation.run()
    made = {
        'command': shlex.join(['vla_runtime', *sys.argv[1:]]),
        'code': code_version(),
        'frames': len(observations),
    }
    write_student(arguments.out, teacher, distillation, made, arguments.force)
