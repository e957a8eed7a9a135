"""The columns of state and action: names, units and kinds, from the folder and the options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args

import numpy as np

from vla_convert.checkpoints.feature_names import plain_joint_name
from vla_convert.checkpoints.folder_facts import FolderFacts
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.options import DatasetInfo, ExportOptions
from vla_convert.checkpoints.pose_options import declared_poses
from vla_runtime.bundle.schema import (
    ROTATION_LENGTH,
    STATISTICS_OF,
    ActionSpec,
    BundleSpec,
    PoseSpec,
    StateSpec,
    Unit,
)
from vla_runtime.bundle.statistics import apart_from_states
from vla_runtime.bundle.unit_doubts import unit_doubts
from vla_runtime.files.quotes import quoted
from vla_runtime.files.typed_yaml import did_you_mean
from vla_runtime.types import ActionKind

_UNIT_WORDS = ', '.join(get_args(Unit))


@dataclass(frozen=True)
class Columns:
    """State and action dimensions, in the order the policy was trained with."""

    state: tuple[StateSpec, ...]
    actions: tuple[ActionSpec, ...]
    poses: tuple[PoseSpec, ...] = ()


def resolve_columns(
    facts: FolderFacts, options: ExportOptions, dataset: DatasetInfo | None, missing: MissingFacts
) -> Columns | None:
    """Put names, units and kinds together; None once something missing is noted in `missing`."""
    state_names = _names(
        '--state-names',
        options.state_names,
        dataset.state_names if dataset else None,
        None,
        _length(facts, 'state'),
        missing,
    )
    action_names = _names(
        '--action-names',
        options.action_names,
        dataset.action_names if dataset else None,
        facts.action_names,
        _length(facts, 'actions'),
        missing,
    )
    state_units = _units(options.units, 'state', state_names, action_names, missing)
    action_units = _units(options.units, 'action', action_names, state_names, missing)
    if options.units is None:
        missing.ask('--units', f'unit of all dimensions, or NAME=UNIT for each: {_UNIT_WORDS}')
    declared = declared_poses(options, state_names, action_names, missing)
    poses = (*_poses(facts, state_names, action_names), *declared)
    for pose in poses:
        for group, units in (('state', state_units), ('action', action_units)):
            if units is not None:
                _measure_pose(pose, group, units, options.units or (), missing)
    in_pose = {name for pose in poses for name in pose.actions}
    deltas = _deltas(facts, options.deltas, action_names, missing)
    for pose in declared:
        _refuse_relative(pose, facts, action_names or (), missing)
    velocities = _known('--velocity', options.velocities, action_names, missing)
    targets = _known('--target', options.targets, action_names, missing)
    if not (state_names and action_names and state_units and action_units and deltas):
        return None
    both = [name for name in velocities if name in (options.deltas or ())]
    if both:
        missing.conflict(
            f'--velocity and --delta both name {", ".join(both)}: an action is a velocity or '
            'relative to the state'
        )
    steps = {name for pose in declared if pose.delta_from == 'step' for name in pose.actions}
    actions = []
    for index, name in enumerate(action_names):
        anchor = deltas[index]
        kind: ActionKind = 'absolute'
        if anchor is not None or name in steps:
            kind = 'delta'
        if name in velocities:
            if kind == 'delta' and name not in both:
                missing.conflict(f"--velocity names '{name}', which is relative to the state")
            kind = 'velocity'
        if name in targets and kind != 'absolute':
            other = 'is a velocity' if kind == 'velocity' else 'is relative to the state'
            missing.conflict(f"--target names '{name}', which {other}")
        if name in in_pose:
            anchor = None
        if anchor is not None and anchor >= len(state_names):
            missing.conflict(
                f"action '{name}' is relative to state dimension {anchor + 1}, but the state has "
                f'only {len(state_names)}'
            )
            return None
        relative_to = None if anchor is None or kind != 'delta' else state_names[anchor]
        actions.append(ActionSpec(name, action_units[name], kind, relative_to))
    return Columns(
        tuple(StateSpec(name, state_units[name]) for name in state_names), tuple(actions), poses
    )


def _refuse_relative(
    pose: PoseSpec, facts: FolderFacts, names: tuple[str, ...], missing: MissingFacts
) -> None:
    """Note a pose that the folder says is relative to the state, number by number."""
    relative = [
        name
        for name, anchor in zip(names, facts.deltas or (), strict=False)
        if anchor is not None and name in pose.actions
    ]
    if relative:
        option = '--pose-steps' if pose.delta_from == 'step' else f'--pose {pose.name}'
        missing.conflict(
            f'{option} names {", ".join(relative)}, but the folder says '
            f'{"they are" if len(relative) > 1 else "it is"} relative to the state: the policy '
            'gives differences from the state at the start of a chunk, number by number, and no '
            'rotations are composed'
        )


def _poses(
    facts: FolderFacts, state: tuple[str, ...] | None, actions: tuple[str, ...] | None
) -> tuple[PoseSpec, ...]:
    """Return the folder's poses under the names of their dimensions."""
    if state is None or actions is None:
        return ()
    found = []
    for pose in facts.poses:
        width = 3 + ROTATION_LENGTH[pose.form]
        names = actions[pose.action : pose.action + width]
        measured = () if pose.state is None else state[pose.state : pose.state + width]
        found.append(
            PoseSpec(
                name=pose.name,
                position=names[:3],  # type: ignore[arg-type]
                rotation=names[3:],
                form=pose.form,
                kind='delta' if pose.is_delta else 'absolute',
                frame='tool',
                state_position=measured[:3],
                state_rotation=measured[3:],
            )
        )
    return tuple(found)


