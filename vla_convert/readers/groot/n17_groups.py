"""Columns of GR00T N1.7's state and actions: groups of dimensions in order, with their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_convert.checkpoints.folder_facts import ExportError, FolderPose
from vla_runtime.files.json_file import JsonMapping

# A `delta` of NVIDIA's is one of the data set's own, from step to step: it is no target.
_KINDS = ('absolute', 'relative')
_POSE_WIDTH = 9


@dataclass(frozen=True)
class GroupedColumns:
    """Dimensions of state and actions.

    Attributes:
        statistics: `state.low`, `state.high`, `actions.low` and `actions.high`; actions (H, n)
            where a range depends on the step.
        deltas: state column that each action is relative to; None: absolute.
        horizon: real actions of a chunk.
        angles: groups of the state that become sines and cosines: first dimension and number.
    """

    statistics: Mapping[str, np.ndarray]
    state: int
    actions: int
    deltas: tuple[int | None, ...]
    horizon: int
    poses: tuple[FolderPose, ...] = ()
    angles: tuple[tuple[int, int], ...] = ()


def grouped_columns(
    statistics: JsonMapping,
    modality: JsonMapping,
    *,
    percentiles: bool,
    relative: bool,
    sines: bool = False,
) -> GroupedColumns:
    """Put the groups together.

    Args:
        statistics: `state`, `action` and `relative_action`, by group.
        percentiles: ranges between the 1st and 99th percentile, except relative groups
            (smallest to largest).
        relative: groups declared so are relative to the state.
        sines: groups declared so become sines and cosines.

    Raises:
        JsonError, ExportError: missing or contradictory entries, or poses that are not 9 numbers.
    """
    usual = ('q01', 'q99') if percentiles else ('min', 'max')
    _refuse_spread(modality)
    places, state = _state_ranges(statistics, modality, usual)
    action = modality.mapping('action')
    names, configs = action.words('modality_keys') or (), action.mappings('action_configs')
    if len(configs) != len(names):
        raise action.error('action_configs', f'{len(configs)} for {len(names)} groups')
    steps = action.get('delta_indices', list)
    horizon = len(steps)
    if steps != list(range(horizon)):
        raise action.error('delta_indices', f'{steps} where 0, 1, 2 and so on are expected')
    ranges, column = [], 0
    deltas: list[int | None] = []
    poses: list[FolderPose] = []
    for name, config in zip(names, configs, strict=True):
        kind = _word(config, 'rep')
        if kind not in _KINDS:
            raise config.error('rep', f"group '{name}': '{kind}' is not one of {', '.join(_KINDS)}")
        is_relative = relative and kind == 'relative'
        group = statistics.mapping('relative_action' if is_relative else 'action').mapping(name)
        low, high = _range(group, ('min', 'max') if is_relative else usual)
        width = low.shape[-1]
        start = _reference(config, name, width, places, statistics) if is_relative else None
        if _word(config, 'type') == 'eef':
            _check_pose(config, name, width)
            measured = _measured_pose(config, name, places, statistics)
            poses.append(FolderPose(name, column, measured, 'rotation_6d_rows', is_relative))
        elif is_relative and _word(config, 'type') != 'non_eef':
            raise config.error('type', f"group '{name}' is neither EEF nor NON_EEF")
        if low.ndim == 2 and len(low) < horizon:
            raise group.error('min', f'{len(low)} steps where {horizon} are expected')
        if low.ndim == 2:
            low, high = low[:horizon], high[:horizon]
        ranges.append((low, high))
        deltas += [None] * width if start is None else range(start, start + width)
        column += width
    if not state or not ranges or not horizon:
        raise ExportError(f'{modality.path}: {modality.field} has no state, actions or steps')
    return GroupedColumns(
        statistics={
            'state.low': np.concatenate([low for low, _ in state]),
            'state.high': np.concatenate([high for _, high in state]),
            'actions.low': _joined([low for low, _ in ranges], horizon),
            'actions.high': _joined([high for _, high in ranges], horizon),
        },
        state=sum(low.shape[-1] for low, _ in state),
        actions=column,
        deltas=tuple(deltas),
        horizon=horizon,
        poses=tuple(poses),
        angles=_angles(modality.mapping('state'), places, statistics) if sines else (),
    )


def _angles(
    state: JsonMapping, places: Mapping[str, int], statistics: JsonMapping
) -> tuple[tuple[int, int], ...]:
    """Return the groups of the state that go in as sines and cosines (JsonError)."""
    found = []
    for name in state.words('sin_cos_embedding_keys') or ():
        if name not in places:
            raise state.error('sin_cos_embedding_keys', f"the state has no group '{name}'")
        count = len(statistics.mapping('state').mapping(name).get('min', list))
        found.append((places[name], count))
    return tuple(sorted(found))


def _refuse_spread(modality: JsonMapping) -> None:
    """Refuse groups that are normalised by mean and spread (JsonError)."""
    for part in (modality.mapping('state'), modality.mapping('action')):
        if by_spread := part.words('mean_std_embedding_keys'):
            raise part.error(
                'mean_std_embedding_keys',
                f'{", ".join(by_spread)}: groups normalised by mean and spread are not supported',
            )


def _state_ranges(
    statistics: JsonMapping, modality: JsonMapping, usual: tuple[str, str]
) -> tuple[dict[str, int], list[tuple[np.ndarray, np.ndarray]]]:
    """Return the first column of each group of the state by name, and its ranges in order."""
    places: dict[str, int] = {}
    ranges, count = [], 0
    for name in modality.mapping('state').words('modality_keys') or ():
        group = statistics.mapping('state').mapping(name)
        low, high = _range(group, usual)
        if low.ndim != 1:
            raise group.error(
                usual[0], f'has shape {list(low.shape)}; one number for each dimension is expected'
            )
        places[name], count = count, count + low.shape[-1]
        ranges.append((low, high))
    return places, ranges


def flat_columns(
    path: Path, statistics: Mapping[str, np.ndarray], *, state: int, actions: int, horizon: int
) -> GroupedColumns:
    """Columns of a policy that LeRobot normalises as two vectors (`observation.state.min`).

    Raises ExportError: statistics missing or of another length.
    """
    found = {}
    for feature, group, length in (
        ('observation.state', 'state', state),
        ('action', 'actions', actions),
    ):
        for theirs, ours in (('min', 'low'), ('max', 'high')):
            values = statistics.get(f'{feature}.{theirs}')
            if values is None or values.shape != (length,):
                shape = 'none' if values is None else f'shape {list(values.shape)}'
                raise ExportError(
                    f"{path}: tensor '{feature}.{theirs}' has {shape} where [{length}] is "
                    'expected; a policy that was never trained on a data set (a base model) has '
                    'none and cannot drive a robot yet'
                )
            found[f'{group}.{ours}'] = values.astype(np.float32)
    return GroupedColumns(found, state, actions, (None,) * actions, horizon)


def _range(group: JsonMapping, names: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest numbers of a group, (n,) or (steps, n) float32."""
    low, high = (_numbers(group, name) for name in names)
    if low.shape != high.shape or low.ndim not in (1, 2):
        raise group.error(names[0], f'has shape {low.shape}, {names[1]} has {high.shape}')
    return low, high


