"""LeRobot's folders of Diffusion Policy: what is refused names config.json and its field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from family_contracts.diffusion import folder as recorded_folder
from reference_cases import shipped

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import plan_export
from vla_runtime.files.json_file import JsonError

RECORDED = shipped('diffusion_folder.end_to_end')


@pytest.fixture
def folder(tmp_path) -> Path:
    source = RECORDED.with_name(RECORDED.name.removesuffix('.end_to_end.json'))
    return Path(shutil.copytree(source, tmp_path / 'policy'))


@pytest.fixture
def options(tmp_path) -> ExportOptions:
    return recorded_folder(RECORDED, tmp_path / 'recorded').options


def change(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ('field', 'changes'),
    [
        ('n_action_steps', {'n_action_steps': 16}),
        ('n_groups', {'n_groups': None}),
        ('clip_sample_range', {'clip_sample_range': 0}),
        ('clip_sample_range', {'clip_sample_range': -1.0}),
        (
            'beta_start',
            {'beta_schedule': 'linear', 'beta_start': 0.02, 'beta_end': 0.0001},
        ),
        ('beta_schedule', {'beta_schedule': 'Linear'}),
        ('prediction_type', {'prediction_type': 'Epsilon'}),
        ('num_inference_steps', {'num_inference_steps': 2000}),
        ('timestep_spacing', {'timestep_spacing': 'trailing'}),
        ('steps_offset', {'steps_offset': 1}),
        ('thresholding', {'thresholding': True}),
        ('rescale_betas_zero_snr', {'rescale_betas_zero_snr': True}),
        ('beta_end', {'beta_schedule': 'linear', 'beta_start': 0.9, 'beta_end': 0.999}),
        ('beta_end', {'beta_schedule': 'linear', 'beta_start': 1e-12, 'beta_end': 1e-12}),
        ('beta_schedule', {'beta_schedule': 'sigmoid', 'noise_scheduler_type': 'DDIM'}),
        ('num_train_timesteps', {'num_train_timesteps': 100_000}),
    ],
)
def test_what_cannot_be_computed_is_refused_by_file_and_field(folder, options, field, changes):
    change(folder, changes)
    with pytest.raises((ExportError, JsonError)) as error:
        plan_export(folder, options, default_name='tiny')
    assert str(folder / 'config.json') in str(error.value)
    assert field in str(error.value).split('config.json', 1)[1][: len(field) + 8]


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('down_dims', [16, 32]),
        ('kernel_size', 3),
        ('diffusion_step_embed_dim', 64),
        ('spatial_softmax_num_keypoints', 7),
    ],
)
def test_sizes_that_the_tensors_contradict_are_refused(folder, options, field, value):
    change(folder, {field: value})
    with pytest.raises(ExportError) as error:
        plan_export(folder, options, default_name='tiny')
    assert field in str(error.value)


def test_the_most_action_steps_of_a_chunk_are_exported(folder, options):
    change(folder, {'n_action_steps': 15})
    plan_export(folder, options, default_name='tiny')


def test_ends_of_betas_that_the_cosine_does_not_have_are_not_judged(folder, options):
    change(folder, {'beta_schedule': 'squaredcos_cap_v2', 'beta_start': 0.0, 'beta_end': 1.5})
    plan_export(folder, options, default_name='tiny')
