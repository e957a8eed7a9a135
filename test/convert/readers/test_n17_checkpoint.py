"""Folders of GR00T N1.7, LeRobot's and NVIDIA's: what they say, frames, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from groot_n17_folders import (
    cameras_of,
    joints_of,
    observation_of,
    write_backbone,
    write_lerobot_folder,
    write_nvidia_folder,
)
from reference_cases import shipped

from vla_convert.checkpoints.errors import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import ExportPlan, plan_export, write_export
from vla_runtime.bundle.rules import check_spec
from vla_runtime.files.field_error import FieldError
from vla_runtime.files.json_file import JsonError
from vla_runtime.inference.codec import PolicyCodec

CASE = shipped('groot_n17_a')
REFUSED = (ExportError, JsonError)
WRITERS = {'LeRobot': write_lerobot_folder, 'NVIDIA': write_nvidia_folder}


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory) -> Path:
    return write_backbone(tmp_path_factory.mktemp('n17') / 'backbone', CASE)


def options(tokenizer: Path) -> ExportOptions:
    d = json.loads(CASE.read_text())
    return ExportOptions(
        tokenizer=tokenizer,
        state_names=joints_of(CASE),
        action_names=joints_of(CASE, 'action'),
        units=('deg',),
        rate_hz=30.0,
        heads={'dit': d['dit_heads'], 'context': d['vlsa_heads']},
        prompt_length=40,
    )


def plan(folder: Path, tokenizer: Path, **changes) -> ExportPlan:
    return plan_export(folder, replace(options(tokenizer), **changes), default_name='tiny')


def test_both_kinds_of_folder_give_the_same_bundle(tmp_path, tokenizer):
    plans = [plan(write(tmp_path / kind, CASE), tokenizer) for kind, write in WRITERS.items()]
    # But for the resizing of images, which each does in its own way.
    specs = [replace(one.spec, source={}, images=plans[0].spec.images) for one in plans]
    assert specs[0] == specs[1]
    for name, values in plans[0].statistics.items():
        np.testing.assert_array_equal(values, plans[1].statistics[name])
    assert plans[0].tensors.keys() == plans[1].tensors.keys()


def modality(**video) -> dict:
    d = json.loads(CASE.read_text())
    video = {'modality_keys': d['camera_order'], 'delta_indices': [0], **video}
    return {**d['modality_config'], 'video': video}


@pytest.mark.parametrize(
    ('least', 'expected'),
    # 48x67 pixels; scaled by sqrt(least / 3216) and up to whole tokens of 16 pixels.
    [(3072, (48, 64)), (3073, (48, 80)), (5000, (64, 96)), (None, (224, 304))],
)
def test_small_images_are_enlarged_as_the_backbone_s_processor_does(
    tmp_path, tokenizer, least, expected
):
    alone = tmp_path / 'backbone'
    shutil.copytree(tokenizer.parent, alone)
    # Qwen3-VL's own number where the file is not there.
    (alone / 'preprocessor_config.json').unlink()
    if least is not None:
        document = json.dumps({'size': {'shortest_edge': least}})
        (alone / 'preprocessor_config.json').write_text(document)
    folder = write_lerobot_folder(
        tmp_path / 'policy', CASE, use_albumentations=True, crop_fraction=0.95
    )
    assert plan(folder, alone / tokenizer.name).spec.dims.image == expected


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
def test_poses_in_a_form_that_is_not_read_are_refused(tmp_path, tokenizer, said, field, remedy):
    wrong = json.loads(json.dumps(modality()))
    groups = json.loads(CASE.read_text())['groups']
    index = groups.index(next(one for one in groups if one[2:] == ['non_eef', 'relative']))
    wrong['action']['action_configs'][index].update(said)
    folder = write_lerobot_folder(tmp_path / 'policy', CASE, modality_config=wrong)
    with pytest.raises(JsonError) as error:
        plan(folder, tokenizer)
    place, message = str(error.value).split(': ', 2)[:2], str(error.value).split(': ', 2)[2]
    assert Path(place[0]).is_relative_to(folder) and Path(place[0]).is_file()
    assert place[1].endswith(f'action_configs[{index}].{field}')
    # The group is named, what the folder says of it, and what is read.
    assert f"'{groups[index][0]}'" in message and remedy in message
    assert said.get('format', '').lower() in message


def test_a_robot_is_found_whatever_the_case_of_its_tag(tmp_path, tokenizer):
    """NVIDIA's own commands take NEW_EMBODIMENT for new_embodiment."""
    folder = write_nvidia_folder(tmp_path / 'policy', CASE)
    tag = plan(folder, tokenizer).spec.source['embodiment']
    assert plan(folder, tokenizer, embodiment=tag.upper()).spec.source['embodiment'] == tag


