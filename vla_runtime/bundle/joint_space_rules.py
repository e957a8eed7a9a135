"""The rules of `joint_space` in policy.yaml; `rules` is the gate that asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vla_runtime.bundle.schema import ActionSpec, BundleSpec, StateSpec
from vla_runtime.files.field_error import FieldError
from vla_runtime.processing.joint_spaces import joint_space


def check_joint_space(spec: BundleSpec) -> None:
    """Check that state and actions are the joints that the joint space converts (FieldError)."""
    units = joint_space(spec.joint_space).units
    if units is None:
        return
    where = f'joint_space is {spec.joint_space}'
    groups: Mapping[str, Sequence[StateSpec | ActionSpec]]
    groups = {'state': spec.state, 'actions': spec.actions}
    for group, items in groups.items():
        if len(items) != len(units):
            raise FieldError(
                group,
                f'{len(items)} entries where {len(units)} are expected, because {where}: six '
                'joints and a gripper of the left arm, then of the right. Leave it out for another '
                'robot (export with --adapt-to-pi no)',
            )
        for index, (item, unit) in enumerate(zip(items, units, strict=True)):
            if item.unit != unit:
                raise FieldError(
                    f'{group}[{index}].unit',
                    f"'{item.unit}' of '{item.name}' where '{unit}' is expected, because {where}: "
                    "joints are in rad, grippers (the 7th and 14th) in '1', from 0 to 1",
                )
    for index, (action, state, unit) in enumerate(
        zip(spec.actions, spec.state, units, strict=True)
    ):
        if action.kind == 'velocity' or (action.kind == 'delta' and unit == '1'):
            raise FieldError(
                f'actions[{index}].kind',
                f"'{action.kind}' of '{action.name}' is not possible where {where}: joints are "
                'absolute or delta, grippers absolute',
            )
        if action.relative_to not in (None, state.name):
            raise FieldError(
                f'actions[{index}].relative_to',
                f"'{action.relative_to}' where '{state.name}' is expected, because {where}",
            )
    if spec.poses:
        raise FieldError('poses', f'are not possible where {where}, which is of joints')
