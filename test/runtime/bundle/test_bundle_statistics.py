"""Statistics that no robot can have are refused; those that are only odd are said."""

import re
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_policy import JOINTS, tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import BundleError, read_bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.bundle.statistics import check_statistics, statistics_notes
from vla_runtime.bundle.unit_doubts import unit_doubts
from vla_runtime.bundle.writer import bundle_notes, seal
from vla_runtime.cli.main import main
from vla_runtime.files.field_error import FieldError
from vla_runtime.policy import Policy

COUNT = len(JOINTS)


def statistics(**changes: object) -> dict[str, np.ndarray]:
    usual = {
        'state.q01': np.full(COUNT, -1.5),
        'state.q99': np.full(COUNT, 1.5),
        'actions.mean': np.zeros(COUNT),
        'actions.std': np.ones(COUNT),
    }
    given = {key.replace('_', '.'): np.array(value, float) for key, value in changes.items()}
    return {**usual, **given}


def test_usual_statistics_are_accepted_without_a_word():
    check_statistics(tiny_spec(), statistics())
    assert statistics_notes(tiny_spec(), statistics()) == []


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'actions_std': [1, 1e30, 1]}, "'elbow'"),
        ({'actions_std': [1, 1, 101]}, "'gripper'"),
        ({'actions_std': [1, 1, 999]}, "'gripper'"),
        ({'actions_mean': [-1e4, 0, 0]}, "'shoulder'"),
        ({'actions_mean': [0, 2e30, 0]}, "'elbow'"),
        ({'state_q99': [1, 2e38, 1]}, "'elbow'"),
    ],
)
def test_numbers_beyond_every_robot_are_refused_with_the_name(changes, words):
    with pytest.raises(FieldError, match=words):
        check_statistics(tiny_spec(), statistics(**changes))


def test_what_is_too_far_depends_on_the_unit():
    spec = tiny_spec()
    units = ('deg', 'mm', '1')
    state = tuple(replace(one, unit=unit) for one, unit in zip(spec.state, units, strict=True))
    actions = tuple(replace(one, unit=unit) for one, unit in zip(spec.actions, units, strict=True))
    spec = replace(spec, state=state, actions=actions)
    check_statistics(spec, statistics(actions_std=[5900, 19_000, 4096]))
    with pytest.raises(FieldError, match="'elbow'"):
        check_statistics(spec, statistics(actions_std=[5900, 21_000, 4096]))


@pytest.mark.parametrize(
    ('changes', 'note'),
    [
        ({'actions_std': [1, 0, 1]}, "actions 'elbow' have no range"),
        ({'actions_std': [0, 1, 1e-8]}, "actions 'shoulder', 'gripper' have no range"),
        ({'state_q01': [-1.5, 1.5, -1.5]}, "states 'elbow' have no range"),
        ({'actions_std': [1, 1, 51]}, "actions 'gripper' reach further than nearly any robot"),
        ({'state_q99': [1.5, 51, 1.5]}, "states 'elbow' reach further than nearly any robot"),
        ({'state_q99': [1.5, 1.5, 1e30]}, "states 'gripper' have a range beyond any robot"),
        (
            {
                'state_q01': [-1.5, -2.9, -1.5],
                'state_q99': [1.5, -1.2, 1.5],
                'actions_std': [1, 0.1, 1],
            },
            "absolute actions 'elbow' never come near the states of the same names",
        ),
    ],
)
# The parser of ROS's messages, where it is imported first here, imports what Python has renamed.
@pytest.mark.filterwarnings('error', 'ignore:module .sre_:DeprecationWarning')
def test_odd_numbers_are_said_at_info_and_served(tmp_path, capsys, changes, note):
    bundle = write_tiny_policy(tmp_path / 'bundle', tiny_spec())
    spec = read_bundle(bundle).spec
    save_file(statistics(**changes), bundle / 'statistics.safetensors')
    seal(bundle, replace(spec, files={}))
    capsys.readouterr()
    assert main(['info', str(bundle), '--quick']) == 0
    assert f'note        {note}' in capsys.readouterr().out
    policy = Policy.load(bundle)
    policy.warm_up()
    policy.close()


def test_a_joint_that_never_moved_and_sagged_is_said_for_nothing_but_its_range():
    spec = tiny_spec()
    held = statistics(
        state_q01=[-1.5, 0.45, -1.5],
        state_q99=[1.5, 0.45, 1.5],
        actions_mean=[0.0, 0.6, 0.0],
        actions_std=[1.0, 0.0, 1.0],
    )
    assert all('no range' in note for note in statistics_notes(spec, held))


def test_a_policy_that_would_leave_every_robot_is_not_loaded(tmp_path):
    bundle = write_tiny_policy(tmp_path / 'bundle', tiny_spec())
    save_file(statistics(actions_std=[1, 1e30, 1]), bundle / 'statistics.safetensors')
    with pytest.raises(BundleError):
        Policy.load(bundle, verify=False)