class TestAngles:
    """`apply_sincos_state_encoding`, of NVIDIA's processor alone."""

    def made(self, target: Path, tokenizer: Path, keys: list[str] | None, said: bool = True):
        wrong = json.loads(json.dumps(modality()))
        wrong['state']['sin_cos_embedding_keys'] = keys
        tag = json.loads(CASE.read_text())['embodiment_tag']
        wrong['video'] = {'modality_keys': list(cameras_of(CASE)), 'delta_indices': [0]}
        folder = write_nvidia_folder(
            target, CASE, modality_configs={tag: wrong}, apply_sincos_state_encoding=said
        )
        return plan(folder, tokenizer)

    def test_the_network_gets_sines_and_cosines_of_the_group_in_its_place(
        self, tmp_path, tokenizer
    ):
        group, *others = modality()['state']['modality_keys']
        d = json.loads(CASE.read_text())
        width = len(d['statistics']['state'][group]['min'])
        made = self.made(tmp_path / 'policy', tokenizer, [group])
        assert made.spec.normalisation.angles == (made.spec.state_names[:width],)
        assert len(made.spec.state) == len(joints_of(CASE))
        bundle = write_export(made, tmp_path / 'bundle')
        codec, usual = PolicyCodec(bundle), replace(observation_of(CASE), instruction='go')
        found = codec.check(usual)
        raw = usual.state.astype(np.float32)
        np.testing.assert_allclose(found[:width], np.sin(raw[:width]), atol=1e-6)
        np.testing.assert_allclose(found[width : 2 * width], np.cos(raw[:width]), atol=1e-6)
        plain = PolicyCodec(
            write_export(self.made(tmp_path / 'p', tokenizer, None), tmp_path / 'plain')
        )
        np.testing.assert_array_equal(found[2 * width :], plain.check(usual)[width:])
        # What the network sees is padded behind all of it.
        rows = codec.rows('go', found, (None,))
        assert rows['state'].shape == (1, made.spec.dims.state_dim)
        np.testing.assert_array_equal(rows['state'][0, : len(found)], found)
        assert not rows['state'][0, len(found) :].any()
        assert others

    @pytest.mark.parametrize(('keys', 'said'), [(None, True), ([], True), (['arm'], False)])
    def test_without_groups_or_without_the_word_nothing_changes(
        self, tmp_path, tokenizer, keys, said
    ):
        made = self.made(tmp_path / 'policy', tokenizer, keys, said)
        assert made.spec.normalisation.angles == ()

    def test_a_group_that_the_state_lacks_is_refused(self, tmp_path, tokenizer):
        with pytest.raises(REFUSED, match=r'sin_cos_embedding_keys.*tail'):
            self.made(tmp_path / 'policy', tokenizer, ['tail'])

    def test_more_numbers_than_the_network_has_places_for_are_refused(self, tmp_path, tokenizer):
        spec = self.made(tmp_path / 'policy', tokenizer, ['arm']).spec
        few = replace(spec, dims=replace(spec.dims, state_dim=len(spec.state)))
        with pytest.raises(FieldError, match='cosines'):
            check_spec(few)
        lost = replace(spec.normalisation, angles=(spec.state_names[1::-1],))
        with pytest.raises(FieldError, match='angles'):
            check_spec(replace(spec, normalisation=lost))
