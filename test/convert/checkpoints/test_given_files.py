"""Files that options name: a folder, a file of another kind, a vocabulary of another model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_folders import copy_lerobot_folder, joints, lerobot_folder
from full_disk import small_disk
from tiny_policy import tokenizer_of

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import ExportPlan, plan_export, write_export

JOINTS = tuple(joints().split(','))


def plan(folder: Path, **given) -> ExportPlan:
    names = {} if 'dataset' in given else {'state_names': JOINTS, 'action_names': JOINTS}
    options = ExportOptions(units=('rad',), rate_hz=30.0, vision_heads=4, **names, **given)
    return plan_export(folder, options, default_name='tiny')


class TestTokenizer:
    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        copied = copy_lerobot_folder(tmp_path / 'policy')
        (copied / 'tokenizer.json').unlink()
        return copied

    def test_its_folder_may_be_named(self, folder):
        found = plan(folder, tokenizer=lerobot_folder()).tokenizer
        assert found == lerobot_folder() / 'tokenizer.json'

    def test_a_folder_without_one_is_refused(self, tmp_path):
        with pytest.raises(ExportError, match=r'--tokenizer .* neither tokenizer\.json'):
            ExportOptions(tokenizer=tmp_path)

    def test_its_settings_are_not_taken_for_it(self, folder, tmp_path):
        settings = tmp_path / 'tokenizer_config.json'
        settings.write_text('{"tokenizer_class": "GemmaTokenizer"}')
        shutil.copy(lerobot_folder() / 'tokenizer.json', tmp_path)
        with pytest.raises(ExportError, match=rf'give {tmp_path}/tokenizer\.json'):
            plan(folder, tokenizer=settings)

    @pytest.mark.parametrize(
        ('content', 'remedy'),
        [(b'', 'is empty'), (b'version https://git-lfs.github.com/spec/v1\n', 'git lfs pull')],
    )
    @pytest.mark.parametrize('name', ['tokenizer.json', 'tokenizer.model'])
    def test_one_that_never_arrived_is_named_with_the_remedy(
        self, folder, tmp_path, name, content, remedy
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ExportError, match=f'{name}: {remedy}|{name}: .*{remedy}'):
            plan(folder, tokenizer=tmp_path / name)

    def note(self, folder: Path, tokenizer: Path) -> str:
        (note,) = [one for one in plan(folder, tokenizer=tokenizer).notes if 'tokenizer' in one]
        return note

    def test_one_without_the_marks_of_the_language_model_is_noted(self, folder, tmp_path):
        document = json.loads((lerobot_folder() / 'tokenizer.json').read_text())
        assert "'<loc0000>'" in self.note(folder, lerobot_folder() / 'tokenizer.json')
        whole = tmp_path / 'tokenizer.json'
        first = 1 + max(document['model']['vocab'].values())
        for index, mark in enumerate(('<loc0000>', '<seg000>')):
            entry = {'id': first + index, 'content': mark, 'special': True}
            flags = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
            document['added_tokens'].append({**entry, **flags})
        whole.write_text(json.dumps(document))
        assert not [one for one in plan(folder, tokenizer=whole).notes if 'tokenizer' in one]

    def test_one_that_is_much_smaller_than_the_text_table_is_noted(self, tmp_path):
        folder = Path(shutil.copytree(tokenizer_of('smolvla').parent, tmp_path / 'smolvla'))
        (folder / 'tokenizer.json').unlink()
        other = lerobot_folder().with_name('groot_tokenizer.json')
        options = ExportOptions(
            state_names=JOINTS,
            action_names=JOINTS,
            units=('deg',),
            rate_hz=30.0,
            vision_heads=4,
            kv_heads=2,
            tokenizer=other,
        )
        (note,) = [
            one for one in plan_export(folder, options, default_name='t').notes if 'table' in one
        ]
        assert str(other) in note
        assert '360 rows' in note

    @pytest.mark.parametrize(
        ('given', 'words'),
        [
            ('/dev/null', 'is a device; expected a regular file'),
            ('tokenizer.txt', 'expected tokenizer.json or tokenizer.model'),
            ('tokenise.json', r"no such file; did you mean '.*tokenizer\.json'"),
        ],
    )
    def test_one_that_cannot_be_used_contradicts_nothing(self, folder, tmp_path, given, words):
        (tmp_path / 'tokenizer.txt').write_text('words')
        (tmp_path / 'tokenizer.json').write_text('{}')
        path = tmp_path / given
        with pytest.raises(ExportError, match=words) as refused:
            plan(folder, tokenizer=path)
        assert 'contradict' not in str(refused.value)

    def test_another_json_file_is_none_and_the_message_says_what_to_give(self, folder):
        wanted = 'is no tokenizer: .*; give .*tokenizer.model that the policy was trained with'
        with pytest.raises(ExportError, match=wanted):
            plan(folder, tokenizer=folder / 'config.json')


class TestDataSet:
    @pytest.mark.parametrize('name', ['episode_0.hdf5', 'data.zarr', 'steps.tfrecord'])
    def test_a_file_is_no_data_set_and_the_message_says_what_is(self, tmp_path, name):
        (tmp_path / name).write_bytes(b'\x89HDF\r\n')
        with pytest.raises(ExportError, match=rf'{name} .*LeRobot data set.*--state-names'):
            plan(lerobot_folder(), dataset=tmp_path / name)

    def test_a_folder_of_another_form_is_none_either(self, tmp_path):
        (tmp_path / 'episode_0.hdf5').write_bytes(b'\x89HDF\r\n')
        with pytest.raises(ExportError, match=r'has no meta/info\.json.*--state-names'):
            plan(lerobot_folder(), dataset=tmp_path)


def test_a_full_disk_is_named_in_a_unit_that_says_something(tmp_path):
    planned = plan(lerobot_folder())
    with small_disk(tmp_path / 'disk', 64) as disk:
        with pytest.raises(ExportError) as caught:
            write_export(planned, disk / 'bundle')
        message = str(caught.value)
        assert '0.0 GB' not in message
        assert ' kB of weights' in message and '--out' in message
        assert not (disk / 'bundle').exists()
