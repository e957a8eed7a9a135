"""Keys of a checkpoint's configurations: what no reader asks for is told, in every family."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from contract_cases import of_cases
from family_contracts import contract_of
from family_contracts.declaration import Folder

from vla_convert.export.conversion import plan_export

KEY = 'strict_padding_of_a_fork'
FOLDERS = of_cases(lambda contract: contract.folders and contract.folders())
each_folder = pytest.mark.parametrize(('family', 'name'), FOLDERS)


@pytest.fixture
def folder(family: str, name: str, tmp_path, monkeypatch) -> Folder:
    folders = contract_of(family).folders
    assert folders is not None
    made = folders()[name](tmp_path)
    made.prepare(monkeypatch)
    # Some are the shipped cases themselves.
    return replace(made, path=Path(shutil.copytree(made.path, tmp_path / 'copied')))


def notes_of(folder: Folder) -> list[str]:
    """Notes of an export that are about keys."""
    plan = plan_export(folder.path, folder.options, default_name='tiny')
    return [note for note in plan.notes if 'has keys' in note]


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def change_config(folder: Folder, values: dict[str, Any]) -> None:
    edit(folder.path / 'config.json', lambda config: config.update(values))


@each_folder
def test_a_whole_folder_has_no_unknown_keys(folder):
    assert notes_of(folder) == []


@each_folder
def test_an_unknown_key_is_told_with_its_value(folder):
    values = {'strict_of_a_fork': True, 'plain_of_a_fork': False, 'scale_of_a_fork': 0.5}
    change_config(folder, values | {'absent_by_null': None})
    (note,) = notes_of(folder)
    assert note.startswith('config.json')
    assert all(f'{key}: {json.dumps(value)}' in note for key, value in values.items())
    assert 'absent_by_null' not in note


# Begun as the keys of a training are, each in place of a pattern that took all that begin so.
LIKE_KNOWN = (
    *('model_gate', 'backbone_new', 'video_fps_stack', 'noise_new', 'embodiment_gate'),
    *('collator_x', 'tune_gate', 'lora_of_state', 'balance_gate', 'dataloader_x', 'tactile_x'),
    *('gripper_gate', 'finetune_gate', 'vlm_gate', 'memory_gate', 'time_sampling_gate'),
    *('llm_gate', 'output_gate', 'forced_x_token_id', 'return_dict_x', 'rtc_config_x'),
    *('timestep_sampling_x', 'vision_encoder_gate', 'beta_gate', 'clip_sample_x'),
    *('optimizer_gate', 'scheduler_gate', 'tvf_gate', 'max_gate', 'state_dropout_x'),
)


@each_folder
def test_an_unknown_key_that_begins_as_known_ones_do_is_told(folder, monkeypatch):
    monkeypatch.setattr('vla_convert.checkpoints.unread_keys.join_truncated', joined)
    change_config(folder, dict.fromkeys(LIKE_KNOWN, 0.5))
    (note,) = notes_of(folder)
    assert [key for key in LIKE_KNOWN if f'{key}: 0.5' not in note] == []


def joined(items: Iterable[str], between: str) -> str:
    """As `join_truncated`, of any number."""
    return between.join(items)


@each_folder
@pytest.mark.parametrize('file', ['policy_preprocessor.json', 'policy_postprocessor.json'])
def test_an_unknown_setting_of_a_step_is_told(folder, file):
    path = folder.path / file
    if not path.is_file():
        pytest.skip('a folder without processors')
    edit(path, lambda document: [step['config'].update({KEY: 3}) for step in document['steps']])
    steps = len(json.loads(path.read_text())['steps'])
    (note,) = notes_of(folder)
    assert note.startswith(file)
    assert all(f'steps[{index}].config.{KEY}: 3' in note for index in range(min(steps, 10)))


@each_folder
def test_every_field_says_where_it_came_from(folder):
    """A file of the folder and a key of it, an option, or the project itself."""
    plan = plan_export(folder.path, folder.options, default_name='tiny')
    origins = dict(plan.origins)
    assert {'cameras', 'images', 'state', 'actions', 'statistics.safetensors'} <= set(origins)
    assert {'denoise_steps', 'step_time_s'} <= set(origins)
    stated = {one.name for one in fields(plan.spec.dims)}
    assert ('dimensions.horizon' in origins) == ('horizon' in stated)
    for place in origins.values():
        file, _, key = place.partition(', ')
        if (folder.path / file).suffix == '.json' and key:
            assert holds(json.loads((folder.path / file).read_text()), key), place


def holds(document: Any, field: str) -> bool:
    """Return whether a document has a field, such as `steps[2].config.eps`."""
    for part in re.findall(r'[^.\[\]]+', field):
        at = int(part) if isinstance(document, list) else part
        if isinstance(document, dict) and at not in document:
            return False
        document = document[at]
    return True


@each_folder
def test_keys_of_training_alone_are_not_told(folder):
    config = json.loads((folder.path / 'config.json').read_text())
    change_config(
        folder,
        {'optimizer_lr': 1e-4, 'scheduler_decay_lr': 1e-6, 'gradient_checkpointing': True}
        if 'input_features' in config
        else {'torch_dtype': 'bfloat16', 'transformers_version': '4.57.1', 'architectures': ['A']},
    )
    assert notes_of(folder) == []
