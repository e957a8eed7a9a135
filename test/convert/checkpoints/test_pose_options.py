"""End-effector poses by option: steps (LIBERO's convention), poses, deltas and twists."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoint_folders import copy_lerobot_folder, joints, lerobot_arguments, make_relative
from guided_policies import codec_of
from libero_folders import ACTIONS, OPTIONS, POSE_OPTIONS, SCALE, STATE, write_libero_folder
from rotation_oracle import rodrigues

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.pose_options import declared_poses, pose_notes
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.cli.main import main
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan, Observation

MEAN = np.array([0.1, -0.2, 0.05, 0.02, -0.03, 0.1, 0.3])
STD = np.array([0.3, 0.25, 0.4, 0.06, 0.05, 0.1, 0.9])


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return write_libero_folder(tmp_path_factory.mktemp('libero') / 'policy', MEAN, STD)


@pytest.fixture(scope='module')
def bundle(folder):
    target = folder.parent / 'bundle'
    words = ['export', str(folder), '--out', str(target), '--onnx-precision', 'none']
    assert main([*words, *OPTIONS, *POSE_OPTIONS]) == 0
    return target


def observation(bundle, state: np.ndarray) -> Observation:
    random = np.random.default_rng(1)
    images = {
        name: random.integers(0, 256, (48, 64, 3), np.uint8)
        for name in read_bundle(bundle).spec.camera_names
    }
    return Observation(images, state, 'put the bowl on the plate')


STATE_NOW = np.array([0.1, -0.2, 0.9, 3.0, 0.1, -0.4, 0.02, -0.02])


def test_a_bundle_says_that_its_actions_are_steps_of_a_pose_in_metres_and_radians(bundle):
    spec = read_bundle(bundle).spec
    (pose,) = spec.poses
    assert (pose.kind, pose.delta_from, pose.frame, pose.form) == (
        *('delta', 'step', 'base'),
        'axis_angle',
    )
    assert (pose.actions, (*pose.state_position, *pose.state_rotation)) == (ACTIONS[:6], STATE[:6])
    assert [action.unit for action in spec.actions] == [*'mmm', *['rad'] * 3, '1']
    assert [one.unit for one in spec.state] == [*'mmm', *['rad'] * 3, 'm', 'm']
    assert [action.kind for action in spec.actions] == ['delta'] * 6 + ['absolute']


def test_every_row_moves_the_measured_pose_on_by_what_the_policy_says(bundle):
    policy = Policy.load(bundle, backend='torch')
    chunk, _ = policy.infer(observation(bundle, STATE_NOW))
    raw = chunk.normalised[:, :7].astype(np.float64) * STD + MEAN
    place, turned = STATE_NOW[:3], rodrigues(STATE_NOW[3:6])
    for row, action in zip(chunk.actions, raw, strict=True):
        place = place + SCALE[0] * action[:3]
        turned = rodrigues(SCALE[1] * action[3:6]) @ turned
        np.testing.assert_allclose(row[:3], place, atol=1e-5)
        np.testing.assert_allclose(rodrigues(row[3:6]), turned, atol=1e-5)
        assert row[6] == pytest.approx(action[6], abs=1e-5)
    moved, _ = policy.infer(observation(bundle, STATE_NOW + 0.05 * np.eye(8)[0]))
    assert np.abs(moved.actions - chunk.actions).max() > 0.01


def test_a_plan_of_poses_is_shown_to_the_policy_as_its_own_steps(bundle):
    policy = Policy.load(bundle, backend='torch')
    seen = observation(bundle, STATE_NOW)
    chunk, _ = policy.infer(seen)
    plan = CommittedPlan(actions=chunk.actions, delay_steps=2, execution_horizon=4)
    shown = codec_of(bundle).plan(plan, seen)
    np.testing.assert_allclose(shown[:, :7], chunk.normalised[:, :7], atol=1e-3)


def said(folder, capsys, *words: str) -> str:
    target = folder.parent / 'never'
    arguments = ['export', str(folder), '--out', str(target), '--onnx-precision', 'none']
    assert main([*arguments, *OPTIONS, *words]) == 2
    assert not target.exists()
    return capsys.readouterr().err


def test_what_the_steps_lack_is_asked_for(folder, capsys):
    asked = re.findall(r'^  (--\S+)', said(folder, capsys, *POSE_OPTIONS[:2]), flags=re.M)
    assert set(asked) == {'--pose-state', '--pose-scale'}


@pytest.mark.parametrize(
    ('words', 'named'),
    [
        (('--pose-scale', '1,1'), '--pose-steps'),
        ((*POSE_OPTIONS[2:], '--pose-steps', ','.join(ACTIONS[:5])), '--pose-steps'),
        ((*POSE_OPTIONS[2:], '--pose-steps', 'dx,dy,dz,drx,dry,dry'), '--pose-steps'),
        ((*POSE_OPTIONS[2:], '--pose-steps', 'dx,dy,dz,drx,dry,drw'), 'drw'),
        ((*POSE_OPTIONS, '--velocity', 'dx'), 'dx'),
        ((*POSE_OPTIONS, '--delta', 'dx'), 'dx'),
        ((*POSE_OPTIONS[:2], *POSE_OPTIONS[4:], '--pose-state', 'x,y,z,rx,ry,tilt'), 'tilt'),
    ],
)
def test_steps_that_contradict_names_or_other_options_are_refused(folder, capsys, words, named):
    assert named in said(folder, capsys, *words)


@pytest.mark.parametrize(
    ('units', 'named'),
    [
        ('mm', ACTIONS[:3] + STATE[:3]),
        ('deg', ACTIONS[3:6] + STATE[3:6]),
        ('percent', ACTIONS[:6] + STATE[:6]),
        ('m/s', ACTIONS[:6] + STATE[:6]),
        ('1,x=mm', ('x',)),
        ('1,state:z=mm', ('z',)),
        ('1,dx=mm,y=mm', ('dx', 'y')),
        ('1,rz=deg', ('rz',)),
        ('1,action:drx=deg', ('drx',)),
        ('1,dx=rad', ('dx',)),
        ('rad,rx=m', ('rx',)),
    ],
)
def test_a_unit_that_is_not_the_poses_is_refused(folder, capsys, units, named):
    message = said(folder, capsys, *POSE_OPTIONS, '--units', units)
    found = {
        name
        for names in re.findall(r"--units says '\S+' for the (?:state|action) (.*), but", message)
        for name in names.split(', ')
    }
    assert found == set(named)


@pytest.mark.parametrize('units', ['rad', 'm', '1', 'rad,x=m,drx=rad,dz=1'])
def test_a_unit_that_agrees_or_is_of_the_others_is_taken(folder, tmp_path, units):
    target = tmp_path / 'bundle'
    words = ['export', str(folder), '--out', str(target), '--onnx-precision', 'none']
    assert main([*words, *OPTIONS, *POSE_OPTIONS, '--units', units]) == 0
    spec = read_bundle(target).spec
    assert [action.unit for action in spec.actions[:6]] == [*'mmm', *['rad'] * 3]
    assert [one.unit for one in spec.state[:6]] == [*'mmm', *['rad'] * 3]


@pytest.mark.parametrize('excluded', [[], ['shoulder_lift', 'gripper']])
def test_steps_that_the_folder_makes_relative_to_the_state_are_refused(tmp_path, capsys, excluded):
    relative = copy_lerobot_folder(tmp_path / 'policy')
    make_relative(relative, exclude_joints=excluded)
    words = ['export', str(relative), '--out', str(tmp_path / 'never'), '--onnx-precision', 'none']
    steps = ['--pose-steps', joints(), '--pose-state', joints(), '--pose-scale', '1,1']
    assert main([*words, *lerobot_arguments(), *steps]) == 2
    message = capsys.readouterr().err
    assert '--pose-steps' in message
    assert [name for name in excluded if name in message.split('contradict')[1]] == []
    assert not (tmp_path / 'never').exists()


@pytest.mark.parametrize('scale', ['0.05', '0.05,0', '1,-1', 'a,b', '1,nan', '1,inf'])
def test_a_scale_that_is_none_is_refused(folder, scale, capsys):
    assert '--pose-scale' in said(folder, capsys, *POSE_OPTIONS[:4], '--pose-scale', scale)


# ------------------------------------------------------------ poses that --pose names

NAMED = ('--pose', f'hand={",".join(ACTIONS[:6])}')
MEASURED = ('--pose-state', ','.join(STATE[:6]))


def exported(folder, tmp_path, *options: str):
    """The spec of a bundle that these options make."""
    words = ['export', str(folder), '--out', str(tmp_path / 'bundle'), '--onnx-precision', 'none']
    assert main([*words, *OPTIONS, *options]) == 0
    return read_bundle(tmp_path / 'bundle').spec


@pytest.mark.parametrize(
    ('options', 'kind', 'units'),
    [
        (MEASURED, 'absolute', ('m', 'rad')),
        ((), 'absolute', ('m', 'rad')),
        (
            (*MEASURED, '--delta', ','.join(ACTIONS[:6]), '--pose-frame', 'tool'),
            'delta',
            ('m', 'rad'),
        ),
        (('--velocity', ','.join(ACTIONS[:6])), 'velocity', ('m/s', 'rad/s')),
    ],
)
def test_a_pose_has_the_kind_and_the_units_that_its_actions_are_declared_with(
    folder, tmp_path, options, kind, units
):
    spec = exported(folder, tmp_path, *NAMED, '--pose-rotation', 'axis_angle', *options)
    (pose,) = spec.poses
    assert (pose.name, pose.kind, pose.form, pose.delta_from) == (
        'hand',
        kind,
        'axis_angle',
        'chunk',
    )
    assert pose.frame == ('tool' if kind == 'delta' else 'base')
    assert (pose.position, pose.rotation) == (ACTIONS[:3], ACTIONS[3:6])
    measured = STATE[:6] if '--pose-state' in options else ()
    assert (*pose.state_position, *pose.state_rotation) == tuple(measured)
    assert {action.kind for action in spec.actions[:6]} == {kind}
    assert [action.unit for action in spec.actions[:6]] == [units[0]] * 3 + [units[1]] * 3


def test_euler_angles_keep_their_axes(folder, tmp_path):
    spec = exported(folder, tmp_path, *NAMED, '--pose-rotation', 'euler_rzyx')
    assert (spec.poses[0].form, spec.poses[0].euler_axes) == ('euler', 'rzyx')


@pytest.mark.parametrize(
    ('options', 'named'),
    [
        (NAMED, '--pose-rotation'),
        ((*NAMED, '--pose-rotation', 'quaternion_xyzw'), '7 are expected'),
        (('--pose', 'hand=dx,dy,dz,drx,dry,drw', '--pose-rotation', 'axis_angle'), 'drw'),
        ((*NAMED, '--pose-rotation', 'axis_angle', '--velocity', 'dx,dy'), 'dx, dy'),
        (
            (*NAMED, '--pose-rotation', 'axis_angle', '--delta', ','.join(ACTIONS[:6])),
            '--pose-frame',
        ),
        (('--pose-rotation', 'axis_angle'), '--pose-rotation'),
        ((*NAMED, '--pose-rotation', 'axis_angle', *POSE_OPTIONS), '--pose-steps'),
        ((*NAMED, '--pose-rotation', 'axis_angle', '--pose-state', 'x,y,z'), '--pose-state'),
        (
            ('--pose', 'hand=dx,dy,dz,drx,dry,dry', '--pose-rotation', 'axis_angle'),
            "'dry' twice",
        ),
        (
            (*NAMED, *('--pose', f'left={",".join(ACTIONS[:6])}'), '--pose-rotation', 'axis_angle'),
            '--pose hand and --pose left both name dx, dy, dz, drx, dry, drz',
        ),
    ],
)
def test_a_pose_that_is_not_whole_is_asked_for_by_option(folder, capsys, options, named):
    assert named in said(folder, capsys, *options)


def test_actions_named_as_a_pose_that_nothing_declares_are_pointed_at():
    names = ('x', 'y', 'z', 'rx', 'ry', 'rz')
    spec = SimpleNamespace(poses=(), action_names=('grip', *names))
    (note,) = pose_notes(spec)
    assert '--pose tool=x,y,z,rx,ry,rz' in note
    twist = ('vx', 'vy', 'vz', 'wx', 'wy', 'wz')
    (note,) = pose_notes(SimpleNamespace(poses=(), action_names=(*twist, 'grip')))
    joined = ','.join(twist)
    assert f'--pose tool={joined} --pose-rotation axis_angle --velocity {joined}' in note
    arms = [f'{side}_{name}' for side in ('left', 'right') for name in twist]
    assert len(pose_notes(SimpleNamespace(poses=(), action_names=arms))) == 2
    assert pose_notes(SimpleNamespace(poses=(), action_names=('x', 'y', 'z', 'grip'))) == ()
    assert pose_notes(SimpleNamespace(poses=('hand',), action_names=names)) == ()


@pytest.mark.parametrize('rotation', ['euler_rzyx', 'euler_sxyz', 'quaternion_xyzw', 'rotation_6d'])
def test_a_twist_in_a_form_that_is_no_angular_velocity_is_refused(folder, capsys, rotation):
    names = [*ACTIONS, 'a', 'b']
    count = {'quaternion_xyzw': 7, 'rotation_6d': 9}.get(rotation, 6)
    joined = ','.join(names[:count])
    message = said(
        folder,
        capsys,
        *('--pose', f'hand={joined}', '--velocity', joined, '--pose-rotation', rotation),
    )
    assert re.search(rf'--pose hand is a twist.*axis_angle.*says {rotation}\.', message)


def test_deltas_of_a_pose_ask_for_what_measures_it_and_for_their_axes(folder, capsys):
    message = said(
        folder,
        capsys,
        *(*NAMED, '--pose-rotation', 'axis_angle', '--delta', ','.join(ACTIONS[:6])),
    )
    assert set(re.findall(r'^  (--\S+)', message, flags=re.M)) == {'--pose-state', '--pose-frame'}
    assert 'contradict' not in message


def test_velocities_that_are_deltas_too_are_one_line_with_both_options(folder, capsys):
    joined = ','.join(ACTIONS[:6])
    message = said(
        folder,
        capsys,
        *(*NAMED, '--pose-rotation', 'axis_angle', '--velocity', joined, '--delta', joined),
    )
    (line,) = [line for line in message.splitlines() if 'dx' in line]
    assert '--velocity and --delta both name' in line


def test_too_few_names_of_the_state_for_two_poses_are_counted_once(folder, capsys):
    poses = ('--pose', 'left=dx,dy,dz,drx,dry,drz', '--pose', 'right=dx,dy,dz,drx,dry,grip')
    message = said(folder, capsys, *poses, '--pose-rotation', 'axis_angle', *MEASURED)
    assert message.count('--pose-state') == 1
    assert '12 are expected' in message


@pytest.mark.parametrize('strange', ['dw', 'dx'])
def test_a_pose_of_strange_actions_is_none_though_its_state_is_whole(strange):
    options = SimpleNamespace(
        poses={'hand': (*ACTIONS[:5], strange)},
        pose_rotation='axis_angle',
        pose_state=tuple(STATE[:6]),
        pose_steps=None,
        pose_scale=None,
        pose_frame=None,
        velocities=(),
        deltas=None,
    )
    noted = MissingFacts(Path('folder'))
    draft = SimpleNamespace(options=options, missing=noted)
    assert declared_poses(draft, tuple(STATE), tuple(ACTIONS)) == ()
    with pytest.raises(ExportError, match=strange):
        noted.raise_if_any()


@pytest.mark.parametrize('said_form', ['euler_xyz', 'euler', 'quat', 'euler_sxxz', 'euler_sXYZ'])
def test_a_form_that_is_none_is_explained(folder, capsys, said_form):
    message = said(folder, capsys, *NAMED, '--pose-rotation', said_form)
    assert 'euler_ and s or r, then three axes, such as euler_sxyz' in message
    known = 'quaternion_xyzw' if said_form == 'quat' else "did you mean 'euler_sxyz'?"
    assert known in message
