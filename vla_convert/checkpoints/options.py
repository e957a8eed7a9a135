"""Facts the user adds to a checkpoint folder, and the LeRobot data set that can supply some."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from vla_convert.checkpoints.feature_names import feature_names
from vla_convert.checkpoints.folder_facts import TOKENIZER_FILES, ExportError, find_tokenizer
from vla_runtime.bundle.schema import CameraSpec, Unit
from vla_runtime.files.input_files import read_text
from vla_runtime.files.json_file import LARGEST_JSON, JsonError, JsonMapping, read_json
from vla_runtime.files.typed_yaml import did_you_mean
from vla_runtime.types import AdvantageTemplate, PoseFrame

# Releases of LeRobot that treat state and images otherwise than those before and after them:
# 0.4.0 to 0.4.4, and 0.5.0.
LeRobotRelease = Literal['0.4', '0.5']


_INFO = Path('meta/info.json')
# Options that not every policy has a use for.
_FOR_SOME = (
    *('--tokenizer', '--statistics', '--asset-id', '--action-tokenizer', '--unnorm-key'),
    *('--image-size', '--prompt-length', '--prompt-template', '--advantage', '--vision-heads'),
    *('--kv-heads', '--adapt-to-pi', '--embodiment', '--lerobot'),
)
# Units in words.
_SHORT = {
    'radian': 'rad',
    'degree': 'deg',
    'metre': 'm',
    'meter': 'm',
    'millimetre': 'mm',
    'millimeter': 'mm',
    'percentage': 'percent',
    '%': 'percent',
}


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export; each is optional, and the user is asked for facts the folder lacks.

    `vla_runtime export --help` says what each means.

    Attributes:
        tokenizer: `*.json` or `*.model`, or the folder that holds one.
        units: a unit for all dimensions and `name=unit` for single ones.
        image_size: (height, width) in pixels.
        deltas: actions that are relative to the state; () says none is.
        poses: pose name to the actions of an end effector's pose.
        pose_rotation: form of the rotation in `poses`, or in the folder's own where it does not
            show it: a `RotationForm`, or `euler_` and axes.
        pose_scale: metres and radians that 1 means in `pose_steps`.
        heads: part of the network (the family's name) to its attention heads.
    """

    name: str | None = None
    tokenizer: Path | None = None
    statistics: Path | None = None
    asset_id: str | None = None
    action_tokenizer: Path | None = None
    unnorm_key: str | None = None
    adapt_to_pi: bool | None = None
    dataset: Path | None = None
    state_names: tuple[str, ...] | None = None
    action_names: tuple[str, ...] | None = None
    units: tuple[str, ...] | None = None
    rate_hz: float | None = None
    cameras: tuple[CameraSpec, ...] | None = None
    image_size: tuple[int, int] | None = None
    deltas: tuple[str, ...] | None = None
    velocities: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    poses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pose_rotation: str | None = None
    pose_frame: PoseFrame | None = None
    pose_steps: tuple[str, ...] | None = None
    pose_state: tuple[str, ...] | None = None
    pose_scale: tuple[float, float] | None = None
    horizon: int | None = None
    denoise_steps: int | None = None
    prompt_length: int | None = None
    prompt_template: str | None = None
    advantage: AdvantageTemplate | None = None
    vision_heads: int | None = None
    kv_heads: int | None = None
    heads: Mapping[str, int] = field(default_factory=dict)
    embodiment: str | None = None
    lerobot: LeRobotRelease | None = None
    base: Path | None = None

    def __post_init__(self) -> None:
        if self.tokenizer is not None and self.tokenizer.is_dir():
            object.__setattr__(self, 'tokenizer', _tokenizer_in(self.tokenizer))
        if self.units is not None:
            object.__setattr__(self, 'units', tuple(map(_in_short, self.units)))
        words = get_args(Unit)
        for text in self.units or ():
            unit = text.rpartition('=')[2]
            if unit not in words:
                raise ExportError(
                    f"--units says '{unit}', which is no unit{did_you_mean(unit, words)}"
                )

    @property
    def reader_options(self) -> tuple[str, ...]:
        """Options for some policies that are given, as `MissingFacts` names them."""
        given = [one for one in _FOR_SOME if getattr(self, one[2:].replace('-', '_')) is not None]
        return (*given, *(f'--heads {part}=N' for part in self.heads))