def test_identity_has_no_range_to_be_judged():
    spec = replace(
        tiny_spec(), normalisation=replace(tiny_spec().normalisation, actions='identity')
    )
    check_statistics(spec, statistics())
    assert statistics_notes(spec, statistics()) == []


def test_a_lower_and_an_upper_end_of_different_shapes_are_refused():
    spec = tiny_spec()
    spec = replace(spec, normalisation=replace(spec.normalisation, actions='clipped_range'))
    ends = {
        'actions.low': np.full(COUNT, -1.0),
        'actions.high': np.full((spec.real_horizon, COUNT), 1.0),
    }
    with pytest.raises(FieldError, match=r'actions\.high'):
        check_statistics(spec, {**statistics(), **ends})


@pytest.mark.parametrize(('width', 'said'), [(0.00086, True), (0.009, True), (0.02, False)])
def test_a_joint_that_hardly_moved_is_named_with_what_a_robot_beside_it_is(width, said):
    found = statistics(state_q01=[-1, 1.5 - width / 2, -1], state_q99=[1, 1.5 + width / 2, 1])
    check_statistics(tiny_spec(), found)
    notes = [note for note in statistics_notes(tiny_spec(), found) if "'elbow'" in note]
    assert bool(notes) == said
    if said:
        assert f'{2 * 0.05 / width:.0f}' in notes[0]


def test_an_action_that_hardly_moved_is_named():
    found = statistics(actions_std=[1, 0.001, 1])
    (note,) = statistics_notes(tiny_spec(), found)
    assert "'elbow'" in note


def test_a_share_that_hardly_moved_has_no_unit_in_words():
    spec = tiny_spec()
    spec = replace(spec, actions=tuple(replace(one, unit='1') for one in spec.actions))
    (note,) = statistics_notes(spec, statistics(actions_std=[1, 0.001, 1]))
    assert re.search(r'over 0\.00\d+;', note)


# --- Statistics that look like another unit's are asked about, but where a person said it by name

ARM = np.array([1.9, 1.7, 0.8])


def spec_of(*units: str, kind: str = 'absolute') -> BundleSpec:
    spec = tiny_spec()
    state = tuple(replace(one, unit=unit) for one, unit in zip(spec.state, units, strict=True))
    anchors = [name if kind == 'delta' else None for name in JOINTS]
    actions = tuple(
        replace(one, unit=unit, kind=kind, relative_to=anchor)
        for one, unit, anchor in zip(spec.actions, units, anchors, strict=True)
    )
    return replace(spec, state=state, actions=actions)


def statistics_of(reach: np.ndarray) -> dict[str, np.ndarray]:
    return {
        'state.q01': -reach,
        'state.q99': reach,
        'actions.mean': np.zeros(len(reach)),
        'actions.std': reach,
    }


@pytest.mark.parametrize(
    ('units', 'reach', 'other'),
    [
        (('deg',) * 3, ARM, 'rad'),
        (('percent',) * 3, ARM, 'rad or 1'),
        (('deg', 'deg', 'percent'), ARM * [1, 1, 100], 'rad'),
        (('rad',) * 3, ARM * 57.3, 'deg'),
        (('rad', 'rad', '1'), ARM * [57.3, 0.5, 1], 'deg'),
        (('m',) * 3, ARM * 1000, 'mm'),
        (('mm',) * 3, ARM, 'm'),
        (('rad',) * 3, ARM, None),
        (('deg',) * 3, ARM * 57.3, None),
        # A base that hardly moves beside an arm that does.
        (('deg',) * 3, ARM * [1, 57.3, 57.3], None),
        (('percent',) * 3, ARM * 50, None),
        (('1',) * 3, ARM * 4096, None),
        # Constant: it says nothing.
        (('deg',) * 3, ARM * 0, None),
    ],
)
def test_only_numbers_that_another_unit_explains_are_doubted(units, reach, other):
    spec, statistics = spec_of(*units), statistics_of(reach)
    doubts = unit_doubts(spec, statistics)
    assert [doubt.other for doubt in doubts] == ([] if other is None else [other])
    assert any('--units' in note for note in bundle_notes(spec, statistics)) == (other is not None)


def test_differences_may_be_small_but_not_the_state_that_they_are_from():
    spec = spec_of('deg', 'deg', 'deg', kind='delta')
    statistics = statistics_of(ARM)
    assert len(unit_doubts(spec, statistics)) == 1
    statistics |= {'state.q01': -ARM * 57.3, 'state.q99': ARM * 57.3}
    assert unit_doubts(spec, statistics) == []


def test_what_was_said_by_name_is_not_asked_again():
    spec, statistics = spec_of('deg', 'deg', 'deg'), statistics_of(ARM)
    sure = {(group, name) for group in ('state', 'actions') for name in JOINTS}
    assert unit_doubts(spec, statistics, sure) == []
    (doubt,) = unit_doubts(spec, statistics, sure - {('state', JOINTS[1])})
    assert doubt.names == (JOINTS[1],) and doubt.reach == pytest.approx(1.7)
