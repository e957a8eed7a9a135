"""Actions that are steps of an end effector's pose, as LIBERO's controller takes them.

A row moves the pose by a position and an axis-angle in the base's frame. Rows are added to one
another from the measured pose on, where the controller adds each to the pose measured then.
LIBERO's numbers are shares of the controller's largest step; they become metres and radians in the
statistics, so that the bundle holds units and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vla_runtime.bundle.schema import NormalisationSpec, PoseSpec
from vla_runtime.checkpoints.missing_facts import MissingFacts
from vla_runtime.checkpoints.options import ExportOptions
from vla_runtime.files.typed_yaml import did_you_mean

# Name of the end effector in the bundle; a robot file may give its pose this name as an alias.
STEPPED_POSE = 'tool'
_NUMBERS = 6
_FORM = 'x, y, z and the three numbers of a rotation vector'


def stepped_pose(
    options: ExportOptions,
    state: tuple[str, ...] | None,
    actions: tuple[str, ...] | None,
    missing: MissingFacts,
) -> PoseSpec | None:
    """Return the pose whose steps the actions are; None where they are none, or once asked."""
    steps, measured, scale = options.pose_steps, options.pose_state, options.pose_scale
    if steps is None:
        for option, value in (('--pose-state', measured), ('--pose-scale', scale)):
            if value is not None:
                missing.conflict(f'{option} is given without --pose-steps, whose pose it describes')
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
        if given is not None and len(set(given)) != _NUMBERS:
            missing.conflict(f'{option} has {len(set(given))} names where 6 are expected: {_FORM}')
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


def scale_steps(
    statistics: Mapping[str, np.ndarray],
    normalisation: NormalisationSpec,
    actions: tuple[str, ...],
    options: ExportOptions,
    missing: MissingFacts,
) -> dict[str, np.ndarray]:
    """Return the statistics with steps of a pose in metres and radians.

    Every normaliser but `identity` is linear in its statistics.

    Args:
        statistics: `actions.mean` and so on, cut to the named dimensions.
        normalisation: kinds of the normalisers.
        options: the steps' names, and metres and radians of 1.
        missing: takes a scale that the policy's numbers cannot be given.
    """
    if options.pose_steps is None or options.pose_scale is None:
        return dict(statistics)
    scale = np.ones(len(actions), dtype=np.float64)
    for index, name in enumerate(options.pose_steps):
        if name in actions:
            scale[actions.index(name)] = options.pose_scale[index // 3]
    if normalisation.actions == 'identity' and not np.all(scale == 1.0):
        missing.conflict(
            "--pose-scale is given, but the policy's actions are not normalised: nothing in the "
            'bundle can scale them'
        )
    return {
        key: (values * scale).astype(values.dtype) if key.startswith('actions.') else values
        for key, values in statistics.items()
    }