@dataclass(frozen=True)
class DatasetInfo:
    """Facts of a LeRobot data set's meta/info.json, None where it lacks one, and its tasks.

    `images` names image and video features, () where it lists none.
    """

    state_names: tuple[str, ...] | None
    action_names: tuple[str, ...] | None
    rate_hz: float | None
    tasks: tuple[str, ...] = ()
    images: tuple[str, ...] = ()


def read_dataset(folder: Path | None) -> DatasetInfo | None:
    """Read the data set of `--dataset`, if one is given (ExportError, as `read_dataset_info`)."""
    if folder is None:
        return None
    if not folder.exists():
        raise ExportError(f'--dataset says {folder}, but there is no such folder')
    try:
        return read_dataset_info(folder)
    except (ExportError, JsonError) as error:
        raise ExportError(f'--dataset: {error}') from None


def read_dataset_info(path: Path) -> DatasetInfo:
    """Read names and rate of a LeRobot data set, from its folder or meta/info.json.

    Names that cannot be understood are left out. Raises ExportError: no such file, or another
    form.
    """
    if path.is_file() and path.suffix != '.json':
        raise ExportError(_no_data_set(path, f"is a '{path.suffix}' file"))
    if path.is_dir():
        folder, path = path, path / _INFO
        if not os.path.lexists(path):
            raise ExportError(_no_data_set(folder, f'has no {_INFO}'))
    info = read_json(path)
    features = info.mapping('features')
    rate_hz = info.get('fps', (int, float), None)
    if rate_hz is not None and not 0.0 < rate_hz < math.inf:
        raise info.error('fps', f'{rate_hz} where a number above 0 is expected')
    return DatasetInfo(
        state_names=_names(features, 'observation.state', 'state'),
        action_names=_names(features, 'action', 'actions'),
        rate_hz=None if rate_hz is None else float(rate_hz),
        tasks=_tasks(path.parent),
        images=tuple(
            key
            for key, feature in features.values.items()
            if isinstance(feature, Mapping) and feature.get('dtype') in ('image', 'video')
        ),
    )


def _no_data_set(path: Path, why: str) -> str:
    return (
        f'{path} {why}: expected the folder of a LeRobot data set. Convert the data set to '
        "LeRobot's form (HDF5, RLDS and Zarr do not say what their columns are), or give "
        '--state-names, --action-names and --rate-hz in place of --dataset'
    )


def _tasks(meta: Path) -> tuple[str, ...]:
    """Return the instructions of a data set; () where they are not found, or not readable."""
    lines, table = meta / 'tasks.jsonl', meta / 'tasks.parquet'
    try:
        if lines.is_file():
            written = read_text(lines, LARGEST_JSON).splitlines()
            rows = [json.loads(line) for line in written if line.strip()]
            return tuple(row['task'] for row in rows if isinstance(row.get('task'), str))
        if table.is_file():
            # In every environment that writes data sets; the others do without the tasks.
            import pyarrow.parquet as parquet

            columns = parquet.read_table(table).to_pydict()
            words = [column for column in columns.values() if column and type(column[0]) is str]
            return tuple(words[0]) if words else ()
    except (OSError, ValueError, AttributeError, KeyError, ImportError):
        pass
    return ()


def _names(features: JsonMapping, *keys: str) -> tuple[str, ...] | None:
    """Return the names of the first feature that is there; openpi calls it otherwise."""
    for key in keys:
        feature = features.values.get(key)
        if isinstance(feature, Mapping):
            shape = feature.get('shape')
            length = shape[0] if isinstance(shape, list) and len(shape) == 1 else None
            return feature_names(feature.get('names'), length if type(length) is int else None)
    return None


def _tokenizer_in(folder: Path) -> Path:
    found = find_tokenizer(folder)
    if found is None:
        raise ExportError(
            f'--tokenizer says {folder}, which has neither {" nor ".join(TOKENIZER_FILES)}; give '
            'the folder, or the file, of the model that the policy was trained from'
        )
    return found


def _in_short(text: str) -> str:
    """Return a unit, or `name=unit`, with the unit's short name: `radians/s` is `rad/s`."""
    name, equals, unit = text.rpartition('=')
    word, slash, second = unit.partition('/')
    word = word.lower()
    short = _SHORT.get(word, _SHORT.get(word.removesuffix('s')))
    return f'{name}{equals}{short}{slash}{second}' if short else text
