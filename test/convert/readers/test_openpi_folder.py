"""openpi folders: little is stated, and the statistics may be anywhere under assets/."""

from __future__ import annotations

import json

import pytest
from checkpoint_folders import (
    draft_of,
    lerobot_folder,
    openpi_statistics,
    tiny_tensors,
    write_openpi_folder,
)

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import plan_export
from vla_runtime.files.json_file import JsonError

REFUSED = (ExportError, JsonError)


@pytest.fixture
def folder(tmp_path):
    return write_openpi_folder(tmp_path / 'policy', tiny_tensors(), openpi_statistics())


def test_a_trained_folder_without_config_says_even_less(tmp_path):
    tensors = tiny_tensors()
    folder = write_openpi_folder(tmp_path / 'p', tensors, openpi_statistics(), horizon=None)
    draft = draft_of(folder)
    assert (draft.horizon, draft.action_dim, draft.variant) == (None, None, None)


def test_statistics_without_their_outer_key_are_read(tmp_path):
    numbers = openpi_statistics()
    folder = write_openpi_folder(tmp_path / 'p', tiny_tensors(), numbers, outer_key=False)
    assert draft_of(folder).statistics['state.mean'].shape == (6,)


class TestFindingStatistics:
    def add(self, folder, asset_id='other'):
        path = folder / 'assets' / asset_id / 'norm_stats.json'
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({'norm_stats': openpi_statistics(7)}))
        return path

    def test_several_are_asked_about(self, folder):
        self.add(folder)
        (question,) = draft_of(folder).missing.questions
        assert question.option == '--asset-id'
        assert 'lab/arm, other' in question.wanted

    def test_one_of_several_is_chosen(self, folder):
        self.add(folder)
        draft = draft_of(folder, asset_id='other')
        assert draft.statistics['state.mean'].shape == (7,)

    def test_none_are_asked_for(self, tmp_path):
        folder = write_openpi_folder(tmp_path / 'p', tiny_tensors(), {}, asset_id=None)
        draft = draft_of(folder)
        assert draft.statistics is None
        assert [question.option for question in draft.missing.questions] == ['--statistics']

    def test_none_are_supplied(self, tmp_path):
        folder = write_openpi_folder(tmp_path / 'p', tiny_tensors(), {}, asset_id=None)
        given = self.add(tmp_path)
        draft = draft_of(folder, statistics=given)
        assert draft.statistics['actions.mean'].shape == (7,)
        assert 'asset_id' not in draft.source

    def test_a_file_beside_the_folders_own_is_a_contradiction(self, folder, tmp_path):
        with pytest.raises(REFUSED, match='--statistics'):
            draft_of(folder, statistics=self.add(tmp_path))


class TestAlohasJoints:
    """openpi trains ALOHA in its own joint convention unless told otherwise; no file says so."""

    NAMES = tuple(f'{side}{joint}' for side in 'lr' for joint in (*range(1, 7), 'g'))

    @pytest.fixture(params=[(14, 14), (14, 32), (16, 32), (13, 14)], ids=str)
    def aloha(self, tmp_path, request):
        """Columns that are used, and all: a base may follow, and a gripper may never move."""
        used, length = request.param
        numbers = openpi_statistics(used)
        for group in numbers.values():
            for values in group.values():
                values += [0.0] * (length - used)
        return write_openpi_folder(tmp_path / 'aloha', tiny_tensors(), numbers)

    def test_the_convention_is_asked_for(self, aloha):
        (question,) = draft_of(aloha).missing.questions
        assert question.option == '--adapt-to-pi'
        assert draft_of(aloha, adapt_to_pi=False).missing.questions == ()

    def test_the_answer_is_the_joint_space(self, aloha):
        assert draft_of(aloha, adapt_to_pi=False).joint_space is None
        draft = draft_of(aloha, adapt_to_pi=True)
        assert (draft.joint_space, draft.missing.questions) == ('openpi_aloha', ())

    @pytest.mark.parametrize('answer', [True, False])
    def test_the_bundle_has_it(self, tmp_path, answer):
        folder = write_openpi_folder(tmp_path / 'p', tiny_tensors(), openpi_statistics(32))
        spec = self.plan(folder, adapt_to_pi=answer).spec
        assert spec.joint_space == ('openpi_aloha' if answer else None)
        assert (spec.actions[1].relative_to, spec.actions[6].kind) == ('l2', 'absolute')

    def test_what_does_not_fit_its_joints_is_refused_with_the_field(self, tmp_path):
        folder = write_openpi_folder(tmp_path / 'p', tiny_tensors(), openpi_statistics(32))
        with pytest.raises(ExportError, match=r'state\[6\]\.unit'):
            self.plan(folder, adapt_to_pi=True, units=('rad',))
        names = (*self.NAMES, 'base')
        with pytest.raises(ExportError, match='state'):
            self.plan(folder, adapt_to_pi=True, state_names=names, action_names=names)

    def plan(self, folder, **changes):
        usual = {
            'tokenizer': lerobot_folder() / 'tokenizer.json',
            'state_names': self.NAMES,
            'action_names': self.NAMES,
            'units': ('rad', 'lg=1', 'rg=1'),
            'deltas': tuple(name for name in self.NAMES if name[1] != 'g'),
            'rate_hz': 50.0,
            'vision_heads': 4,
            'prompt_template': 'pi05_state',
        }
        return plan_export(folder, ExportOptions(**{**usual, **changes}), default_name='p')

    def test_it_is_asked_by_the_actions_that_are_named(self, aloha):
        for actions, asked in ((14, 1), (16, 1), (13, 0), (6, 0)):
            names = tuple(map(str, range(actions)))
            draft = draft_of(aloha, action_names=names)
            assert len(draft.missing.questions) == asked

    def test_other_robots_are_not_asked(self, tmp_path):
        for length in (7, 8, 12):
            numbers = openpi_statistics(length)
            folder = write_openpi_folder(tmp_path / f'{length}', tiny_tensors(), numbers)
            assert draft_of(folder).missing.questions == ()
