"""GR00T's folders, beside `test_folders`: slices of embodiments, statistics, images, angles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_folders import edit_json
from folder_cases import N17 as CASE
from folder_cases import Change, given, lost, made, n17_action, n17_modality, planned, written
from folder_cases import both as all_of
from groot_folders import SLOTS
from groot_n17_folders import joints_of, observation_of
from safetensors.torch import load_file, save_file

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.tensors import copy_tensors
from vla_convert.export.conversion import ExportPlan, plan_export, write_export
from vla_runtime.bundle.rules import check_spec
from vla_runtime.files.field_error import FieldError
from vla_runtime.files.json_file import JsonError
from vla_runtime.inference.codec import PolicyCodec

LEROBOT, NVIDIA = 'groot_n17 of LeRobot', 'groot_n17 of NVIDIA'


@pytest.mark.parametrize('tag', SLOTS)
def test_the_bundle_holds_the_slice_of_its_embodiment(tmp_path, tag):
    folder, options = made('groot_n15', tmp_path, written(tag=tag))
    plan = plan_export(folder, options, default_name='tiny')
    copy_tensors(plan.tensors, tmp_path / 'weights.safetensors')
    ours = load_file(tmp_path / 'weights.safetensors')
    theirs = load_file(folder / 'model.safetensors')
    for name, whole in (
        ('state_encoder.fc1.weight', 'state_encoder.layer1.W'),
        ('action_encoder.mix.bias', 'action_encoder.W2.b'),
        ('action_decoder.fc2.weight', 'action_decoder.layer2.W'),
    ):
        assert ours[name].equal(theirs[f'_groot_model.action_head.{whole}'][SLOTS[tag]]), name


def test_slice_0_of_an_unknown_tag_is_logged(tmp_path, caplog):
    def forget(document):
        del document['steps'][2]['config']['embodiment_mapping']['so100']

    change = Change(lambda f: edit_json(f / 'policy_preprocessor.json', forget))
    planned('groot_n15', tmp_path, change)
    assert "embodiment_mapping has no 'so100'; slice 0 is taken" in caplog.text


def test_statistics_that_differ_are_refused(tmp_path):
    def change(folder: Path) -> None:
        path = next(folder.glob('policy_postprocessor_step_0*'))
        statistics = load_file(path)
        save_file({**statistics, 'action.min': statistics['action.min'] + 1}, str(path))

    with pytest.raises((ExportError, JsonError), match=r'action\.min'):
        planned('groot_n15', tmp_path, Change(change))


def test_both_kinds_of_folder_give_the_same_bundle(tmp_path):
    plans = [planned(kind, tmp_path / kind, Change()) for kind in (LEROBOT, NVIDIA)]
    # But for the resizing of images, which each does in its own way.
    specs = [replace(one.spec, source={}, images=plans[0].spec.images) for one in plans]
    assert specs[0] == specs[1]
    for name, values in plans[0].statistics.items():
        np.testing.assert_array_equal(values, plans[1].statistics[name])
    assert plans[0].tensors.keys() == plans[1].tensors.keys()


@pytest.mark.parametrize(
    ('least', 'expected'),
    # 48x67 pixels; scaled by sqrt(least / 3216) and up to whole tokens of 16 pixels.
    [(3072, (48, 64)), (3073, (48, 80)), (5000, (64, 96)), (None, (224, 304))],
)
def test_small_images_are_enlarged_as_the_backbone_s_processor_does(tmp_path, least, expected):
    cut = written(use_albumentations=True, crop_fraction=0.95)
    # Qwen3-VL's own number where the file is not there.
    file = '../backbone/preprocessor_config.json'
    size = json.dumps({'size': {'shortest_edge': least}})
    change = lost(file) if least is None else Change(lambda f: (f / file).write_text(size))
    assert planned(LEROBOT, tmp_path, all_of(cut, change)).spec.dims.image == expected


@pytest.mark.parametrize(
    ('said', 'field', 'remedy'),
    [
        ({'type': 'EEF'}, 'format', 'XYZ_ROT6D'),
        ({'type': 'EEF', 'format': 'XYZ_ROTVEC'}, 'format', 'XYZ_ROT6D'),
        # It was taken for joints.
        ({'type': 'EEF', 'rep': 'ABSOLUTE'}, 'format', 'XYZ_ROT6D'),
        ({'type': 'POSE'}, 'type', 'EEF nor NON_EEF'),
    ],
)
def test_poses_in_a_form_that_is_not_read_are_refused(tmp_path, said, field, remedy):
    groups = json.loads(CASE.read_text())['groups']
    index = groups.index(next(one for one in groups if one[2:] == ['non_eef', 'relative']))
    change = written(modality_config=n17_action(index, **said))
    folder, options = made(LEROBOT, tmp_path, change)
    with pytest.raises(JsonError) as error:
        plan_export(folder, options, default_name='tiny')
    place, message = str(error.value).split(': ', 2)[:2], str(error.value).split(': ', 2)[2]
    assert Path(place[0]).is_relative_to(folder) and Path(place[0]).is_file()
    assert place[1].endswith(f'action_configs[{index}].{field}')
    # The group is named, what the folder says of it, and what is read.
    assert f"'{groups[index][0]}'" in message and remedy in message
    assert said.get('format', '').lower() in message


def test_a_robot_is_found_whatever_the_case_of_its_tag(tmp_path):
    """NVIDIA's own commands take NEW_EMBODIMENT for new_embodiment."""
    tag = json.loads(CASE.read_text())['embodiment_tag']
    spec = planned(NVIDIA, tmp_path, given(embodiment=tag.upper())).spec
    assert spec.source['embodiment'] == tag


