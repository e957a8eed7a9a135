"""Deltas of a pose from row to row (LIBERO's controller), against matrices multiplied by hand."""

from __future__ import annotations

import numpy as np
import pytest
from rotation_oracle import rodrigues

from vla_runtime.processing.actions import ActionSpace, PoseColumns

ROWS = 9


def space_of(frame: str) -> ActionSpace:
    names = ('x', 'y', 'z', 'rx', 'ry', 'rz', 'grip')
    pose = PoseColumns(
        name='hand',
        position=(0, 1, 2),
        rotation=(3, 4, 5),
        form='axis_angle',
        kind='delta',
        frame=frame,
        state_position=(1, 2, 3),
        state_rotation=(4, 5, 6),
        delta_from='step',
    )
    return ActionSpace(names, ('delta',) * 6 + ('absolute',), (None,) * 7, (pose,))


@pytest.mark.parametrize('frame', ['base', 'tool'])
def test_each_row_starts_where_the_row_before_ends(frame):
    random = np.random.default_rng(3)
    state, actions = random.normal(size=7), 0.3 * random.normal(size=(ROWS, 7))
    found = space_of(frame).to_robot(actions, state)
    place, turned = state[1:4], rodrigues(state[4:7])
    for row, action in zip(found, actions, strict=True):
        turn = rodrigues(action[3:6])
        if frame == 'base':
            place, turned = place + action[:3], turn @ turned
        else:
            place, turned = place + turned @ action[:3], turned @ turn
        np.testing.assert_allclose(row[:3], place, atol=1e-12)
        np.testing.assert_allclose(rodrigues(row[3:6]), turned, atol=1e-12)
        assert row[6] == action[6]


@pytest.mark.parametrize('frame', ['base', 'tool'])
def test_targets_become_the_same_steps_again(frame):
    random = np.random.default_rng(4)
    state, actions = random.normal(size=7), 0.3 * random.normal(size=(ROWS, 7))
    space = space_of(frame)
    np.testing.assert_allclose(
        space.from_robot(space.to_robot(actions, state), state), actions, atol=1e-10
    )


def test_an_unknown_start_of_deltas_is_refused():
    pose = space_of('base').poses[0]
    with pytest.raises(ValueError, match='delta_from'):
        PoseColumns(**{**vars(pose), 'delta_from': 'row'})
