"""LeRobot's ACT folders: what they say, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_folders import edit_json, edit_tensors
from safetensors.torch import load_file, save_file

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.tensors import copy_tensors, read_tensors
from vla_convert.export.conversion import ExportPlan, plan_export
from vla_convert.readers.act import NAMES
from vla_runtime.bundle.tensors import check_tensors
from vla_runtime.families.act.declaration import ActDims
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


def test_statistics_of_each_cameras_channels_come_along(folder):
    statistics = plan(folder).statistics
    theirs = load_file(folder / 'policy_preprocessor_step_3_normalizer_processor.safetensors')
    for name in ('mean', 'std'):
        for camera in ('top', 'wrist'):
            np.testing.assert_array_equal(
                statistics[f'images.{camera}.{name}'],
                theirs[f'observation.images.{camera}.{name}'].flatten(),
            )


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
