"""The rules of the poses in policy.yaml; `rules` is the gate that asks for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from vla_runtime.bundle.schema import BundleSpec, PoseSpec
from vla_runtime.files.field_error import FieldError
from vla_runtime.files.typed_yaml import did_you_mean
from vla_runtime.types import ROTATION_LENGTH

# Names that people give the parts of a pose.
_POSITION = ('x', 'y', 'z')
_ROTATIONS = (('rx', 'ry', 'rz'), ('roll', 'pitch', 'yaw'), ('qx', 'qy', 'qz', 'qw'))


def named_as_poses(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the names that are called as one pose or twist, position first."""
    for name in names:
        prefix = name.removesuffix('x')
        if prefix == name:
            continue
        turns = [tuple(prefix + part for part in rotation) for rotation in _ROTATIONS]
        # A twist is called v and w.
        if prefix.endswith('v'):
            turns.append(tuple(f'{prefix[:-1]}w{axis}' for axis in _POSITION))
        wanted = [(*(prefix + axis for axis in _POSITION), *rotation) for rotation in turns]
        found = next((one for one in wanted if set(one) <= set(names)), None)
        if found is not None:
            yield found


def pose_options(names: Sequence[str], called: str = 'tool') -> str:
    """Return the options of an export that declare actions of these names as a pose."""
    joined = ','.join(names)
    # As `named_as_poses` finds a twist.
    if names[3].endswith('wx'):
        return f'--pose {called}={joined} --pose-rotation axis_angle --velocity {joined}'
    return f'--pose {called}={joined} --pose-rotation FORM'


def is_euler_axes(text: str) -> bool:
    """Return whether this is transforms3d's code of three axes, such as `sxyz`."""
    return bool(re.fullmatch(r'[sr]([xyz])(?!\1)([xyz])(?!\2)[xyz]', text))


def check_poses(spec: BundleSpec) -> None:
    """Check the poses against the actions and the state that they name (FieldError)."""
    used: dict[str, str] = {}
    kinds = {action.name: action.kind for action in spec.actions}
    check_unique([pose.name for pose in spec.poses], 'poses')
    for index, pose in enumerate(spec.poses):
        here = f'poses[{index}]'
        length = ROTATION_LENGTH[pose.form]
        if len(pose.rotation) != length:
            raise FieldError(
                f'{here}.rotation', f'{len(pose.rotation)} names but {pose.form} has {length}'
            )
        for part in ('position', 'rotation'):
            for column, name in enumerate(getattr(pose, part)):
                field = f'{here}.{part}[{column}]'
                if name not in kinds:
                    hint = did_you_mean(name, kinds)
                    raise FieldError(field, f"'{name}' is not in actions{hint}")
                if name in used:
                    raise FieldError(field, f"'{name}' is already used by {used[name]}")
                if kinds[name] != pose.kind:
                    raise FieldError(
                        field, f"'{name}' has kind '{kinds[name]}' but the pose '{pose.kind}'"
                    )
                used[name] = field
                if part == 'rotation':
                    _check_angle(spec, name, field)
        if (pose.form == 'euler') != (pose.euler_axes is not None):
            raise FieldError(f'{here}.euler_axes', "is for the form 'euler', and needed there")
        if pose.euler_axes is not None and not is_euler_axes(pose.euler_axes):
            raise FieldError(
                f'{here}.euler_axes',
                f"'{pose.euler_axes}' where s or r and three axes are expected, e.g. 'sxyz'",
            )
        if pose.delta_from == 'step' and pose.kind != 'delta':
            raise FieldError(f'{here}.delta_from', "'step' is for the kind 'delta' alone")
        _check_pose_state(spec, pose, here)


def _check_pose_state(spec: BundleSpec, pose: PoseSpec, here: str) -> None:
    lengths = {'state_position': 3, 'state_rotation': ROTATION_LENGTH[pose.form]}
    for part, length in lengths.items():
        names: tuple[str, ...] = getattr(pose, part)
        if len(names) != length and (names or pose.kind == 'delta'):
            raise FieldError(
                f'{here}.{part}', f'{len(names)} names where {length} state names are expected'
            )
        for column, name in enumerate(names):
            if name not in spec.state_names:
                hint = did_you_mean(name, spec.state_names)
                raise FieldError(f'{here}.{part}[{column}]', f"'{name}' is not in state{hint}")
            if part == 'state_rotation':
                _check_angle(spec, name, f'{here}.{part}[{column}]')
            elif pose.kind == 'delta':
                _check_same_unit(spec, pose.position[column], name, f'{here}.{part}[{column}]')


def _check_angle(spec: BundleSpec, name: str, field: str) -> None:
    units = {item.name: item.unit for item in (spec.state if 'state_' in field else spec.actions)}
    if units[name] in ('deg', 'deg/s'):
        raise FieldError(
            field, f"'{name}' is in '{units[name]}', but the angles of a pose are composed in rad"
        )


def _check_same_unit(spec: BundleSpec, action: str, state: str, field: str) -> None:
    moved = next(item.unit for item in spec.actions if item.name == action)
    measured = next(item.unit for item in spec.state if item.name == state)
    if moved != measured:
        raise FieldError(
            field, f"'{state}' is in '{measured}' but the action '{action}' in '{moved}'"
        )


def check_unique(names: Sequence[str], field: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            index = [i for i, other in enumerate(names) if other == name][1]
            raise FieldError(f'{field}[{index}].name', f"'{name}' is given {count} times")
