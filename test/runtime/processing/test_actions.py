"""Action spaces: what reaches the robot per kind and frame, exact inverses, bad declarations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rotation_oracle import FORMS, rodrigues
from transforms3d import quaternions as t3d

from vla_runtime.processing.actions import ActionSpace, PoseColumns
from vla_runtime.processing.poses import from_matrix, rotation_width, to_matrix

QUARTER = math.pi / 2


def _joints(*kinds: str) -> ActionSpace:
    return ActionSpace(
        names=tuple(f'joint_{i}' for i in range(len(kinds))),
        kinds=kinds,
        state_columns=tuple(range(len(kinds))),
    )


def _hand(form: str, frame: str, kind: str = 'delta', **changes) -> ActionSpace:
    """A gripper, then one pose; the state has the same behind one more number."""
    width = rotation_width(form)
    pose = {
        'name': 'hand',
        'position': (1, 2, 3),
        'rotation': tuple(range(4, 4 + width)),
        'form': form,
        'kind': kind,
        'frame': frame,
        'state_position': (2, 3, 4),
        'state_rotation': tuple(range(5, 5 + width)),
        **changes,
    }
    names = ('gripper', *'xyz', *(f'r{i}' for i in range(width)))
    kinds = ('absolute', *[kind] * (3 + width))
    return ActionSpace(names, kinds, (None,) * len(names), (PoseColumns(**pose),))


def test_each_column_follows_its_kind():
    space = _joints('delta', 'absolute', 'velocity')
    actions = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], dtype=np.float32)
    robot = space.to_robot(actions, np.array([10.0, 20.0, 30.0]))
    assert robot.dtype == np.float64
    np.testing.assert_allclose(robot, [[10.1, 0.2, 0.3], [10.4, 0.5, 0.6]], rtol=1e-7)
    assert space.command_kinds == ('position', 'position', 'velocity')


def test_state_is_read_where_the_space_says():
    space = ActionSpace(('a', 'b'), ('delta', 'delta'), (3, 0))
    robot = space.to_robot(np.zeros((1, 2)), np.array([1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_array_equal(robot, [[4.0, 1.0]])


def test_deltas_do_not_accumulate_over_the_chunk():
    robot = _joints('delta').to_robot(np.full((5, 1), 0.25), np.array([1.0]))
    np.testing.assert_array_equal(robot, np.full((5, 1), 1.25))


def test_inputs_are_left_alone():
    space = _hand('quaternion_xyzw', 'tool')
    actions, state = np.ones((4, 8)), np.ones(9)
    for array in (actions, state):
        array.flags.writeable = False
    assert space.to_robot(actions, state).shape == (4, 8)
    assert space.from_robot(actions, state).shape == (4, 8)
    assert (actions == 1).all() and (state == 1).all()


@pytest.mark.parametrize(('frame', 'place'), [('base', [1.1, 2.0, 3.0]), ('tool', [1.0, 2.1, 3.0])])
def test_a_delta_moves_along_and_turns_about_the_axes_of_its_frame(frame, place):
    # The hand is turned a quarter about z, so that its x axis points along the base's y.
    state = np.array([9.0, 9.0, 1.0, 2.0, 3.0, 0.0, 0.0, QUARTER])
    action = np.array([[0.5, 0.1, 0.0, 0.0, QUARTER, 0.0, 0.0]])
    robot = _hand('axis_angle', frame).to_robot(action, state)[0]
    np.testing.assert_allclose(robot[:4], [0.5, *place], atol=1e-15)
    turn, before = to_matrix(np.array([[QUARTER, 0, 0], [0, 0, QUARTER]]), 'axis_angle')
    expected = turn @ before if frame == 'base' else before @ turn
    np.testing.assert_allclose(to_matrix(robot[4:], 'axis_angle'), expected, atol=1e-15)


@pytest.mark.parametrize('frame', ['base', 'tool'])
@given(numbers=hnp.arrays(np.float64, (2, 7), elements=st.floats(-1, 1)))
def test_quaternion_deltas_equal_quaternion_products(frame, numbers):
    delta, start = numbers
    if min(np.linalg.norm(delta[3:]), np.linalg.norm(start[3:])) < 0.1:
        return
    space = _hand('quaternion_wxyz', frame)
    state = np.array([0.0, 0.0, *start])
    robot = space.to_robot(np.array([[0.0, *delta]]), state)[0, 1:]
    turn, rotation = (q / np.linalg.norm(q) for q in (delta[3:], start[3:]))
    if frame == 'base':
        position, product = start[:3] + delta[:3], t3d.qmult(turn, rotation)
    else:
        position = start[:3] + t3d.rotate_vector(delta[:3], rotation)
        product = t3d.qmult(rotation, turn)
    np.testing.assert_allclose(robot[:3], position, atol=1e-12)
    # The writing nearest to the state: its sign follows the state's.
    product *= np.sign(product @ rotation) or 1.0
    assert abs(robot[3:] @ product) == pytest.approx(1, abs=1e-12)
    assert robot[3:] @ rotation >= -1e-12


@pytest.mark.parametrize('kind', ['absolute', 'velocity'])
def test_poses_that_are_no_deltas_pass_untouched(kind):
    space = _hand('quaternion_xyzw', 'base', kind, state_position=(), state_rotation=())
    actions = np.random.default_rng(0).normal(size=(6, 8))
    for direction in (space.to_robot, space.from_robot):
        np.testing.assert_array_equal(direction(actions, np.zeros(0)), actions)
    assert space.command_kinds[1:] == (('velocity' if kind == 'velocity' else 'position',) * 7)


@given(
    data=st.data(),
    kinds=st.lists(st.sampled_from(['absolute', 'delta', 'velocity']), min_size=1, max_size=6),
)
def test_joint_chunks_survive_the_round_trip(data, kinds):
    space = _joints(*kinds)
    numbers = st.floats(-10, 10)
    actions = data.draw(hnp.arrays(np.float64, (4, len(kinds)), elements=numbers))
    state = data.draw(hnp.arrays(np.float64, len(kinds), elements=numbers))
    back = space.from_robot(space.to_robot(actions, state), state)
    np.testing.assert_allclose(back, actions, atol=1e-14)


@pytest.mark.parametrize('frame', ['base', 'tool'])
@pytest.mark.parametrize('form', FORMS)
@given(
    positions=hnp.arrays(np.float64, (4, 4), elements=st.floats(-2, 2)),
    turns=hnp.arrays(np.float64, (4, 3), elements=st.floats(-1.7, 1.7)),
)
def test_pose_chunks_survive_the_round_trip(form, frame, positions, turns):
    space = _hand(form, frame)
    rotations = to_matrix(turns, 'axis_angle')
    written = from_matrix(rotations, form)
    state = np.array([0.0, *positions[0], *written[0]])
    actions = np.hstack([positions[1:], written[1:]])
    robot = space.to_robot(actions, state)
    back = space.from_robot(robot, state)
    np.testing.assert_allclose(back[:, :4], actions[:, :4], atol=1e-12)
    # 1e-7: Euler angles near gimbal lock.
    atol = 1e-7 if form == 'euler' else 1e-12
    np.testing.assert_allclose(to_matrix(back[:, 4:], form), rotations[1:], atol=atol)


def test_plan_re_anchored_to_a_newer_state_is_the_same_plan():
    space = _hand('rotation_6d', 'tool')
    generator = np.random.default_rng(3)
    turns = from_matrix(to_matrix(generator.normal(size=(8, 3)), 'axis_angle'), 'rotation_6d')
    states = np.hstack([generator.normal(size=(2, 5)), turns[:2]])
    actions = np.hstack([generator.normal(size=(6, 4)), turns[2:]])
    robot = space.to_robot(actions, states[0])
    renewed = space.from_robot(robot, states[1])
    assert np.abs(renewed - actions).max() > 0.1
    np.testing.assert_allclose(space.to_robot(renewed, states[1]), robot, atol=1e-12)


def test_hand_pointing_down_gives_a_plan_without_sign_flips():
    # w is near zero there, where the canonical sign would flip from row to row.
    space = _hand('quaternion_wxyz', 'tool')
    state = np.array([0.0, 0.0, 0.4, 0.0, 0.2, 0.001, -1.0, 0.0, 0.0])
    wobble = 0.01 * np.array([-1.0, 1.0, -1.0, 1.0])
    actions = np.zeros((4, 8))
    actions[:, 4], actions[:, 5] = np.cos(wobble), np.sin(wobble)
    rotations = space.to_robot(actions, state)[:, 4:]
    assert np.abs(np.diff(np.vstack([state[5:], rotations]), axis=0)).max() < 0.03


def test_pose_columns_that_also_name_a_state_column_are_composed_once():
    plain = _hand('euler', 'base')
    named = ActionSpace(plain.names, plain.kinds, (1, 2, 3, 4, 5, 6, 7), plain.poses)
    actions, state = np.full((2, 7), 0.1), np.linspace(0.1, 0.9, 8)
    np.testing.assert_array_equal(named.to_robot(actions, state), plain.to_robot(actions, state))


def test_two_hands_are_composed_each_with_its_own_state():
    def pose(name: str, first: int) -> PoseColumns:
        columns = tuple(range(first, first + 6))
        return PoseColumns(
            name=name,
            position=columns[:3],
            rotation=columns[3:],
            form='axis_angle',
            kind='delta',
            frame='base',
            state_position=columns[:3],
            state_rotation=columns[3:],
        )

    names = tuple(f'a{i}' for i in range(12))
    space = ActionSpace(names, ('delta',) * 12, (None,) * 12, (pose('left', 0), pose('right', 6)))
    state = np.array([1.0, 0, 0, 0, 0, 0.5, 2.0, 0, 0, 0, 0, -0.5])
    actions = np.zeros((1, 12))
    actions[0, [5, 11]] = 0.25
    expected = [[1.0, 0, 0, 0, 0, 0.75, 2.0, 0, 0, 0, 0, -0.25]]
    np.testing.assert_allclose(space.to_robot(actions, state), expected, atol=1e-15)


@pytest.mark.parametrize(
    ('actions', 'state', 'words'),
    [
        (np.zeros((4, 3)), np.zeros(2), 'joint_0'),
        (np.zeros(2), np.zeros(2), r'got \(2,\)'),
        (np.zeros((4, 2)), np.zeros((1, 2)), r'state must be one row.*\(1, 2\)'),
        (np.zeros((4, 2)), np.zeros(1), 'state column 1, but the state has only 1'),
        (np.zeros((4, 2)), np.array([0.0, np.nan]), 'state column 1, which is nan'),
    ],
)
def test_wrong_chunk_or_state_is_an_error(actions, state, words):
    space = _joints('delta', 'delta')
    for direction in (space.to_robot, space.from_robot):
        with pytest.raises(ValueError, match=words):
            direction(actions, state)


def test_state_that_no_delta_needs_may_be_anything():
    space = _joints('absolute', 'velocity')
    actions = np.ones((2, 2))
    np.testing.assert_array_equal(space.to_robot(actions, np.array([np.nan])), actions)


def test_degenerate_rotation_names_pose_source_and_row():
    space = _hand('quaternion_xyzw', 'base')
    actions, state = np.ones((3, 8)), np.ones(9)
    actions[1, 4:] = 0
    with pytest.raises(ValueError, match="'hand'"):
        space.to_robot(actions, state)
    state[5:] = 0
    with pytest.raises(ValueError, match="'hand'"):
        space.to_robot(np.ones((3, 8)), state)


@pytest.mark.parametrize(
    ('names', 'kinds', 'columns', 'words'),
    [
        ((), (), (), 'no actions'),
        (('a', 'a'), ('absolute',) * 2, (None,) * 2, 'used twice: a'),
        (('a', 'b'), ('absolute',), (None,) * 2, 'kinds has 1 entries for 2'),
        (('a', 'b'), ('absolute',) * 2, (0,), 'state_columns'),
        (('a',), ('relative',), (0,), "'a'"),
        (('a', 'b'), ('absolute', 'delta'), (0, None), "'b'"),
        (('a',), ('delta',), (-1,), "'a'"),
    ],
)
def test_bad_action_space_is_an_error_that_names_the_action(names, kinds, columns, words):
    with pytest.raises(ValueError, match=words):
        ActionSpace(names, kinds, columns)


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'position': (1, 2)}, 'position must be 3 different columns'),
        ({'position': (1, 2, 2)}, r'position must be 3 different columns.*\(1, 2, 2\)'),
        ({'rotation': (4, 5)}, 'rotation must be 3 different columns'),
        ({'rotation': (4, 5, -6)}, 'rotation must be 3 different columns'),
        ({'rotation': (3, 4, 5)}, "'z'"),
        ({'rotation': (4, 5, 99)}, 'column 99 does not exist, there are 7'),
        ({'state_position': ()}, 'state_position'),
        ({'state_rotation': ()}, 'state_rotation'),
        ({'state_rotation': (1, 2, 3, 4)}, 'state_rotation'),
        ({'frame': 'world'}, "'world'"),
        ({'form': 'matrix'}, "'matrix'"),
        ({'kind': 'absolute'}, "'x'"),
        ({'kind': 'relative'}, "'relative'"),
        ({'euler_axes': 'xyz'}, "'xyz'"),
    ],
)
def test_bad_pose_is_an_error_that_names_the_pose(changes, words):
    with pytest.raises(ValueError, match=words) as error:
        space = _hand('euler', 'base')
        pose = {**vars(space.poses[0]), **changes}
        ActionSpace(space.names, space.kinds, space.state_columns, (PoseColumns(**pose),))
    assert "pose 'hand'" in str(error.value)


# --- Deltas of a pose from row to row (LIBERO's controller), against matrices multiplied by hand

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
