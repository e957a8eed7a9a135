"""End-effector poses that the options of an export declare.

`--pose` names the actions of a pose; `--velocity` and `--delta` say whether they are a twist or
differences from the pose measured at the start of a chunk. `--pose-steps` are LIBERO's actions:
each row moves the pose by a position and an axis-angle in the base's frame. Rows are summed from
the measured pose on, where LIBERO's controller adds each to the pose measured then. LIBERO's
numbers are fractions of its largest step; the statistics hold metres and radians.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import numpy as np

from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_runtime.bundle.pose_rules import named_as_poses, pose_options
from vla_runtime.bundle.schema import BundleSpec, PoseSpec
from vla_runtime.files.typed_yaml import did_you_mean
from vla_runtime.types import ROTATION_LENGTH, ActionKind, RotationForm

# Name of the end effector in the bundle; a robot file may give its pose this name as an alias.
STEPPED_POSE = 'tool'
_NUMBERS = 6
_FORM = 'x, y, z and the three numbers of a rotation vector'
# As `--pose-rotation` writes them: Euler angles with their axes.
ROTATIONS = tuple('euler_sxyz' if form == 'euler' else form for form in get_args(RotationForm))
_OF_SIX = [form for form, length in ROTATION_LENGTH.items() if length == 6]


def declared_poses(
    draft: Draft, state: tuple[str, ...] | None, actions: tuple[str, ...] | None
) -> tuple[PoseSpec, ...]:
    """Return the poses of `--pose` and `--pose-steps`; ask for what they lack.

    `state` and `actions`: names; None where they are noted missing.
    """
    stepped = _stepped_pose(draft, state, actions)
    return (*_named_poses(draft, state, actions), *((stepped,) if stepped else ()))


def six_number_form(draft: Draft) -> RotationForm | None:
    """Return the form of the folder's rotations of six numbers; None where it is asked for."""
    said = draft.options.pose_rotation
    if said is None:
        draft.missing.ask(
            '--pose-rotation',
            'how the training wrote the six numbers of a rotation, which the folder does not show: '
            'rotation_6d (first column of the matrix, then the second), rotation_6d_interleaved '
            '(both columns, row by row) or rotation_6d_rows (its first two rows)',
        )
        return None
    if said not in _OF_SIX:
        draft.missing.conflict(
            f"--pose-rotation {said}: the policy's rotations have six numbers: expected one of "
            f'{", ".join(_OF_SIX)}'
        )
        return None
    return said


def pose_notes(spec: BundleSpec) -> tuple[str, ...]:
    """Notes for a person on actions that are named as a pose and declared as joints."""
    if spec.poses:
        return ()
    return tuple(
        f'actions {", ".join(names)} are taken for joints: if they are the pose of an end '
        f'effector, say so with {pose_options(names)}'
        for names in named_as_poses(spec.action_names)
    )


def _named_poses(
    draft: Draft, state: tuple[str, ...] | None, actions: tuple[str, ...] | None
) -> tuple[PoseSpec, ...]:
    options, missing = draft.options, draft.missing
    if not options.poses:
        of_folder = any(pose.form is None for pose in draft.folder_poses)
        for option, value in (
            ('--pose-rotation', None if of_folder else options.pose_rotation),
            ('--pose-frame', options.pose_frame),
        ):
            if value is not None:
                missing.conflict(f'{option} is given without --pose, whose pose it describes')
        return ()
    form, axes = _form(draft)
    if form is None or state is None or actions is None:
        return ()
    length = 3 + ROTATION_LENGTH[form]
    measured = options.pose_state or ()
    whole = len(options.poses) * length
    if measured and len(measured) != whole:
        each = f', {length} for each --pose in their order' if len(options.poses) > 1 else ''
        missing.conflict(
            f'--pose-state has {len(measured)} names where {whole} are expected: x, y, z and the '
            f'{length - 3} numbers of {form}{each}'
        )
        measured = ()
    found: list[PoseSpec] = []
    for at, (name, names) in enumerate(options.poses.items()):
        of_state = measured[at * length : (at + 1) * length]
        kind = _kind(name, names, draft)
        fits = _fits(f'--pose {name}', names, actions, 'action', form, missing)
        if measured:
            fits &= _fits('--pose-state', of_state, state, 'dimension of the state', form, missing)
        for other, names_of_other in list(options.poses.items())[:at]:
            shared = [one for one in names_of_other if one in names]
            if shared:
                missing.conflict(f'--pose {other} and --pose {name} both name {", ".join(shared)}')
        if kind == 'delta' and options.pose_state is None:
            missing.ask(
                '--pose-state',
                'names of the state that are the measured pose, from which --delta starts: x, y, z '
                f'and the {length - 3} numbers of {form}, for each --pose',
            )
        if kind == 'delta' and options.pose_frame is None:
            missing.ask(
                '--pose-frame',
                f"axes that the deltas of '{name}' are along: base, or tool (the tool's own at the "
                'start of the chunk)',
            )
        if kind == 'velocity' and form != 'axis_angle':
            missing.conflict(
                f'--pose {name} is a twist, whose rotation is an angular velocity about x, y and z '
                f'(axis_angle): --pose-rotation says {options.pose_rotation}. Rates of Euler '
                'angles and of other forms are none: train on angular velocities or on poses'
            )
        if not fits or kind is None:
            continue
        found.append(
            PoseSpec(
                name=name,
                position=names[:3],  # type: ignore[arg-type]
                rotation=names[3:],
                form=form,
                kind=kind,
                frame=options.pose_frame or 'base',
                euler_axes=axes,
                state_position=of_state[:3],
                state_rotation=of_state[3:],
            )
        )
    return tuple(found)


