"""Absolute actions that never come near their states: the export asks what they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoint_folders import (
    copy_lerobot_folder,
    lerobot_folder,
    openpi_statistics,
    tiny_tensors,
    write_openpi_folder,
)
from safetensors.numpy import load_file, save_file

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import plan_export
from vla_runtime.bundle.statistics import statistics_notes
from vla_runtime.bundle.summary import describe

NAMES = ('pan', 'lift', 'elbow', 'roll', 'wrist', 'gripper')
MIDDLES = [0.0, 0.3, -2.0, 0.0, 2.2, 0.5]


def write_policy(folder: Path, actions: list[float], spread: float) -> Path:
    """A pi0.5 policy whose states spread by 0.3 around `MIDDLES`."""
    numbers = openpi_statistics()
    for group, middles, half in (('state', MIDDLES, 0.6), ('actions', actions, 2 * spread)):
        numbers[group] = {
            'mean': middles,
            'std': [half / 2] * len(middles),
            'q01': [middle - half for middle in middles],
            'q99': [middle + half for middle in middles],
        }
    return write_openpi_folder(folder, tiny_tensors(), numbers)


@pytest.fixture
def velocities(tmp_path):
    """Velocities around 0, as DROID's; `elbow` and `wrist` never are near 0."""
    return write_policy(tmp_path / 'policy', [0.0] * 5 + [0.5], 0.2)


def plan(folder, **changes):
    usual = {
        'tokenizer': lerobot_folder() / 'tokenizer.json',
        'state_names': NAMES,
        'action_names': NAMES,
        'units': ('rad',),
        'rate_hz': 15.0,
        'vision_heads': 4,
        'prompt_template': 'pi05_state',
        'deltas': (),
    }
    return plan_export(folder, ExportOptions(**{**usual, **changes}), default_name='p')


def test_the_question_says_what_was_seen_where_and_what_mends_it(velocities):
    with pytest.raises(ExportError, match='--target') as error:
        plan(velocities)
    text = str(error.value)
    file = velocities / 'assets' / 'lab' / 'arm' / 'norm_stats.json'
    assert f'In {file} (q01, q99)' in text
    assert "'elbow' goes from -0.4 to 0.4 rad and its state from -2.6 to -1.4" in text
    assert "'wrist' goes from -0.4 to 0.4 rad and its state from 1.6 to 2.8" in text
    assert not any(quoted in text for quoted in ("'pan'", "'lift'", "'roll'", "'gripper'"))
    assert '--velocity' in text and '--delta' in text and 'not supported' in text


def test_targets_are_taken_as_such_and_the_bundle_says_so(velocities):
    with pytest.raises(ExportError, match="'wrist' goes") as error:
        plan(velocities, targets=('elbow',))
    assert "'elbow' goes" not in str(error.value)
    found = plan(velocities, targets=('elbow', 'wrist'))
    assert {action.kind for action in found.spec.actions} == {'absolute'}
    assert 'targets: elbow, wrist' in describe(found.spec)
    assert any('never come near' in note for note in statistics_notes(found.spec, found.statistics))


@pytest.mark.parametrize(
    ('given', 'meant'),
    [
        ('radians', 'rad'),
        ('Radian', 'rad'),
        ('degrees', 'deg'),
        ('meters', 'm'),
        ('metre', 'm'),
        ('millimetres', 'mm'),
        ('percentage', 'percent'),
        ('%', 'percent'),
        ('radians/s', 'rad/s'),
        ('metres/s', 'm/s'),
        ('rad', 'rad'),
        ('1', '1'),
    ],
)
def test_units_are_taken_as_people_write_them(given, meant):
    for target in ('', 'gripper=', 'state:x='):
        assert ExportOptions(units=(f'{target}{given}',)).units == (f'{target}{meant}',)


@pytest.mark.parametrize('given', ['raidans', 'gripper=furlong', 'rad/min', '', 'gripper='])
def test_a_unit_that_is_none_is_refused(given):
    with pytest.raises(ExportError, match='--units'):
        ExportOptions(units=(given,))


def test_velocities_by_name_and_unit_need_no_answer(velocities):
    units = ('rad', *(f'action:{name}=rad/s' for name in NAMES[:5]))
    found = plan(velocities, velocities=NAMES[:5], units=units)
    assert [action.kind for action in found.spec.actions] == ['velocity'] * 5 + ['absolute']
    assert 'targets' not in found.spec.source


def test_differences_from_the_state_need_no_answer(velocities):
    assert plan(velocities, deltas=NAMES[:5]).spec.actions[2].relative_to == 'elbow'


@pytest.mark.parametrize('middle', [0.0, 2.2])
def test_deltas_that_a_lerobot_data_set_stored_are_taken_and_positions_are_not(tmp_path, middle):
    folder = copy_lerobot_folder(tmp_path / 'policy')
    for path in folder.glob('policy_*.safetensors'):
        numbers = load_file(path)
        for key in numbers:
            group, _, kind = key.rpartition('.')
            offset = {'mean': 0.0, 'q01': -0.4, 'q99': 0.4}.get(kind)
            if offset is not None and group in ('observation.state', 'action'):
                around = middle if group == 'action' else 2.0
                numbers[key] = np.full_like(numbers[key], around + offset)
        save_file(numbers, path)
    # LeRobot itself makes none relative.
    changes = {'deltas': NAMES, 'prompt_template': None, 'tokenizer': None}
    if middle == 0.0:
        assert {action.kind for action in plan(folder, **changes).spec.actions} == {'delta'}
    else:
        with pytest.raises(ExportError, match='positions'):
            plan(folder, **changes)


def test_actions_that_reach_their_states_are_not_asked_about(tmp_path):
    # Half as wide as the states, and led by 0.4 rad.
    folder = write_policy(tmp_path / 'policy', [middle + 0.4 for middle in MIDDLES], 0.15)
    found = plan(folder)
    assert 'targets' not in found.spec.source
    assert statistics_notes(found.spec, found.statistics) == []


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'targets': ('elbo',)}, '--target'),
        (
            {'targets': ('pan',), 'deltas': ('pan',)},
            '--target',
        ),
        ({'targets': ('pan',), 'velocities': ('pan',)}, "'pan'"),
    ],
)
def test_targets_that_cannot_be_are_refused(velocities, changes, words):
    with pytest.raises(ExportError, match=words):
        plan(velocities, **changes)
