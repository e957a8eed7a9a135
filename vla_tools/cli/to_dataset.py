"""Write a LeRobot data set (format v3) of what a robot did in recordings.

Each instruction that was tried becomes an episode: camera frames, measured positions, commanded
setpoints, the task, and the verdict where somebody judged. Frames lie on an even grid; each takes
the newest of every source that was there. The folder appears complete, or not at all.

examples:
  vla_runtime to-dataset recordings/first --out datasets/first
  vla_runtime to-dataset recordings --out datasets/all --fps 10 --force
  vla_runtime to-dataset any_bag --out datasets/taught --robot so101 --fps 30 \\
      --task 'pick up the cup' --actions measured
  vla_runtime to-dataset recordings --out datasets/good --only success

exit code: 0; 1 where some of the recordings cannot be used and are left out; 2 where none can, or
the arguments cannot.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vla_runtime.cli._files import output_folder
from vla_runtime.cli._numbers import between
from vla_runtime.cli._packages import import_problem
from vla_tools.dataset.layout import FRAME_AGE_S, MOST_FPS, SHORTEST_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vla_tools.dataset.convert import DatasetOptions
    from vla_tools.dataset.layout import DatasetFrame


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        'recordings',
        nargs='+',
        type=Path,
        metavar='BAG',
        help='recording: a folder, or its file; or a folder of recordings',
    )
    parser.add_argument(
        '--out',
        type=output_folder,
        required=True,
        metavar='DIR',
        help='folder of the data set',
    )
    parser.add_argument(
        '--robot', metavar='FILE', help='robot file, or its name (default: the recorded one)'
    )
    parser.add_argument(
        '--namespace', metavar='NS', help='of the robot, in bags of several (default: the only one)'
    )
    parser.add_argument(
        '--only',
        choices=('judged', 'success'),
        help='judged: leave out episodes without a verdict; success: and those that failed '
        '(default: all)',
    )
    parser.add_argument(
        '--fps',
        type=between(1, MOST_FPS),
        metavar='N',
        help="frames a second (default: the policy's steps a second)",
    )
    parser.add_argument(
        '--task', metavar='TEXT', help='the task of every episode (default: as recorded)'
    )
    parser.add_argument(
        '--actions',
        choices=('commanded', 'measured'),
        default='commanded',
        help='commanded: the setpoints in force at a frame; measured: the positions at the next '
        'one, for bags without commands (default: commanded)',
    )
    parser.add_argument(
        '--frame-age',
        type=float,
        default=FRAME_AGE_S,
        metavar='S',
        help='oldest camera frame that is used; a longer gap ends the episode '
        '(default: %(default)g)',
    )
    parser.add_argument(
        '--shortest',
        type=float,
        default=SHORTEST_S,
        metavar='S',
        help='leave out what is shorter (default: %(default)g)',
    )
    parser.add_argument('--force', action='store_true', help='replace the data set that is there')


def main(arguments: argparse.Namespace) -> int:
    """Write the data set; see the module for the exit code."""
    try:
        from vla_runtime.recording.bag_reader import find_recordings
        from vla_tools.dataset.convert import convert

        result = convert(
            find_recordings(arguments.recordings),
            arguments.out,
            _wishes(arguments),
            force=arguments.force,
            progress=_Progress().over,
        )
    except ImportError as error:
        how = 'pip install pyarrow rosbags'
        print(f'error: {import_problem(error, "to-dataset", how)}', file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    print('\n'.join([f'{arguments.out}: {result.lines()[0]}', *result.lines()[1:]]))
    return 1 if result.left_out else 0


def _wishes(arguments: argparse.Namespace) -> DatasetOptions:
    from vla_runtime.files.package_files import share_folder
    from vla_runtime.robot.file import find_robot, load_robot
    from vla_tools.dataset.convert import DatasetOptions

    for name in ('frame_age', 'shortest'):
        value = getattr(arguments, name)
        if not 0.0 < value < 3600.0:
            option = name.replace('_', '-')
            raise ValueError(f'--{option} {value:g}: expected more than 0 and less than 3600')
    if arguments.task is not None and not arguments.task.strip():
        raise ValueError('--task: expected a task in plain words')
    robot = None
    if arguments.robot:
        robot = load_robot(find_robot(arguments.robot, share_folder() / 'config' / 'robots'))
    return DatasetOptions(
        robot=robot,
        namespace=arguments.namespace,
        only=arguments.only,
        fps=arguments.fps,
        task=arguments.task.strip() if arguments.task else None,
        measured_actions=arguments.actions == 'measured',
        frame_age_s=arguments.frame_age,
        shortest_s=arguments.shortest,
    )


class _Progress:
    """Progress bar over the frames of all episodes."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._bar = tqdm(unit='frame', leave=False, disable=None)

    def over(self, frames: Iterable[DatasetFrame], left: int) -> Iterator[DatasetFrame]:
        """Yield the frames; `left` are those of this episode and all after it."""
        self._bar.total = self._bar.n + left
        for frame in frames:
            yield frame
            self._bar.update()