def _measure_pose(
    pose: PoseSpec,
    group: str,
    units: dict[str, Unit],
    given: tuple[str, ...],
    missing: MissingFacts,
) -> None:
    """Give a pose's dimensions their units (matrix entries 1, positions m); refuse others.

    `rad` for all dimensions says nothing of a pose's positions, and `1` nothing at all: such
    actions may be parts of a scale.
    """
    angle: Unit = 'rad' if pose.form in ('axis_angle', 'euler') else '1'
    # The scale of steps makes metres of the actions alone.
    lengths: tuple[Unit, ...] = ('m',) if pose.delta_from == 'step' else ('m', 'mm')
    of_angles: tuple[Unit, ...] = ('rad', 'deg')
    of_lengths: tuple[Unit, ...] = get_args(Unit) if angle == '1' else ('m', 'mm')
    if pose.kind == 'velocity' and group == 'action':
        angle, lengths = 'rad/s', ('m/s',)
        of_angles, of_lengths = ('rad', 'deg', 'rad/s', 'deg/s'), ('m', 'mm', 'm/s')
    position, rotation = (
        (pose.position, pose.rotation)
        if group == 'action'
        else (pose.state_position, pose.state_rotation)
    )
    for names, right, of_others in (
        (position, lengths, of_angles),
        (rotation, (angle,), of_lengths),
    ):
        refused: dict[Unit, list[str]] = {}
        for name in names:
            # Unknown names are noted already.
            unit = units.get(name, '1')
            by_itself = {name, f'{group}:{name}'} & {text.rpartition('=')[0] for text in given}
            if unit not in ('1', *right) and (by_itself or unit not in of_others):
                refused.setdefault(unit, []).append(name)
            units[name] = unit if unit in right else right[0]
        for unit, wrong in refused.items():
            missing.conflict(
                f"--units says '{unit}' for the {group} {', '.join(wrong)}, but the "
                f"{'position' if names is position else 'rotation'} of the pose '{pose.name}' is "
                f"in '{right[0]}'"
                + ('; --pose-scale makes that of the actions' if pose.delta_from == 'step' else '')
            )


@dataclass(frozen=True)
class _Length:
    """Number of columns: exactly `least` where known, else at most `most`."""

    least: int | None
    most: int | None

    def describe(self) -> str:
        if self.least is not None:
            return f'the {self.least} '
        return f'the (at most {self.most}) ' if self.most is not None else 'the '


def _length(facts: FolderFacts, group: str) -> _Length:
    exact = facts.state_length if group == 'state' else facts.action_length
    if exact is not None:
        return _Length(exact, exact)
    # openpi's statistics may be padded, so they only bound the number of dimensions.
    sizes = [
        array.shape[-1]
        for key, array in (facts.statistics or {}).items()
        if key.startswith(f'{group}.')
    ]
    return _Length(None, min(sizes, default=None) if sizes else None)


