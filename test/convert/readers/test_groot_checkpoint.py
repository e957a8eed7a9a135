"""LeRobot's GR00T folders: what they say, the slice of one embodiment, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_folders import edit_json
from groot_folders import JOINTS, SLOTS, write_groot_folder
from safetensors.torch import load_file, save_file

from vla_convert.checkpoints.errors import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.tensors import copy_tensors
from vla_convert.export.conversion import ExportPlan, plan_export
from vla_runtime.files.json_file import JsonError

OPTIONS = ExportOptions(
    state_names=JOINTS,
    action_names=JOINTS[:7],
    units=('rad',),
    rate_hz=30.0,
    vision_heads=4,
    heads={'context': 4, 'dit': 4},
    horizon=8,
    prompt_length=220,
)
REFUSED = (ExportError, JsonError)


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_groot_folder(tmp_path / 'policy')


def plan(folder: Path, options: ExportOptions = OPTIONS) -> ExportPlan:
    return plan_export(folder, options, default_name='tiny')


@pytest.mark.parametrize('tag', SLOTS)
def test_the_bundle_holds_the_slice_of_its_embodiment(tmp_path, tag):
    folder = write_groot_folder(tmp_path / 'policy', tag)
    copy_tensors(plan(folder).tensors, tmp_path / 'weights.safetensors')
    ours = load_file(tmp_path / 'weights.safetensors')
    theirs = load_file(folder / 'model.safetensors')
    for name, whole in (
        ('state_encoder.fc1.weight', 'state_encoder.layer1.W'),
        ('action_encoder.mix.bias', 'action_encoder.W2.b'),
        ('action_decoder.fc2.weight', 'action_decoder.layer2.W'),
    ):
        assert ours[name].equal(theirs[f'_groot_model.action_head.{whole}'][SLOTS[tag]]), name


def test_slice_0_of_an_unknown_tag_is_logged(folder, caplog):
    def forget(document):
        del document['steps'][2]['config']['embodiment_mapping']['so100']

    edit_json(folder / 'policy_preprocessor.json', forget)
    plan(folder)
    assert "embodiment_mapping has no 'so100'; slice 0 is taken" in caplog.text


def test_statistics_that_differ_or_are_missing_are_refused(folder):
    path = next(folder.glob('policy_postprocessor_step_0*'))
    statistics = load_file(path)
    save_file({**statistics, 'action.min': statistics['action.min'] + 1}, str(path))
    with pytest.raises(REFUSED, match=r'action\.min'):
        plan(folder)
    before = next(folder.glob('policy_preprocessor_step_2*'))
    save_file({'action.min': statistics['action.min']}, str(before))
    with pytest.raises(REFUSED, match=r'state\.min'):
        plan(folder)
