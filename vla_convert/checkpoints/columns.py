"""The columns of state and action: names, units and kinds, from the folder and the options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

import numpy as np

from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.feature_names import plain_joint_name
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.pose_options import declared_poses, six_number_form
from vla_runtime.bundle.schema import (
    STATISTICS_OF,
    ActionSpec,
    BundleSpec,
    PoseSpec,
    StateSpec,
    Unit,
)
from vla_runtime.bundle.statistics import apart_from_states, image_group
from vla_runtime.bundle.unit_doubts import unit_doubts
from vla_runtime.files.quotes import quoted
from vla_runtime.files.typed_yaml import did_you_mean
from vla_runtime.types import ROTATION_LENGTH, ActionKind

_UNIT_WORDS = ', '.join(get_args(Unit))


def settle_columns(draft: Draft) -> None:
    """Put names, units and kinds of state and actions together, in the order of the training."""
    options, missing = draft.options, draft.missing
    state_names, state_place = _names(draft, 'state', None)
    action_names, action_place = _names(draft, 'actions', draft.action_names)
    state_units = _units(options.units, 'state', state_names, action_names, missing)
    action_units = _units(options.units, 'action', action_names, state_names, missing)
    if options.units is None:
        missing.ask('--units', f'unit of all dimensions, or NAME=UNIT for each: {_UNIT_WORDS}')
    declared = declared_poses(draft, state_names, action_names)
    poses = (*_folder_poses(draft, state_names, action_names), *declared)
    for pose in poses:
        for group, units in (('state', state_units), ('action', action_units)):
            if units is not None:
                _measure_pose(pose, group, units, options.units or (), missing)
    deltas = _deltas(draft, action_names)
    for pose in declared:
        _refuse_relative(pose, draft, action_names or ())
    for option, names in (('--velocity', options.velocities), ('--target', options.targets)):
        _refuse_unknown(option, names, action_names, missing)
    if not (state_names and action_names and state_units and action_units and deltas):
        return
    actions = _actions(draft, action_names, action_units, state_names, deltas, poses)
    draft.write(state_place, state=tuple(StateSpec(n, state_units[n]) for n in state_names))
    draft.write(action_place, actions=actions)
    draft.write('--pose' if declared else draft.places.get('folder_poses', ''), poses=poses)


def _actions(
    draft: Draft,
    names: tuple[str, ...],
    units: dict[str, Unit],
    state_names: tuple[str, ...],
    deltas: tuple[int | None, ...],
    poses: tuple[PoseSpec, ...],
) -> tuple[ActionSpec, ...]:
    """Return the actions with their kinds; note kinds that contradict each other."""
    options, missing = draft.options, draft.missing
    both = [name for name in options.velocities if name in (options.deltas or ())]
    if both:
        missing.conflict(
            f'--velocity and --delta both name {", ".join(both)}: an action is a velocity or '
            'relative to the state'
        )
    in_pose = {name for pose in poses for name in pose.actions}
    steps = {name for pose in poses if pose.delta_from == 'step' for name in pose.actions}
    actions = []
    for column, (name, anchor) in enumerate(zip(names, deltas, strict=True)):
        kind: ActionKind = 'delta' if anchor is not None or name in steps else 'absolute'
        if name in options.velocities:
            if kind == 'delta' and name not in both:
                missing.conflict(f"--velocity names '{name}', which is relative to the state")
            kind = 'velocity'
        if name in options.targets and kind != 'absolute':
            other = 'is a velocity' if kind == 'velocity' else 'is relative to the state'
            missing.conflict(f"--target names '{name}', which {other}")
        relative_to = None
        if anchor is not None and name not in in_pose:
            if anchor >= len(state_names):
                missing.conflict(
                    f"action '{name}' is relative to state dimension {anchor + 1}, but the state "
                    f'has only {len(state_names)}'
                )
            elif kind == 'delta':
                relative_to = state_names[anchor]
        actions.append(ActionSpec(name, units[name], kind, relative_to, draft.switches.get(column)))
    return tuple(actions)


def _refuse_relative(pose: PoseSpec, draft: Draft, names: tuple[str, ...]) -> None:
    """Note a pose that the folder says is relative to the state, number by number."""
    relative = [
        name
        for name, anchor in zip(names, draft.deltas or (), strict=False)
        if anchor is not None and name in pose.actions
    ]
    if relative:
        option = '--pose-steps' if pose.delta_from == 'step' else f'--pose {pose.name}'
        draft.missing.conflict(
            f'{option} names {", ".join(relative)}, but the folder says '
            f'{"they are" if len(relative) > 1 else "it is"} relative to the state: the policy '
            'gives differences from the state at the start of a chunk, number by number, and no '
            'rotations are composed'
        )


def _folder_poses(
    draft: Draft, state: tuple[str, ...] | None, actions: tuple[str, ...] | None
) -> tuple[PoseSpec, ...]:
    """Return the folder's poses under the names of their dimensions."""
    unsaid = any(pose.form is None for pose in draft.folder_poses)
    said = six_number_form(draft) if unsaid else None
    if state is None or actions is None:
        return ()
    found = []
    for pose in draft.folder_poses:
        form = pose.form or said
        if form is None:
            continue
        width = 3 + ROTATION_LENGTH[form]
        names = actions[pose.action : pose.action + width]
        measured = () if pose.state is None else state[pose.state : pose.state + width]
        found.append(
            PoseSpec(
                name=pose.name,
                position=names[:3],  # type: ignore[arg-type]
                rotation=names[3:],
                form=form,
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


def _lengths(draft: Draft, group: str) -> tuple[int, int | None]:
    """Return the least and the greatest number of columns; None: any."""
    exact = draft.state_length if group == 'state' else draft.action_length
    if exact is not None:
        return exact, exact
    # Statistics may be padded, so they only bound the number of dimensions.
    sizes = [
        array.shape[-1]
        for key, array in (draft.statistics or {}).items()
        if key.startswith(f'{group}.')
    ]
    return 0, min(sizes, default=None)


def _names(
    draft: Draft, group: str, stated: tuple[str, ...] | None
) -> tuple[tuple[str, ...] | None, str]:
    """Return the names of a group and their place; None once they are noted missing."""
    options, dataset, missing = draft.options, draft.dataset, draft.missing
    of_state = group == 'state'
    option, what = ('--state-names', 'measured state') if of_state else ('--action-names', 'action')
    given = options.state_names if of_state else options.action_names
    in_dataset = None
    if dataset is not None:
        in_dataset = dataset.state_names if of_state else dataset.action_names
    least, most = _lengths(draft, group)
    sources = {option: given, '--dataset': in_dataset, 'the folder': stated}
    known = {source: names for source, names in sources.items() if names is not None}
    if not known:
        number = f'{most} ' if least == most else f'(at most {most}) ' if most is not None else ''
        missing.ask(
            option,
            f'names of the {number}{what} dimensions in training order, separated by commas',
        )
        return None, ''
    (first, names), *others = known.items()
    for source, other in others:
        if not _same_names(names, other):
            missing.conflict(
                f'{first} says {", ".join(names)} but {source} says {", ".join(other)}'
            )
    if len(names) < least or (most is not None and len(names) > most):
        missing.conflict(
            f'{first} says {_count(len(names), "name")} for the {what} but the folder has '
            f'{"" if least else "at most "}{_count(most, "dimension")}'
        )
        return None, ''
    return names, draft.places['action_names'] if first == 'the folder' else first


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


def _deltas(draft: Draft, names: tuple[str, ...] | None) -> tuple[int | None, ...] | None:
    """Return per action the state's column that it is relative to; None once it is asked for."""
    given, missing = draft.options.deltas, draft.missing
    if given is None or names is None:
        if draft.deltas is None and given is None:
            missing.ask(
                '--delta',
                'names of the actions that the policy was trained with relative to the state; '
                '--absolute if none',
            )
        return draft.deltas
    _refuse_unknown('--delta', given, names, missing)
    by_folder = draft.deltas if draft.deltas is not None else (None,) * len(names)
    # A delta that only the user names is relative to the state of the same index.
    chosen = tuple(
        (index if anchor is None else anchor) if name in given else None
        for index, (name, anchor) in enumerate(zip(names, by_folder, strict=True))
    )
    stated = [name for name, anchor in zip(names, by_folder, strict=True) if anchor is not None]
    # More than the folder says may be in the data set alone: `ask_for_targets` looks at the ranges.
    if not set(stated) <= set(given):
        missing.conflict(
            f'{"--delta says " + ", ".join(given) if given else "--absolute is given"} but the '
            f'folder says {", ".join(stated)} {"are" if len(stated) > 1 else "is"} relative to the '
            'state'
        )
    return chosen


def _refuse_unknown(
    option: str, given: tuple[str, ...], names: tuple[str, ...] | None, missing: MissingFacts
) -> None:
    """Note names that are no action's."""
    for name in given:
        if names is not None and name not in names:
            missing.conflict(
                f"{option} names '{name}', which is no action{did_you_mean(name, names)}"
            )


def ask_for_targets(spec: BundleSpec, statistics: Mapping[str, np.ndarray], draft: Draft) -> None:
    """Ask about absolute actions whose statistics never come near the states they would command.

    No checkpoint says what its data set stored as actions; a velocity taken for a target sends the
    joint to about 0. `--target` names actions that are targets all the same.
    """
    _check_deltas(spec, statistics, draft)
    apart = apart_from_states(spec, statistics)
    seen = [
        f'{quoted(name)} goes {ranges}'
        for name, ranges in apart.items()
        if name not in draft.options.targets
    ]
    if seen:
        read = ', '.join(STATISTICS_OF[spec.normalisation.actions])
        draft.missing.ask(
            '--target',
            f'names of the actions that are positions to reach. In {_file(draft)} ({read}) '
            f'{"; ".join(seen)}: velocities do so, and deltas. Name all velocities with '
            '--velocity and their unit with --units action:NAME=UNIT, differences from the state '
            "at the start of a chunk with --delta, steps of an end effector's pose with "
            '--pose-steps. Other deltas from step to step are not supported: train on targets',
        )


def ask_about_units(spec: BundleSpec, statistics: Mapping[str, np.ndarray], draft: Draft) -> None:
    """Ask about units that the statistics are too small for, except those given by name."""
    sure = set()
    for text in draft.options.units or ():
        target = text.rpartition('=')[0]
        group, colon, name = target.rpartition(':')
        for one in ('state', 'actions'):
            if colon and group in ('state', 'action') and not one.startswith(group):
                continue
            sure |= {(one, name if colon else target), (one, target)}
    # Too large numbers are only noted: a continuous joint or a motor may turn far.
    for doubt in (one for one in unit_doubts(spec, statistics, sure) if one.is_small):
        by_name = ','.join(f'{name}={doubt.unit}' for name in doubt.names)
        draft.missing.ask(
            '--units',
            f'in {_file(draft)} {doubt.describe()} Then say {doubt.other}. If it is {doubt.unit} '
            f'all the same, say so by name: {by_name}',
        )


def _file(draft: Draft) -> Path:
    """File of the statistics, for messages."""
    return draft.statistics_file or draft.folder


def _check_deltas(spec: BundleSpec, statistics: Mapping[str, np.ndarray], draft: Draft) -> None:
    """Refuse deltas that the folder does not make, unless some cannot be positions."""
    if (stated := draft.deltas) is None:
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
        draft.missing.conflict(
            f'--delta says {", ".join(beyond)} but the folder says '
            f'{"only " + ", ".join(by_folder) if by_folder else "that no action"} '
            f'{"are" if len(by_folder) > 1 else "is"} relative to the state, and the ranges in '
            f'{_file(draft)} are those of positions'
        )


def cut_statistics(draft: Draft) -> dict[str, np.ndarray]:
    """Return the statistics of the named dimensions and of the cameras that are there.

    openpi may pad them further.
    """
    lengths = {'state': len(draft.state), 'actions': len(draft.actions)}
    known = {*lengths, *(image_group(camera.name) for camera in draft.cameras)}
    # Those of colour channels stay whole.
    return {
        key: array[..., : lengths.get(key.partition('.')[0])]
        for key, array in (draft.statistics or {}).items()
        if key.rpartition('.')[0] in known
    }
