"""Write demonstrations of a world's scripted expert as a data set in LeRobot's format.

For training elsewhere, and for `vla_runtime distill`. Frames are images, as `to-dataset` writes
them. Meta-World wants an environment of its own: ./run metaworld vla_runtime demonstrations ...

examples:
  vla_runtime demonstrations --out datasets/tabletop
  vla_runtime demonstrations --world metaworld --out datasets/metaworld --processes 4
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from vla_runtime.cli._numbers import MOST_PROCESSES, MOST_SEED, at_least, between
from vla_runtime.cli._packages import import_problem
from vla_tabletop.training.worlds import DEMO_WORLD, WORLD_NAMES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument('--out', type=Path, required=True, metavar='DATASET', help='folder to make')
    parser.add_argument('--force', action='store_true', help='replace a data set that lies there')
    parser.add_argument(
        '--world', choices=WORLD_NAMES, default=DEMO_WORLD, help='default: %(default)s'
    )
    parser.add_argument(
        '--episodes', type=at_least(1), help='of all tasks (default: 320, of Meta-World 1600)'
    )
    parser.add_argument(
        '--seed', type=between(0, MOST_SEED), default=0, help='of scenes, tasks and noise'
    )
    parser.add_argument(
        '--processes',
        type=between(1, MOST_PROCESSES),
        default=os.cpu_count() or 1,
        help='processes, in Meta-World (default: one a core)',
    )


def main(arguments: argparse.Namespace) -> int:
    """Write; 2 where the arguments do not fit."""
    from vla_runtime.engines.preflight import require_packages

    try:
        require_packages('mujoco', 'pyarrow')
        from vla_tabletop.training.worlds import find_world

        world = find_world(arguments.world)
        require_packages(*world.PACKAGES)
        episodes = arguments.episodes or world.DEMONSTRATIONS
        world.write_dataset(
            arguments.out, arguments.seed, episodes, arguments.processes, arguments.force
        )
    except ImportError as error:
        how = "./run setup, or pip install '.[sim,dataset]' in the source folder"
        print(f'error: {import_problem(error, "demonstrations", how)}', file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = '; the same command goes on where it was' if arguments.world != DEMO_WORLD else ''
        print(f'interrupted{again}', file=sys.stderr)
        return 130
    print(f'wrote {arguments.out}')
    return 0