class TestAngles:
    """`apply_sincos_state_encoding`, of NVIDIA's processor alone."""

    def made(self, target: Path, keys: list[str] | None, said: bool = True) -> ExportPlan:
        tag = json.loads(CASE.read_text())['embodiment_tag']
        configs = {tag: n17_modality('state', sin_cos_embedding_keys=keys)}
        change = written(modality_configs=configs, apply_sincos_state_encoding=said)
        return planned(NVIDIA, target, change)

    def test_the_network_gets_sines_and_cosines_of_the_group_in_its_place(self, tmp_path):
        group, *others = n17_modality('state')['state']['modality_keys']
        d = json.loads(CASE.read_text())
        width = len(d['statistics']['state'][group]['min'])
        made = self.made(tmp_path / 'policy', [group])
        assert made.spec.normalisation.angles == (made.spec.state_names[:width],)
        assert len(made.spec.state) == len(joints_of(CASE))
        bundle = write_export(made, tmp_path / 'bundle')
        codec, usual = PolicyCodec(bundle), replace(observation_of(CASE), instruction='go')
        found = codec.check(usual)
        raw = usual.state.astype(np.float32)
        np.testing.assert_allclose(found[:width], np.sin(raw[:width]), atol=1e-6)
        np.testing.assert_allclose(found[width : 2 * width], np.cos(raw[:width]), atol=1e-6)
        plain = PolicyCodec(write_export(self.made(tmp_path / 'p', None), tmp_path / 'plain'))
        np.testing.assert_array_equal(found[2 * width :], plain.check(usual)[width:])
        # What the network sees is padded behind all of it.
        rows = codec.rows('go', found, (None,))
        assert rows['state'].shape == (1, made.spec.dims.state_dim)
        np.testing.assert_array_equal(rows['state'][0, : len(found)], found)
        assert not rows['state'][0, len(found) :].any()
        assert others

    @pytest.mark.parametrize(('keys', 'said'), [(None, True), ([], True), (['arm'], False)])
    def test_without_groups_or_without_the_word_nothing_changes(self, tmp_path, keys, said):
        made = self.made(tmp_path / 'policy', keys, said)
        assert made.spec.normalisation.angles == ()

    def test_a_group_that_the_state_lacks_is_refused(self, tmp_path):
        with pytest.raises(JsonError, match=r'sin_cos_embedding_keys.*tail'):
            self.made(tmp_path / 'policy', ['tail'])

    def test_more_numbers_than_the_network_has_places_for_are_refused(self, tmp_path):
        spec = self.made(tmp_path / 'policy', ['arm']).spec
        few = replace(spec, dims=replace(spec.dims, state_dim=len(spec.state)))
        with pytest.raises(FieldError, match='cosines'):
            check_spec(few)
        lost = replace(spec.normalisation, angles=(spec.state_names[1::-1],))
        with pytest.raises(FieldError, match='angles'):
            check_spec(replace(spec, normalisation=lost))