def _form(draft: Draft) -> tuple[RotationForm | None, str | None]:
    """Return form and Euler axes of the rotations; None where they are asked for."""
    said = draft.options.pose_rotation
    if said is None:
        draft.missing.ask(
            '--pose-rotation',
            f'form of the rotation in --pose: {", ".join(ROTATIONS)} (euler_ and the axes of '
            'transforms3d: s static or r rotating, then three axes)',
        )
        return None, None
    form, _, axes = said.partition('_')
    if form == 'euler':
        return 'euler', axes
    return said, None  # type: ignore[return-value]


def _kind(name: str, names: tuple[str, ...], draft: Draft) -> ActionKind | None:
    """Return what the actions of a pose are; None where they are not all the same."""
    for option, kind, chosen in (
        ('--velocity', 'velocity', draft.options.velocities),
        ('--delta', 'delta', draft.options.deltas or ()),
    ):
        among = [one for one in names if one in chosen]
        if among and len(among) < len(names):
            draft.missing.conflict(
                f'{option} names {", ".join(among)} of --pose {name} and not all of it: name all, '
                'or none'
            )
            return None
        if among:
            return kind  # type: ignore[return-value]
    return 'absolute'


def _fits(
    option: str,
    names: tuple[str, ...],
    known: tuple[str, ...],
    what: str,
    form: RotationForm,
    missing: MissingFacts,
) -> bool:
    """Return whether these names are a pose in this form, of known dimensions."""
    length = 3 + ROTATION_LENGTH[form]
    strange = [name for name in names if name not in known]
    for name in strange:
        missing.conflict(f"{option} names '{name}', which is no {what}{did_you_mean(name, known)}")
    twice = _repeats(option, names, missing)
    if len(names) != length:
        missing.conflict(
            f'{option} has {len(names)} names where {length} are expected: x, y, z and the '
            f'{length - 3} numbers of {form}'
        )
    return not strange and not twice and len(names) == length


def _repeats(option: str, names: tuple[str, ...], missing: MissingFacts) -> bool:
    """Return whether a name is given twice, and note it."""
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    for name in twice:
        missing.conflict(f"{option} names '{name}' twice")
    return bool(twice)


def _stepped_pose(
    draft: Draft, state: tuple[str, ...] | None, actions: tuple[str, ...] | None
) -> PoseSpec | None:
    """Return the pose whose steps the actions are; None where they are none, or once asked."""
    options, missing = draft.options, draft.missing
    steps, measured, scale = options.pose_steps, options.pose_state, options.pose_scale
    if steps is None:
        if scale is not None:
            missing.conflict('--pose-scale is given without --pose-steps, whose pose it describes')
        if measured is not None and not options.poses:
            missing.conflict(
                '--pose-state is given without --pose or --pose-steps, whose pose it describes'
            )
        return None
    if options.poses:
        missing.conflict('--pose-steps and --pose are given: a policy has the one or the other')
        return None
    if measured is None:
        missing.ask('--pose-state', f'names of the state that are the measured pose: {_FORM}')
    if scale is None:
        missing.ask(
            '--pose-scale',
            'metres and radians that 1 is of the actions in --pose-steps: 1,1 where they are in '
            "metres and radians, 0.05,0.5 for LIBERO's controller",
        )
    for option, given, names in (
        ('--pose-steps', steps, actions),
        ('--pose-state', measured, state),
    ):
        if given is not None and _repeats(option, given, missing):
            return None
        if given is not None and len(given) != _NUMBERS:
            missing.conflict(f'{option} has {len(given)} names where 6 are expected: {_FORM}')
            return None
        for name in given or ():
            if names is not None and name not in names:
                what = 'action' if option == '--pose-steps' else 'dimension of the state'
                missing.conflict(
                    f"{option} names '{name}', which is no {what}{did_you_mean(name, names)}"
                )
    for name in steps:
        if name in (*(options.deltas or ()), *options.velocities, *options.targets):
            missing.conflict(f"--pose-steps names '{name}', and so does another option")
    if measured is None or state is None or actions is None:
        return None
    return PoseSpec(
        name=STEPPED_POSE,
        position=steps[:3],  # type: ignore[arg-type]
        rotation=steps[3:],
        form='axis_angle',
        kind='delta',
        frame='base',
        state_position=measured[:3],
        state_rotation=measured[3:],
        delta_from='step',
    )


def scale_steps(statistics: Mapping[str, np.ndarray], draft: Draft) -> dict[str, np.ndarray]:
    """Return the statistics with pose steps in metres and radians.

    Every normaliser but `identity` is linear in its statistics; a scale that cannot be applied is
    noted as a conflict.
    """
    options, actions = draft.options, [action.name for action in draft.actions]
    if options.pose_steps is None or options.pose_scale is None:
        return dict(statistics)
    scale = np.ones(len(actions), dtype=np.float64)
    for index, name in enumerate(options.pose_steps):
        if name in actions:
            scale[actions.index(name)] = options.pose_scale[index // 3]
    if draft.normalisation.actions == 'identity' and not np.all(scale == 1.0):
        draft.missing.conflict(
            "--pose-scale is given, but the policy's actions are not normalised: nothing in the "
            'bundle can scale them'
        )
    return {
        key: (values * scale).astype(values.dtype) if key.startswith('actions.') else values
        for key, values in statistics.items()
    }
