"""Options of `vla_runtime export` that supply what a checkpoint's folder does not say.

Each is a field of `checkpoints.options.ExportOptions`.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vla_convert.checkpoints.options import LeRobotRelease
from vla_convert.checkpoints.pose_options import ROTATIONS
from vla_runtime.bundle.pose_rules import is_euler_axes
from vla_runtime.cli._numbers import at_least
from vla_runtime.family.listing import family_names, find_family
from vla_runtime.files.typed_yaml import did_you_mean
from vla_runtime.types import AdvantageTemplate, PoseFrame

if TYPE_CHECKING:
    from vla_convert.checkpoints.options import ExportOptions
    from vla_runtime.bundle.schema import CameraSpec

_ABSENT = '=absent'


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options, in groups by what they say."""
    _add_files(parser.add_argument_group('files that the folder may lack'))
    _add_columns(parser.add_argument_group('state and actions'))
    _add_training(parser.add_argument_group('how the policy was trained'))
    _add_sizes(parser.add_argument_group('sizes that tensors do not show'))


def _add_files(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        '--tokenizer',
        type=Path,
        metavar='FILE',
        help='tokenizer.json or tokenizer.model that the policy was trained with, or its folder',
    )
    group.add_argument(
        '--statistics', type=Path, metavar='FILE', help='norm_stats.json of an openpi policy'
    )
    group.add_argument(
        '--asset-id', metavar='ID', help='which of several assets/ID/norm_stats.json (openpi)'
    )
    group.add_argument(
        '--action-tokenizer',
        type=Path,
        metavar='FOLDER',
        help='tokenizer of actions that are tokens: tokenizer.json and processor_config.json',
    )
    group.add_argument(
        '--unnorm-key',
        metavar='KEY',
        help='data set whose statistics the actions are in, where the folder has several',
    )
    group.add_argument(
        '--base',
        type=Path,
        metavar='FOLDER',
        help='policy that an adapter (LoRA) was trained on; the adapter is merged into it',
    )
    group.add_argument(
        '--dataset',
        type=Path,
        metavar='FOLDER',
        help='LeRobot data set: names and rate from its meta/info.json',
    )


def _add_columns(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        '--state-names', type=_words, metavar='NAME,...', help='measured dimensions, training order'
    )
    group.add_argument(
        '--action-names', type=_words, metavar='NAME,...', help='action dimensions, training order'
    )
    group.add_argument(
        '--units',
        type=_words,
        metavar='UNIT,NAME=UNIT,...',
        help='a unit for all, and for single ones (state:NAME=UNIT for one of two like names): '
        'rad deg m mm rad/s deg/s m/s 1 percent',
    )
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument(
        '--delta',
        dest='deltas',
        type=_words,
        metavar='NAME,...',
        help='actions relative to the state',
    )
    kinds.add_argument(
        '--absolute',
        dest='deltas',
        action='store_const',
        const=(),
        help='no action is relative to the state',
    )
    group.add_argument(
        '--velocity',
        dest='velocities',
        type=_words,
        metavar='NAME,...',
        default=(),
        help='actions that are velocities',
    )
    group.add_argument(
        '--target',
        dest='targets',
        type=_words,
        metavar='NAME,...',
        default=(),
        help='actions that are positions to reach, where statistics speak against it',
    )
    group.add_argument(
        '--pose',
        dest='poses',
        action=_AppendPose,
        type=_pose,
        metavar='NAME=ACTION,...',
        default={},
        help="actions that are one end effector's pose: x, y, z and the rotation's numbers; once "
        'for each end effector. Name them all in --velocity for a twist, in --delta for '
        'differences from the pose at the start of a chunk',
    )
    group.add_argument(
        '--pose-rotation',
        type=_rotation,
        metavar='FORM',
        help=f'form of the rotation in --pose, or in poses of the folder: {", ".join(ROTATIONS)}',
    )
    group.add_argument(
        '--pose-frame',
        choices=get_args(PoseFrame),
        help='axes that the deltas of --pose are along',
    )
    group.add_argument(
        '--pose-steps',
        type=_words,
        metavar='NAME,...',
        help="the six actions that are steps of an end effector's pose, x, y, z and axis-angle, "
        "each from where the one before ends (LIBERO's controller)",
    )
    group.add_argument(
        '--pose-state',
        type=_words,
        metavar='NAME,...',
        help='dimensions of the state that are the pose of --pose or --pose-steps, measured',
    )
    group.add_argument(
        '--pose-scale',
        type=_scale,
        metavar='M,RAD',
        help='metres and radians that 1 is of --pose-steps: 1,1, or 0.05,0.5 for LIBERO',
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument('--rate-hz', type=float, metavar='HZ', help='actions a second')
    group.add_argument(
        '--cameras',
        type=_cameras,
        metavar='NAME,...',
        help=f"names in the network's order; NAME{_ABSENT} is always a masked black image",
    )
    group.add_argument(
        '--prompt-template',
        metavar='NAME',
        help=f'layout of the prompt that the policy was trained with: {_templates()}',
    )
    group.add_argument(
        '--advantage',
        choices=get_args(AdvantageTemplate),
        help='where the advantage tag was in training (default: trained without)',
    )
    group.add_argument(
        '--adapt-to-pi',
        type=_yes_no,
        metavar='{yes,no}',
        help="openpi's adapt_to_pi in training, for policies of ALOHA's 14 joints",
    )
    group.add_argument(
        '--embodiment',
        metavar='TAG',
        help='robot that a policy of several was trained for (default: what the folder says)',
    )
    group.add_argument(
        '--lerobot',
        choices=get_args(LeRobotRelease),
        help='release of LeRobot that trained the policy, where the folder is asked about: 0.4 '
        '(0.4.0 to 0.4.4) or 0.5 (0.5.0)',
    )
    group.add_argument(
        '--denoise-steps',
        type=at_least(1),
        metavar='N',
        help="Euler steps (default: the checkpoint's, or its family's usual number)",
    )


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    group.add_argument('--horizon', type=at_least(1), metavar='N', help='actions of a chunk')
    group.add_argument(
        '--prompt-length',
        type=at_least(1),
        metavar='N',
        help="tokens of the padded prompt (default for openpi: its family's usual one)",
    )
    group.add_argument(
        '--image-size',
        type=_size,
        metavar='HEIGHTxWIDTH',
        help="of the cameras' images in pixels, where a policy keeps their aspect",
    )
    group.add_argument(
        '--vision-heads', type=at_least(1), metavar='N', help="the vision tower's attention heads"
    )
    group.add_argument(
        '--kv-heads', type=at_least(1), metavar='N', help="the language model's key/value heads"
    )
    group.add_argument(
        '--heads',
        type=_counts,
        metavar='PART=N,...',
        default={},
        help='attention heads of further parts of the network, named when they are asked for',
    )


def _templates() -> str:
    """Families with a choice of prompt layouts, and their names."""
    families = [find_family(name) for name in family_names()]
    return '; '.join(
        f'{family.name}: {", ".join(family.templates)}'
        for family in families
        if len(family.templates) > 1
    )


def export_options(arguments: argparse.Namespace) -> ExportOptions:
    """Return the options that the arguments give."""
    from vla_convert.checkpoints.options import ExportOptions

    return ExportOptions(
        **{one.name: getattr(arguments, one.name) for one in fields(ExportOptions)}
    )


def _yes_no(text: str) -> bool:
    if text not in ('yes', 'no'):
        raise argparse.ArgumentTypeError(f"'{text}' is neither yes nor no")
    return text == 'yes'


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(','))
    if not all(words):
        raise argparse.ArgumentTypeError(f"'{text}' has an empty entry")
    return words