def _names(
    option: str,
    given: tuple[str, ...] | None,
    in_dataset: tuple[str, ...] | None,
    stated: tuple[str, ...] | None,
    length: _Length,
    missing: MissingFacts,
) -> tuple[str, ...] | None:
    what = 'measured state' if option == '--state-names' else 'action'
    wanted = f'names of {length.describe()}{what} dimensions in training order, separated by commas'
    sources = {option: given, '--dataset': in_dataset, 'the folder': stated}
    known = {source: names for source, names in sources.items() if names is not None}
    if not known:
        missing.ask(option, wanted)
        return None
    (first, names), *others = known.items()
    for source, other in others:
        if not _same_names(names, other):
            missing.conflict(
                f'{first} says {", ".join(names)} but {source} says {", ".join(other)}'
            )
    least, most = length.least, length.most
    if (least is not None and len(names) < least) or (most is not None and len(names) > most):
        missing.conflict(
            f'{first} says {_count(len(names), "name")} for the {what} but the folder has '
            f'{"" if least is not None else "at most "}{_count(most, "dimension")}'
        )
        return None
    return names


def _count(number: int | None, what: str) -> str:
    return f'{number} {what}' if number == 1 else f'{number} {what}s'


def _same_names(names: Sequence[str], others: Sequence[str]) -> bool:
    return [plain_joint_name(name) for name in names] == [plain_joint_name(name) for name in others]


def _units(
    given: tuple[str, ...] | None,
    group: str,
    names: tuple[str, ...] | None,
    other_names: tuple[str, ...] | None,
    missing: MissingFacts,
) -> dict[str, Unit] | None:
    """Units of one group: `rad` for all, `gripper=1` for one, `state:x=m` for one group's."""
    if given is None or names is None:
        return None
    units: dict[str, Unit] = {}
    # A unit for all, then NAME=UNIT, then GROUP:NAME=UNIT: a later one replaces an earlier one.
    for text in sorted(given, key=lambda item: ('=' in item, ':' in item)):
        target, equals, unit = text.rpartition('=')
        prefix, colon, name = target.rpartition(':')
        if colon and prefix in ('state', 'action'):
            if prefix != group:
                continue
        else:
            name = target
        if not equals:
            units = dict.fromkeys(names, cast(Unit, unit))
        elif name in names:
            units[name] = cast(Unit, unit)
        elif other_names is None or name not in other_names or name != target:
            known = dict.fromkeys((*names, *(other_names or ())))
            hint = did_you_mean(name, known)
            missing.conflict(f"--units names '{target}', which is no dimension{hint}")
    still_open = [name for name in names if name not in units]
    if still_open:
        missing.ask('--units', f'unit of the {group} {", ".join(still_open)}: {_UNIT_WORDS}')
        return None
    return units


def _deltas(
    facts: FolderFacts,
    given: tuple[str, ...] | None,
    names: tuple[str, ...] | None,
    missing: MissingFacts,
) -> tuple[int | None, ...] | None:
    wanted = (
        'names of the actions that the policy was trained with relative to the state; --absolute '
        'if none'
    )
    if given is None or names is None:
        if facts.deltas is None and given is None:
            missing.ask('--delta', wanted)
        return facts.deltas
    known = _known('--delta', given, names, missing)
    by_folder = facts.deltas if facts.deltas is not None else (None,) * len(names)
    # A delta that only the user names is relative to the state of the same index.
    chosen = tuple(
        (index if anchor is None else anchor) if name in known else None
        for index, (name, anchor) in enumerate(zip(names, by_folder, strict=True))
    )
    stated = [name for name, anchor in zip(names, by_folder, strict=True) if anchor is not None]
    # More than the folder says may be in the data set alone: `ask_for_targets` looks at the ranges.
    if not set(stated) <= set(known):
        missing.conflict(
            f'{"--delta says " + ", ".join(given) if given else "--absolute is given"} but the '
            f'folder says {", ".join(stated)} {"are" if len(stated) > 1 else "is"} relative to the '
            'state'
        )
    return chosen


