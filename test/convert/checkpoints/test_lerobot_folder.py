"""LeRobot folders: what config and processors say, and every way in which they can disagree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_folders import (
    copy_lerobot_folder,
    draft_of,
    edit_config,
    edit_json,
    edit_step,
    joints,
    make_relative,
)
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.lerobot_folder import is_lerobot_folder
from vla_runtime.bundle.schema import CameraSpec
from vla_runtime.files.json_file import JsonError

REFUSED = (ExportError, JsonError)

STATISTICS = 'policy_preprocessor_step_3_normalizer_processor.safetensors'
NAMES = joints().split(',')
STATE = 'observation.state'


@pytest.fixture
def folder(tmp_path) -> Path:
    return copy_lerobot_folder(tmp_path / 'policy')


def refuses(folder: Path, pattern: str) -> None:
    with pytest.raises(REFUSED, match=pattern):
        draft_of(folder)


def test_a_folder_says_all_but_names_units_and_rate(folder):
    draft = draft_of(folder)
    assert is_lerobot_folder(folder)
    assert (draft.family, draft.prompt_template, draft.prompt_cleaning) == (
        'pi05',
        'pi05_state',
        'lerobot',
    )
    assert draft.cameras == (CameraSpec('top'), CameraSpec('wrist'))
    assert (draft.images.padding, draft.images.resample) == ('centre', 'bilinear')
    assert (draft.state_length, draft.action_length, draft.action_names) == (6, 6, None)
    assert draft.deltas == (None,) * 6
    assert (draft.horizon, draft.prompt_length, draft.denoise_steps) == (12, 64, 10)
    assert (draft.image_size, draft.action_dim, draft.state_dim) == (56, 32, 0)
    assert draft.variant == 'gemma_2b'
    assert draft.normalisation.state == draft.normalisation.actions == 'quantiles_lerobot'
    assert draft.tokenizer == folder / 'tokenizer.json'
    stored = load_file(folder / STATISTICS)
    np.testing.assert_array_equal(draft.statistics['actions.q99'], stored['action.q99'])
    np.testing.assert_array_equal(draft.statistics['state.std'], stored['observation.state.std'])


@pytest.mark.parametrize(('changes', 'steps'), [({}, 0), ({'rtc_training_max_delay': 5}, 5)])
def test_the_delay_that_a_policy_was_trained_with_is_kept(folder, changes, steps):
    edit_config(folder, **changes)
    assert draft_of(folder).trained_delay_steps == steps


def test_a_folder_of_another_kind_is_told_apart(tmp_path):
    (tmp_path / 'config.json').write_text('{"action_dim": 32}')
    assert not is_lerobot_folder(tmp_path)


@pytest.mark.parametrize('stated', [True, False])
def test_empty_cameras_come_last_and_are_always_masked(folder, stated):
    def change(document: dict[str, Any]) -> None:
        document['empty_cameras'] = 1
        if stated:
            # LeRobot writes the feature too, wherever it stands in the mapping.
            empty = {'observation.images.empty_camera_0': {'type': 'VISUAL', 'shape': [3, 56, 56]}}
            document['input_features'] = {**empty, **document['input_features']}

    edit_json(folder / 'config.json', change)
    assert draft_of(folder).cameras == (
        CameraSpec('top'),
        CameraSpec('wrist'),
        CameraSpec('empty_camera_0', present=False),
    )


@pytest.mark.parametrize(
    ('mode', 'kind'),
    [('MEAN_STD', 'mean_std_lerobot'), ('MIN_MAX', 'min_max'), ('IDENTITY', 'identity')],
)
def test_every_normaliser_of_lerobot_has_its_name_here(folder, mode, kind):
    modes = {'VISUAL': 'IDENTITY', 'STATE': mode, 'ACTION': mode}
    edit_config(folder, normalization_mapping=modes)
    edit_step(folder, 'normalizer_processor', norm_map=modes)
    edit_step(folder, 'unnormalizer_processor', norm_map=modes)
    draft = draft_of(folder)
    assert (draft.normalisation.state, draft.normalisation.actions) == (kind, kind)


def test_a_state_that_the_processor_leaves_alone_is_not_normalised(folder):
    edit_step(folder, 'normalizer_processor', normalize_observation_keys=['observation.images.top'])
    assert draft_of(folder).normalisation.state == 'identity'


class TestRenamedInTraining:
    """LeRobot 0.4 to 0.6.1 normalises by the new names what the statistics have under the old.

    Later releases rename the statistics too.
    """

    FRONT = 'observation.images.front'

    def rename(self, folder: Path, renamed: dict[str, str]) -> None:
        edit_step(folder, 'rename_observations_processor', rename_map=renamed)
        back = {ours: theirs for theirs, ours in renamed.items()}
        for path in folder.glob('policy_*_step_*.safetensors'):
            stored = load_file(path)
            for ours, theirs in back.items():
                for key in [key for key in stored if key.startswith(f'{ours}.')]:
                    stored[key.replace(ours, theirs, 1)] = stored.pop(key)
            save_file(stored, path)

    def test_a_state_that_was_renamed_is_as_it_is_and_noted(self, folder):
        self.rename(folder, {'observation.joints': 'observation.state'})
        draft = draft_of(folder)
        assert draft.normalisation.state == 'identity'
        assert draft.normalisation.actions == 'quantiles_lerobot'
        (note,) = draft.notes
        assert 'observation.state (from observation.joints)' in note

    @pytest.mark.parametrize('more', [{}, {FRONT: 'observation.images.top'}])
    def test_statistics_that_were_renamed_too_are_applied(self, folder, more):
        # LeRobot after 0.6.1: nothing has the data set's names.
        edit_step(
            folder,
            'rename_observations_processor',
            rename_map={'observation.joints': STATE, 'action.arm': 'action', **more},
        )
        draft = draft_of(folder)
        stored = load_file(folder / STATISTICS)
        assert (draft.normalisation.state, draft.notes) == ('quantiles_lerobot', [])
        np.testing.assert_array_equal(draft.statistics['state.q01'], stored[f'{STATE}.q01'])
        np.testing.assert_array_equal(draft.statistics['actions.q01'], stored['action.q01'])

    def test_cameras_that_no_training_normalises_need_no_note(self, folder):
        self.rename(folder, {self.FRONT: 'observation.images.top'})
        assert draft_of(folder).notes == []

    def test_a_state_with_statistics_of_both_names_is_normalised(self, folder):
        edit_step(folder, 'rename_observations_processor', rename_map={'a.joints': STATE})
        path = folder / STATISTICS
        stored = load_file(path)
        stored |= {key.replace(STATE, 'a.joints'): v for key, v in stored.items() if STATE in key}
        save_file(stored, path)
        draft = draft_of(folder)
        assert (draft.normalisation.state, draft.notes) == ('quantiles_lerobot', [])

    def test_statistics_under_a_name_that_nothing_renames_are_listed(self, folder):
        self.rename(folder, {'observation.joints': 'observation.state'})
        edit_step(folder, 'rename_observations_processor', rename_map={})
        refuses(folder, r"has no 'observation\.state\.q01'; it has those of .*observation\.joints")


class TestAdapterBesideWeights:
    def spoil(self, folder: Path, use_peft: bool | None) -> None:
        edit_json(folder / 'config.json', lambda document: document.pop('use_peft', None))
        if use_peft is not None:
            edit_config(folder, use_peft=use_peft)
        (folder / 'adapter_config.json').write_text('{}')

    @pytest.mark.parametrize('use_peft', [True, None])
    def test_it_is_refused_where_the_folder_does_not_say_which_counts(self, folder, use_peft):
        self.spoil(folder, use_peft)
        found = 'true' if use_peft else 'missing'
        refuses(folder, rf'use_peft: is {found}, .*adapter_config\.json.*--base')

    def test_it_is_noted_where_the_folder_says_that_it_is_left_out(self, folder):
        self.spoil(folder, False)
        (note,) = draft_of(folder).notes
        assert 'adapter_config.json' in note and 'use_peft' in note


class TestRelativeActions:
    def test_excluded_joints_stay_absolute(self, folder):
        make_relative(folder)
        draft = draft_of(folder)
        assert draft.deltas == (0, 1, 2, 3, 4, None)
        assert draft.action_names == tuple(NAMES)

    def test_a_word_excludes_every_name_that_contains_it(self, folder):
        make_relative(folder, exclude_joints=['WRIST', 'Gripper'])
        assert draft_of(folder).deltas == (0, 1, 2, None, None, None)

    @pytest.mark.parametrize('changes', [{'exclude_joints': []}, {'action_names': None}])
    def test_without_words_or_names_every_action_is_relative(self, folder, changes):
        make_relative(folder, **changes)
        assert draft_of(folder).deltas == tuple(range(6))

    def test_config_and_processor_must_agree(self, folder):
        edit_config(folder, use_relative_actions=True)
        refuses(
            folder, r'config\.json says use_relative_actions True but .*preprocessor\.json says'
        )

    def test_both_processors_must_agree(self, folder):
        make_relative(folder)
        edit_step(folder, 'absolute_actions_processor', enabled=False)
        refuses(folder, r'preprocessor\.json says relative actions True but .*postprocessor\.json')

    def test_excluded_joints_must_agree(self, folder):
        make_relative(folder)
        edit_config(folder, relative_exclude_joints=[])
        refuses(folder, r"relative_exclude_joints \[\] but .*says exclude_joints \['gripper'\]")

    def test_names_must_agree(self, folder):
        make_relative(folder)
        edit_config(folder, action_feature_names=NAMES[::-1])
        refuses(
            folder, r'config\.json says action_feature_names .*preprocessor\.json says action_n'
        )

    def test_names_that_do_not_name_every_action_are_none(self, folder):
        make_relative(folder, action_names=NAMES[:5])
        # As LeRobot's own mask: actions beyond the names are relative.
        draft = draft_of(folder)
        assert draft.action_names is None
        assert draft.deltas == tuple(range(6))


MODES = {'VISUAL': 'IDENTITY', 'STATE': 'QUANTILES', 'ACTION': 'QUANTILES'}

DEFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    'no type': (
        lambda f: edit_json(f / 'config.json', lambda d: d.pop('type')),
        r"field type: is missing.*train_config\.json.*'pi05'",
    ),
    'another policy': (
        lambda f: edit_config(f, type='another'),
        "field type: policies of type 'another' are not served, only .*'pi05'",
    ),
    'visual memory': (
        lambda f: edit_config(f, use_visual_memory=True),
        'use_visual_memory: True is not',
    ),
    'state memory': (
        lambda f: edit_config(f, use_proprioceptive_memory=True),
        'field use_proprioceptive_memory: True is not supported',
    ),
    'adapter': (
        lambda f: [
            edit_config(f, use_peft=True),
            (f / 'adapter_model.safetensors').write_bytes(b''),
        ],
        'field use_peft: ',
    ),
    'history': (lambda f: edit_config(f, n_obs_steps=2), 'field n_obs_steps: 2 is not supported'),
    'time periods': (
        lambda f: edit_config(f, min_period=0.01),
        r'field min_period: 0\.01 is not supp',
    ),
    'oblong': (
        lambda f: edit_config(f, image_resolution=[56, 112]),
        r'image_resolution: \[56, 112\]; only square',
    ),
    'no camera': (
        lambda f: edit_json(
            f / 'config.json',
            lambda d: d.update(
                input_features={'observation.state': d['input_features']['observation.state']}
            ),
        ),
        r'field input_features: no camera',
    ),
    'no state': (
        lambda f: edit_json(
            f / 'config.json', lambda d: d['input_features'].pop('observation.state')
        ),
        r'field input_features\.observation\.state: is missing',
    ),
    'no horizon': (
        lambda f: edit_json(f / 'config.json', lambda d: d.pop('chunk_size')),
        r'config\.json: field chunk_size: is missing',
    ),
    'horizon of words': (
        lambda f: edit_config(f, chunk_size='12'),
        r"chunk_size: '12' \(str\) where int",
    ),
    'horizon of truth': (
        lambda f: edit_config(f, chunk_size=True),
        r'chunk_size: True \(bool\) where int',
    ),
    'not JSON': (lambda f: (f / 'config.json').write_text('{'), r'config\.json: cannot be read'),
    'a list': (lambda f: (f / 'policy_preprocessor.json').write_text('[]'), 'is not a mapping'),
    'half of the processors': (
        lambda f: (f / 'policy_preprocessor.json').unlink(),
        r'preprocessor\.json: is missing',
    ),
    'unknown step': (
        lambda f: edit_json(
            f / 'policy_preprocessor.json',
            lambda d: d['steps'].append({'registry_name': 'crop_processor', 'config': {}}),
        ),
        r"field steps\[7\]: the step 'crop_processor' is not supported",
    ),
    'a step twice': (
        lambda f: edit_json(
            f / 'policy_preprocessor.json', lambda d: d['steps'].append(d['steps'][3])
        ),
        r"field steps\[7\]: a second step 'normalizer_processor'",
    ),
    'no normaliser': (
        lambda f: edit_json(f / 'policy_preprocessor.json', lambda d: d['steps'].pop(3)),
        "has no step 'normalizer_processor'",
    ),
    'prompt length': (
        lambda f: edit_config(f, tokenizer_max_length=48),
        'tokenizer_max_length 48 but .* max_length 64; they must agree',
    ),
    'left padding': (
        lambda f: edit_step(f, 'tokenizer_processor', padding_side='left'),
        r"field steps\[5\]\.config\.padding_side: only 'right'",
    ),
    'normalisers disagree': (
        lambda f: edit_step(f, 'normalizer_processor', norm_map={**MODES, 'STATE': 'MIN_MAX'}),
        r'normalization_mapping\.STATE QUANTILES but .*preprocessor\.json says norm_map MIN_MAX',
    ),
    'unnormaliser disagrees': (
        lambda f: edit_step(f, 'unnormalizer_processor', norm_map={**MODES, 'ACTION': 'MIN_MAX'}),
        r'normalization_mapping\.ACTION QUANTILES but .*postprocessor\.json says norm_map MIN_MAX',
    ),
    'unknown normaliser': (
        lambda f: [
            edit_config(f, normalization_mapping={**MODES, 'STATE': 'QUANTILE10'}),
            edit_step(f, 'normalizer_processor', norm_map={**MODES, 'STATE': 'QUANTILE10'}),
        ],
        "normalization_mapping.STATE: 'QUANTILE10' is not supported",
    ),
    'normalised images': (
        lambda f: [
            edit_config(f, normalization_mapping={**MODES, 'VISUAL': 'MEAN_STD'}),
            edit_step(f, 'normalizer_processor', norm_map={**MODES, 'VISUAL': 'MEAN_STD'}),
        ],
        'normalization_mapping.VISUAL: MEAN_STD is not supported',
    ),
    'epsilon': (
        lambda f: edit_step(f, 'normalizer_processor', eps=1e-6),
        r'config\.eps: 1e-06 is not 1e-08',
    ),
    'statistics elsewhere': (
        lambda f: edit_json(
            f / 'policy_preprocessor.json',
            lambda d: d['steps'][3].update(state_file='../../other.safetensors'),
        ),
        'not the plain name of a safetensors file',
    ),
    'statistics lost': (lambda f: (f / STATISTICS).unlink(), 'safetensors: cannot be read'),
}


@pytest.mark.parametrize('defect', DEFECTS, ids=str)
def test_what_cannot_be_reproduced_is_refused_by_name(folder, defect):
    spoil, pattern = DEFECTS[defect]
    spoil(folder)
    refuses(folder, pattern)


class TestStatistics:
    def change(self, folder: Path, **changes: np.ndarray | None) -> None:
        stored = load_file(folder / STATISTICS)
        for name, value in changes.items():
            key = name.replace('state_', 'observation.state.').replace('action_', 'action.')
            stored.pop(key, None)
            if value is not None:
                stored[key] = value
        save_file(stored, folder / STATISTICS)

    def test_a_base_model_without_statistics_is_named(self, folder):
        self.change(folder, state_q01=None)
        refuses(folder, r"has no 'observation\.state\.q01'; .* \(a base model\) has none")

    def test_a_kind_that_numpy_lacks_is_named(self, folder):
        stored = {'action.q01': torch.zeros(6).to(torch.float8_e4m3fn)}
        save_torch_file(stored, folder / STATISTICS)
        refuses(folder, r"tensor 'action\.q01' is F8_E4M3; expected F32 or F64")

    def test_a_length_that_is_not_the_features_is_named(self, folder):
        self.change(folder, action_q01=np.zeros(7, np.float32))
        refuses(folder, r"tensor 'action\.q01' has shape \[7\] but config\.json says 6")

    def test_both_processors_hold_the_same_action_statistics(self, folder):
        self.change(folder, action_q01=np.full(6, -9, np.float32))
        refuses(
            folder, r"preprocessor_step_3.* and .*postprocessor_step_0.* differ in 'action\.q01'"
        )

    def test_statistics_that_this_runtime_never_reads_are_left_out(self, folder):
        self.change(folder, state_q50=np.zeros(6, np.float32))
        assert 'state.q50' not in draft_of(folder).statistics


def test_renamed_observations_are_kept_as_data(folder):
    names = {'observation.images.front': 'observation.images.top'}
    edit_step(folder, 'rename_observations_processor', rename_map=names)
    assert draft_of(folder).rename_map == names