def _numbers(group: JsonMapping, name: str) -> np.ndarray:
    values: Any = group.get(name, list)
    try:
        return np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError):
        raise group.error(name, 'where numbers are expected') from None


def _joined(parts: list[np.ndarray], horizon: int) -> np.ndarray:
    """Parts (n,) or (horizon, n) side by side, by step if one of them is."""
    if all(part.ndim == 1 for part in parts):
        return np.concatenate(parts)
    return np.concatenate(
        [np.broadcast_to(part, (horizon, part.shape[-1])) for part in parts], axis=1
    )


def _reference(
    config: JsonMapping, name: str, width: int, places: Mapping[str, int], statistics: JsonMapping
) -> int:
    """Return the first column of the state's group that a relative group is relative to."""
    key = config.get('state_key', str, None) or name
    if key not in places:
        raise config.error('state_key', f"group '{name}': the state has no group '{key}'")
    length = len(statistics.mapping('state').mapping(key).get('min', list))
    if length != width:
        raise config.error('state_key', f"'{key}' has {length} numbers, '{name}' {width}")
    return places[key]


def _measured_pose(
    config: JsonMapping, name: str, places: Mapping[str, int], statistics: JsonMapping
) -> int | None:
    """Return the first column of the state's pose of a group; None where the state has none."""
    key = config.get('state_key', str, None) or name
    if key not in places:
        return None
    length = len(statistics.mapping('state').mapping(key).get('min', list))
    return places[key] if length == _POSE_WIDTH else None


def _check_pose(config: JsonMapping, name: str, width: int) -> None:
    """Refuse a pose that is no position and two rows of a matrix, 9 numbers (JsonError)."""
    form = _word(config, 'format')
    if width != _POSE_WIDTH or form not in ('', 'default', 'xyz_rot6d', 'xyz+rot6d'):
        raise config.error(
            'format',
            f"group '{name}': a pose of an end effector has {_POSE_WIDTH} numbers, x, y, z and two "
            f"rows of a matrix (XYZ_ROT6D); this one has {width} in the format '{form}'",
        )


def _word(config: JsonMapping, key: str) -> str:
    """A word of an action group's configuration, in small letters (`ActionType.NON_EEF` too)."""
    return str(config.get(key, str, '')).rpartition('.')[2].lower()