def _known(
    option: str, given: tuple[str, ...], names: tuple[str, ...] | None, missing: MissingFacts
) -> tuple[str, ...]:
    for name in given:
        if names is not None and name not in names:
            missing.conflict(
                f"{option} names '{name}', which is no action{did_you_mean(name, names)}"
            )
    return given


def ask_for_targets(
    spec: BundleSpec,
    statistics: Mapping[str, np.ndarray],
    targets: tuple[str, ...],
    stated_deltas: tuple[int | None, ...] | None,
    file: Path,
    missing: MissingFacts,
) -> None:
    """Ask about absolute actions whose statistics never come near the states they would command.

    No checkpoint says what its data set stored as actions; a velocity taken for a target sends the
    joint to about 0. `targets` names actions that are targets all the same.
    """
    _check_deltas(spec, statistics, stated_deltas, file, missing)
    apart = apart_from_states(spec, statistics)
    seen = [
        f'{quoted(name)} goes {ranges}' for name, ranges in apart.items() if name not in targets
    ]
    if seen:
        read = ', '.join(STATISTICS_OF[spec.normalisation.actions])
        missing.ask(
            '--target',
            f'names of the actions that are positions to reach. In {file} ({read}) '
            f'{"; ".join(seen)}: velocities do so, and deltas. Name all velocities with '
            '--velocity and their unit with --units action:NAME=UNIT, differences from the state '
            "at the start of a chunk with --delta, steps of an end effector's pose with "
            '--pose-steps. Other deltas from step to step are not supported: train on targets',
        )


def ask_about_units(
    spec: BundleSpec,
    statistics: Mapping[str, np.ndarray],
    given: tuple[str, ...] | None,
    file: Path,
    missing: MissingFacts,
) -> None:
    """Ask about units that the statistics are too small for, except those `given` by name."""
    sure = set()
    for text in given or ():
        target = text.rpartition('=')[0]
        group, colon, name = target.rpartition(':')
        for one in ('state', 'actions'):
            if colon and group in ('state', 'action') and not one.startswith(group):
                continue
            sure |= {(one, name if colon else target), (one, target)}
    # Too large numbers are only noted: a continuous joint or a motor may turn far.
    for doubt in (one for one in unit_doubts(spec, statistics, sure) if one.is_small):
        by_name = ','.join(f'{name}={doubt.unit}' for name in doubt.names)
        missing.ask(
            '--units',
            f'in {file} {doubt.describe()} Then say {doubt.other}. If it is {doubt.unit} all the '
            f'same, say so by name: {by_name}',
        )


def _check_deltas(
    spec: BundleSpec,
    statistics: Mapping[str, np.ndarray],
    stated: tuple[int | None, ...] | None,
    file: Path,
    missing: MissingFacts,
) -> None:
    """Refuse deltas that the folder does not make, unless some cannot be positions."""
    if stated is None:
        return
    in_pose = {name for pose in spec.poses for name in pose.actions}
    beyond = [
        action.name
        for action, by_folder in zip(spec.actions, stated, strict=True)
        if action.kind == 'delta' and by_folder is None and action.name not in in_pose
    ]
    as_positions = tuple(
        replace(action, kind='absolute', relative_to=None) if action.name in beyond else action
        for action in spec.actions
    )
    apart = apart_from_states(replace(spec, actions=as_positions), statistics)
    if beyond and not set(beyond) & set(apart):
        by_folder = [
            action.name for action, one in zip(spec.actions, stated, strict=True) if one is not None
        ]
        missing.conflict(
            f'--delta says {", ".join(beyond)} but the folder says '
            f'{"only " + ", ".join(by_folder) if by_folder else "that no action"} '
            f'{"are" if len(by_folder) > 1 else "is"} relative to the state, and the ranges in '
            f'{file} are those of positions'
        )


def cut_statistics(
    statistics: Mapping[str, np.ndarray] | None, columns: Columns
) -> dict[str, np.ndarray]:
    """Cut statistics to the named dimensions; openpi may pad them further."""
    lengths = {'state': len(columns.state), 'actions': len(columns.actions)}
    # Those of colour channels stay whole.
    return {
        key: array[..., : lengths.get(key.partition('.')[0])]
        for key, array in (statistics or {}).items()
    }