class _AppendPose(argparse.Action):
    """Collects the poses of several `--pose`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name, words = values
        if name in namespace.poses:
            raise argparse.ArgumentError(self, f"'{name}' is given twice")
        namespace.poses = {**namespace.poses, name: words}


def _pose(text: str) -> tuple[str, tuple[str, ...]]:
    name, equals, words = text.partition('=')
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(
            f"'{text}' is not NAME=ACTION,..., such as tool=x,y,z,rx,ry,rz"
        )
    return name.strip(), _words(words)


def _rotation(text: str) -> str:
    form, _, axes = text.partition('_')
    if text in ROTATIONS or (form == 'euler' and is_euler_axes(axes)):
        return text
    raise argparse.ArgumentTypeError(
        f"'{text}' is no form of a rotation. Euler angles are euler_ and s or r, then three axes, "
        'such as euler_sxyz (s: the axes are fixed, r: they turn along)'
        f'{did_you_mean(text, ROTATIONS)}'
    )


def _scale(text: str) -> tuple[float, float]:
    try:
        metres, radians = (float(word) for word in _words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not M,RAD, such as 0.05,0.5") from None
    if not (0.0 < metres < math.inf and 0.0 < radians < math.inf):
        raise argparse.ArgumentTypeError(f"'{text}': both numbers must be above 0")
    return metres, radians


def _size(text: str) -> tuple[int, int]:
    height, _, width = text.partition('x')
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise argparse.ArgumentTypeError(f"'{text}' is not HEIGHTxWIDTH, such as 480x640")
    return int(height), int(width)


def _counts(text: str) -> dict[str, int]:
    counts = {}
    for word in _words(text):
        part, _, count = word.partition('=')
        if not part or not count.isdecimal() or not int(count):
            raise argparse.ArgumentTypeError(f"'{word}' is not PART=N with N above 0")
        counts[part] = int(count)
    return counts


def _cameras(text: str) -> tuple[CameraSpec, ...]:
    from vla_runtime.bundle.schema import CameraSpec

    return tuple(
        CameraSpec(word.removesuffix(_ABSENT), present=not word.endswith(_ABSENT))
        for word in _words(text)
    )
