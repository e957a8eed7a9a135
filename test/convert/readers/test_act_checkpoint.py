"""LeRobot's ACT folders: what they say, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_folders import edit_config, edit_json, edit_tensors
from safetensors.torch import load_file, save_file
from tiny_policy import tokenizer_of

from vla_convert.checkpoints.errors import ExportError
from vla_convert.checkpoints.lerobot_folder import read_lerobot_folder
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.reader import find_reader
from vla_convert.checkpoints.tensors import copy_tensors, read_tensors
from vla_convert.export.conversion import ExportPlan, plan_export
from vla_convert.readers.act import NAMES, ActReader
from vla_runtime.bundle.schema import CameraSpec
from vla_runtime.bundle.tensors import check_tensors
from vla_runtime.families.act.dimensions import ActDims
from vla_runtime.families.flow_network import weight_shapes
from vla_runtime.files.json_file import JsonError

REFERENCE = Path(__file__).parents[2] / 'cases' / 'act_folder'
JOINTS = tuple('abcdef')
OPTIONS = ExportOptions(state_names=JOINTS, action_names=JOINTS, units=('deg',), rate_hz=30.0)
REFUSED = (ExportError, JsonError)


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(REFERENCE, tmp_path / 'policy'))


def plan(folder: Path, options: ExportOptions = OPTIONS) -> ExportPlan:
    return plan_export(folder, options, default_name='tiny')


def dims_of(folder: Path, options: ExportOptions = OPTIONS) -> ActDims:
    dims = plan(folder, options).spec.dims
    assert isinstance(dims, ActDims)
    return dims


def test_a_folder_says_all_but_names_units_and_rate(folder):
    reader, policy = find_reader(folder)
    assert isinstance(reader, ActReader) and policy is not None
    facts = read_lerobot_folder(folder, policy)
    assert (facts.family, facts.template, facts.prompt_length) == ('act', None, None)
    assert facts.cameras == (CameraSpec('top'), CameraSpec('wrist'))
    assert facts.image_sizes == ((64, 96), (64, 96))
    assert (facts.horizon, facts.denoise_steps) == (12, 1)
    assert facts.normalisation.images == 'mean_std_lerobot'
    with pytest.raises(REFUSED) as caught:
        plan(folder, ExportOptions())
    asked = re.findall(r'^  (--\S+)', str(caught.value), flags=re.M)
    assert set(asked) == {'--state-names', '--action-names', '--units', '--rate-hz'}


def test_a_bundle_of_it_has_neither_prompt_nor_tokenizer(folder):
    spec = plan(folder).spec
    assert (spec.prompt, spec.tokenizer, plan(folder).tokenizer) == (None, None, None)
    assert (spec.images.padding, spec.images.resample) == ('none', 'none')
    assert spec.source['vision_backbone'] == 'resnet18'


def test_statistics_of_each_cameras_channels_come_along(folder):
    statistics = plan(folder).statistics
    theirs = load_file(folder / 'policy_preprocessor_step_3_normalizer_processor.safetensors')
    for name in ('mean', 'std'):
        for camera in ('top', 'wrist'):
            np.testing.assert_array_equal(
                statistics[f'images.{camera}.{name}'],
                theirs[f'observation.images.{camera}.{name}'].flatten(),
            )


def test_all_sizes_are_read_off_tensors_and_config(folder):
    dims = dims_of(folder)
    assert dims.backbone.channels == (8, 16, 32, 64) and dims.backbone.blocks == (2, 2, 2, 2)
    assert (dims.encoder.depth, dims.decoder.depth, dims.encoder.mlp_dim) == (4, 1, 64)
    assert (dims.width, dims.encoder.num_heads, dims.images) == (32, 4, ((64, 96),))
    assert (dims.state_dim, dims.environment_dim, dims.activation) == (6, 0, 'relu')


def test_packed_projections_are_cut_where_they_lie(folder, tmp_path):
    theirs = load_file(folder / 'model.safetensors')
    tensors = read_tensors(folder, NAMES)
    check_tensors(tensors, weight_shapes('act', dims_of(folder)))
    copy_tensors(tensors, tmp_path / 'ours.safetensors')
    ours = load_file(tmp_path / 'ours.safetensors')
    for leaf in ('weight', 'bias'):
        packed = theirs[f'model.decoder.layers.0.multihead_attn.in_proj_{leaf}']
        parts = [ours[f'decoder.0.cross_attention.{part}.{leaf}'] for part in 'qkv']
        assert torch.equal(torch.cat(parts), packed)
        assert not torch.equal(parts[0], parts[1])


def test_cameras_of_other_sizes_each_have_their_own(folder):
    edit_json(
        folder / 'config.json',
        lambda d: d['input_features']['observation.images.wrist'].update(shape=[3, 48, 97]),
    )
    assert dims_of(folder).images == ((64, 96), (48, 97))


def add_environment(folder: Path, mode: str | None) -> None:
    """Give the policy an environment state of two numbers."""

    def features(document):
        document['input_features']['observation.environment_state'] = {'type': 'ENV', 'shape': [2]}
        if mode:
            document['normalization_mapping']['ENV'] = mode

    edit_json(folder / 'config.json', features)
    if mode:
        edit_json(
            folder / 'policy_preprocessor.json',
            lambda d: d['steps'][3]['config']['norm_map'].update(ENV=mode),
        )
    edit_tensors(
        folder,
        lambda t: (
            t
            | {
                'encoder_env_state_input_proj.weight': torch.ones(32, 2),
                'encoder_env_state_input_proj.bias': torch.ones(32),
                'encoder_1d_feature_pos_embed.weight': torch.ones(3, 32),
            }
        ),
    )


def test_an_environment_state_is_the_end_of_the_state_and_not_normalised_by_default(folder):
    add_environment(folder, None)
    options = replace(OPTIONS, state_names=(*JOINTS, 'block_x', 'block_y'))
    made = plan(folder, options)
    dims = made.spec.dims
    assert isinstance(dims, ActDims)
    assert (dims.state_dim, dims.environment_dim, dims.vector_tokens) == (8, 2, 3)
    assert made.statistics['state.mean'][6:].tolist() == [0.0, 0.0]
    assert made.statistics['state.std'][6:].tolist() == [1.0, 1.0]
    assert made.statistics['state.mean'][:6].any()


DEFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    'glu': (
        lambda f: edit_config(f, feedforward_activation='glu'),
        'field feedforward_activation',
    ),
    'another environment': (
        lambda f: add_environment(f, 'MIN_MAX'),
        'ENV: MIN_MAX is not supported where STATE is MEAN_STD',
    ),
    'another chunk': (
        lambda f: edit_config(f, chunk_size=20),
        'config.json.*chunk_size',
    ),
    'heads': (lambda f: edit_config(f, n_heads=5), 'num_heads'),
    'several observations': (
        lambda f: edit_config(f, n_obs_steps=2),
        'field n_obs_steps',
    ),
    'grey camera': (
        lambda f: edit_json(
            f / 'config.json',
            lambda d: d['input_features']['observation.images.top'].update(shape=[1, 64, 96]),
        ),
        r'has shape \[1, 64, 96\] where \[3, height, width\] is expected',
    ),
    'no statistics of a camera': (
        lambda f: edit_json(
            f / 'config.json',
            lambda d: d['input_features'].update(
                {'observation.images.third': {'type': 'VISUAL', 'shape': [3, 64, 96]}}
            ),
        ),
        r'images\.third\.mean',
    ),
    'packed in two': (
        lambda f: edit_tensors(
            f,
            lambda t: {
                k: v[:64] if k.endswith('encoder.layers.0.self_attn.in_proj_bias') else v
                for k, v in t.items()
            },
        ),
        r'does not divide into the 3 tensors|expected for .encoder\.0\.attention',
    ),
    'a lost layer': (
        lambda f: edit_tensors(
            f, lambda t: {k: v for k, v in t.items() if 'encoder.layers.2.' not in k}
        ),
        r"the checkpoint has no tensors for 'encoder\.2'",
    ),
}


@pytest.mark.parametrize('defect', DEFECTS, ids=str)
def test_what_cannot_be_reproduced_is_refused_by_name(folder, defect):
    spoil, pattern = DEFECTS[defect]
    spoil(folder)
    with pytest.raises(REFUSED, match=pattern):
        plan(folder)


@pytest.mark.parametrize(
    'options',
    [
        {'tokenizer': tokenizer_of('smolvla')},
        {'prompt_template': 'pi0'},
        {'prompt_length': 48},
        {'advantage': 'task_newline'},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_about_a_prompt_is_refused(folder, options):
    (name,) = options
    with pytest.raises(REFUSED, match=f'--{name.replace("_", "-")} says .* act has no language'):
        plan(folder, replace(OPTIONS, **options))


def test_several_denoise_steps_are_refused(folder):
    with pytest.raises(REFUSED, match='--denoise-steps'):
        plan(folder, replace(OPTIONS, denoise_steps=4))


def test_the_backbones_weights_of_before_training_are_not_asked_for(folder):
    config = json.loads((folder / 'config.json').read_text())
    assert config['pretrained_backbone_weights']
    edit_config(folder, pretrained_backbone_weights=None)
    assert plan(folder).spec == plan(REFERENCE).spec


def leave_alone(folder: Path, *keys: str) -> None:
    """Normalise these observations only."""
    edit_json(
        folder / 'policy_preprocessor.json',
        lambda d: d['steps'][3]['config'].update(normalize_observation_keys=list(keys)),
    )


def test_cameras_that_the_processor_leaves_alone_are_not_normalised(folder):
    leave_alone(folder, 'observation.state')
    normalisation = plan(folder).spec.normalisation
    assert (normalisation.images, normalisation.state) == ('identity', 'mean_std_lerobot')
    leave_alone(folder, 'observation.state', 'observation.images.top')
    with pytest.raises(REFUSED, match='normalised'):
        plan(folder)


class TestCamerasRenamedInTraining:
    """Statistics under the data set's names: LeRobot 0.4 to 0.6.1 left such images as they are."""

    def export(self, folder: Path, renamed: dict[str, str]) -> ExportPlan:
        def change(document: dict) -> None:
            for step in document['steps']:
                if step['registry_name'] == 'rename_observations_processor':
                    step['config']['rename_map'] = renamed

        edit_json(folder / 'policy_preprocessor.json', change)
        for path in folder.glob('policy_*_step_*.safetensors'):
            stored = load_file(path)
            for theirs, ours in renamed.items():
                for key in [key for key in stored if key.startswith(f'{ours}.')]:
                    stored[key.replace(ours, theirs, 1)] = stored.pop(key)
            save_file(stored, path)
        return plan(folder)

    def test_one_is_left_as_it_is_and_the_other_normalised(self, folder):
        usual = plan(folder).statistics
        found = self.export(folder, {'observation.images.front': 'observation.images.top'})
        np.testing.assert_array_equal(found.statistics['images.top.mean'], np.zeros(3))
        np.testing.assert_array_equal(found.statistics['images.top.std'], np.ones(3))
        for name in ('mean', 'std'):
            key = f'images.wrist.{name}'
            np.testing.assert_array_equal(found.statistics[key], usual[key])
        assert [note for note in found.notes if '--rename_map' in note]
        assert not [note for note in found.notes if 'absent' in note]

    def test_a_camera_without_statistics_of_any_name_is_refused(self, folder):
        for path in folder.glob('policy_*_step_*.safetensors'):
            stored = load_file(path)
            save_file({k: v for k, v in stored.items() if '.top.' not in k}, path)
        with pytest.raises(REFUSED, match=r"has no 'observation\.images\.top\.mean'; it has those"):
            plan(folder)
