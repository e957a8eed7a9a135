"""Folders of GR00T N1.7, LeRobot's and NVIDIA's: what they say, frames, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from groot_cases import load_groot_case
from groot_n17_folders import (
    cameras_of,
    joints_of,
    observation_of,
    write_backbone,
    write_lerobot_folder,
    write_nvidia_folder,
)
from reference_cases import shipped

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import ExportPlan, plan_export, write_export
from vla_runtime.bundle.rules import check_spec
from vla_runtime.bundle.schema import CropSpec, ImageSpec
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


@pytest.mark.parametrize('kind', WRITERS)
def test_sizes_cameras_and_images_are_those_of_the_reference_case(tmp_path, tokenizer, kind):
    spec = plan(WRITERS[kind](tmp_path / 'policy', CASE), tokenizer).spec
    d = json.loads(CASE.read_text())
    expected = load_groot_case(CASE, 0).network.dims
    # How much text there is, the user says.
    assert spec.dims == replace(expected, prompt_length=40)
    assert spec.camera_names == cameras_of(CASE)
    kept = [crop / side for crop, side in zip(d['image_crop'], d['image_target'], strict=True)]
    if kind == 'NVIDIA':
        crop = CropSpec(d['image_target'][0], *kept)
        assert spec.images == ImageSpec('crop', 'bilinear_uint8', crop)
    else:
        # LeRobot cuts a square, by the share of the height.
        crop = CropSpec(d['image_target'][0], kept[0])
        assert spec.images == ImageSpec('crop', 'bicubic_uint8', crop)
    assert spec.denoise_steps == 4
    kinds = {'relative': 'delta', 'absolute': 'absolute'}
    expected = [kinds[rep] for _, width, _, rep in d['groups'] for _ in range(width)]
    assert [action.kind for action in spec.actions] == expected


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


def test_two_frames_become_images_of_their_own_the_earlier_ones_first(tmp_path, tokenizer):
    folder = write_lerobot_folder(
        tmp_path / 'policy', CASE, video_horizon=2, modality_config=modality(delta_indices=[-15, 0])
    )
    spec = plan(folder, tokenizer).spec
    first, second = cameras_of(CASE)
    assert spec.camera_names == (
        f'{first}_15_steps_ago',
        f'{second}_15_steps_ago',
        first,
        second,
    )
    assert [camera.frame_of for camera in spec.cameras] == [first, second, None, None]
    assert [camera.steps_ago for camera in spec.cameras] == [15, 15, None, None]
    assert spec.dims.cameras == len(spec.dims.image_places) == 4


@pytest.mark.parametrize('kind', WRITERS)
def test_images_that_are_no_whole_tokens_are_resized_once_more(tmp_path, tokenizer, kind):
    settings = {'image_target_size': [40, 72], 'image_crop_size': [36, 54]}
    spec = plan(WRITERS[kind](tmp_path / 'policy', CASE, **settings), tokenizer).spec
    # 40 and 72 are 2.5 and 4.5 tokens of 16 pixels; halves round to even.
    assert spec.dims.image == (32, 64)
    crop = CropSpec(40, 0.9, size=(40, 72))
    assert spec.images.crop == (crop if kind == 'LeRobot' else replace(crop, fraction_across=0.75))


@pytest.mark.parametrize('crop', [None, [50, 48]])
def test_a_cut_of_nvidia_s_that_is_missing_or_too_large_is_refused(tmp_path, tokenizer, crop):
    folder = write_nvidia_folder(tmp_path / 'policy', CASE, image_crop_size=crop)
    with pytest.raises(REFUSED, match='image_crop_size'):
        plan(folder, tokenizer)


def test_images_cut_by_opencv_keep_their_aspect(tmp_path, tokenizer):
    folder = write_lerobot_folder(
        tmp_path / 'policy', CASE, use_albumentations=True, crop_fraction=0.95
    )
    spec = plan(folder, tokenizer).spec
    # 60x84 with a shorter edge of 48 is 48x67; in whole image tokens of 16 pixels 48x64.
    assert spec.dims.image == (48, 64)
    assert spec.images == ImageSpec('crop', 'area', CropSpec(48, 0.95))


def test_nvidia_s_folders_are_told_the_size_of_the_images_that_keep_their_aspect(
    tmp_path, tokenizer
):
    changes = {'use_albumentations': True, 'crop_fraction': 0.95, 'shortest_image_edge': 48}
    nvidia = write_nvidia_folder(tmp_path / 'nvidia', CASE, **changes)
    with pytest.raises(ExportError, match='--image-size'):
        plan(nvidia, tokenizer)
    lerobot = write_lerobot_folder(tmp_path / 'lerobot', CASE, **changes)
    # 60x84 are LeRobot's, from its config.json.
    specs = [
        replace(plan(folder, tokenizer, image_size=size).spec, source={})
        for folder, size in ((nvidia, (60, 84)), (lerobot, (60, 84)), (lerobot, None))
    ]
    assert specs[0] == specs[1] == specs[2]
    assert specs[0].dims.image == (48, 64)
    wide = plan(nvidia, tokenizer, image_size=(90, 160)).spec
    assert wide.dims.image == (48, 80)
    with pytest.raises(ExportError, match='input_features'):
        plan(lerobot, tokenizer, image_size=(90, 160))


def test_a_size_that_does_not_matter_is_refused(tmp_path, tokenizer):
    folder = write_nvidia_folder(tmp_path / 'policy', CASE)
    with pytest.raises(ExportError, match='--image-size'):
        plan(folder, tokenizer, image_size=(60, 84))


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
    ('change', 'pattern'),
    [
        ({'video_horizon': 2}, 'video_horizon'),
        ({'modality_config': modality(delta_indices=[0, 5])}, 'steps back that end in 0'),
        ({'clip_outliers': False}, 'clip_outliers'),
        ({'formalize_language': False}, 'formalize_language'),
        ({'action_decode_transform': 'libero'}, 'action_decode_transform'),
        ({'image_target_size': None}, 'image_target_size'),
    ],
)
def test_what_is_not_reproduced_is_refused_by_name(tmp_path, tokenizer, change, pattern):
    folder = write_lerobot_folder(tmp_path / 'policy', CASE, **change)
    with pytest.raises(REFUSED, match=pattern):
        plan(folder, tokenizer)


def test_relative_actions_that_the_steps_do_not_make_are_refused(tmp_path, tokenizer):
    folder = write_lerobot_folder(tmp_path / 'policy', CASE)
    path = folder / 'config.json'
    config = json.loads(path.read_text()) | {'use_relative_actions': True}
    path.write_text(json.dumps(config))
    plan(folder, tokenizer)
    absolute = write_lerobot_folder(tmp_path / 'absolute', CASE, use_relative_action=False)
    (absolute / 'config.json').write_text(json.dumps(config))
    with pytest.raises(REFUSED, match=r'config\.json: field use_relative_actions'):
        plan(absolute, tokenizer)


@pytest.mark.parametrize('change', ['exclude_state', 'use_tactile'])
def test_a_policy_of_nvidia_s_that_reads_other_states_is_refused(tmp_path, tokenizer, change):
    folder = write_nvidia_folder(tmp_path / 'policy', CASE, **{change: True})
    with pytest.raises(REFUSED, match=f'{change}: True is not supported'):
        plan(folder, tokenizer)


@pytest.mark.parametrize(
    ('group', 'key', 'value', 'pattern'),
    [
        ('action', 'delta_indices', [0, 2, 4], 'delta_indices'),
        ('action', 'mean_std_embedding_keys', ['arm'], 'arm: groups normalised by mean and spread'),
        ('state', 'mean_std_embedding_keys', ['arm'], 'arm: groups normalised by mean and spread'),
    ],
)
def test_groups_of_another_meaning_are_refused(tmp_path, tokenizer, group, key, value, pattern):
    wrong = json.loads(json.dumps(modality()))
    wrong[group][key] = value
    folder = write_lerobot_folder(tmp_path / 'policy', CASE, modality_config=wrong)
    with pytest.raises(REFUSED, match=pattern):
        plan(folder, tokenizer)


@pytest.mark.parametrize('kind', ['DELTA', 'ActionRepresentation.DELTA'])
def test_deltas_from_step_to_step_are_refused(tmp_path, tokenizer, kind):
    wrong = json.loads(json.dumps(modality()))
    wrong['action']['action_configs'][1]['rep'] = kind
    folder = write_lerobot_folder(tmp_path / 'policy', CASE, modality_config=wrong)
    with pytest.raises(REFUSED, match="'delta'"):
        plan(folder, tokenizer)


@pytest.mark.parametrize('transform', ['libero', 'auto'])
def test_a_gripper_that_lerobot_inverts_at_load_is_refused(tmp_path, tokenizer, transform):
    folder = write_lerobot_folder(tmp_path / 'policy', CASE, embodiment_tag='libero_sim')
    config = json.loads((folder / 'config.json').read_text())
    document = json.dumps({**config, 'action_decode_transform': transform})
    (folder / 'config.json').write_text(document)
    with pytest.raises(REFUSED, match='action_decode_transform'):
        plan(folder, tokenizer)


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


def test_a_backbone_that_is_not_the_published_one_is_asked_for(tmp_path, tokenizer):
    alone = tmp_path / 'alone' / 'tokenizer.json'
    alone.parent.mkdir()
    alone.write_bytes(tokenizer.read_bytes())
    folder = write_lerobot_folder(tmp_path / 'policy', CASE)
    with pytest.raises(REFUSED, match=r'config\.json'):
        plan(folder, alone)


def test_a_robot_that_the_folder_does_not_have_is_refused(tmp_path, tokenizer):
    folder = write_nvidia_folder(tmp_path / 'policy', CASE)
    with pytest.raises(REFUSED, match='other_arm'):
        plan(folder, tokenizer, embodiment='other_arm')


def test_a_robot_is_found_whatever_the_case_of_its_tag(tmp_path, tokenizer):
    """NVIDIA's own commands take NEW_EMBODIMENT for new_embodiment."""
    folder = write_nvidia_folder(tmp_path / 'policy', CASE)
    tag = plan(folder, tokenizer).spec.source['embodiment']
    assert plan(folder, tokenizer, embodiment=tag.upper()).spec.source['embodiment'] == tag


def test_an_unknown_robot_is_answered_with_those_that_are_known(tmp_path, tokenizer):
    folder = write_nvidia_folder(tmp_path / 'policy', CASE)
    tag = plan(folder, tokenizer).spec.source['embodiment']
    with pytest.raises(REFUSED, match=f'so101.*{tag}'):
        plan(folder, tokenizer, embodiment='so101')


@pytest.mark.parametrize('rows', [1, 3])
def test_a_state_s_range_by_step_is_refused_by_field(tmp_path, tokenizer, rows):
    folder = write_nvidia_folder(tmp_path / 'policy', CASE)
    path = folder / 'statistics.json'
    document = json.loads(path.read_text())
    ((tag, groups),) = list(document.items())[:1]
    name, numbers = next(iter(groups['state'].items()))
    for key, values in numbers.items():
        numbers[key] = [values] * rows
    path.write_text(json.dumps(document))
    with pytest.raises(JsonError, match=rf'statistics\.json: field {tag}\.state\.{name}\.'):
        plan(folder, tokenizer)


def test_statistics_of_mean_and_spread_are_refused_by_name(tmp_path, tokenizer):
    folder = write_nvidia_folder(tmp_path / 'policy', CASE, use_mean_std=True)
    with pytest.raises(REFUSED, match='use_mean_std'):
        plan(folder, tokenizer)


@pytest.mark.parametrize('kind', WRITERS)
def test_letterboxed_images_are_squares_before_they_are_cut(tmp_path, tokenizer, kind):
    usual = plan(WRITERS[kind](tmp_path / 'usual', CASE), tokenizer).spec
    folder = WRITERS[kind](tmp_path / 'policy', CASE, letter_box_transform=True)
    spec = plan(folder, tokenizer).spec
    assert spec.images == replace(usual.images, crop=replace(usual.images.crop, letterbox=True))
    assert spec.dims == usual.dims


@pytest.mark.parametrize('kind', WRITERS)
def test_letterboxed_images_need_no_size_of_the_cameras(tmp_path, tokenizer, kind):
    """OpenCV keeps the aspect, and that of a square is known."""
    changes = {'letter_box_transform': True, 'use_albumentations': True}
    changes |= {'shortest_image_edge': 64, 'crop_fraction': 0.9}
    made = plan(WRITERS[kind](tmp_path / 'policy', CASE, **changes), tokenizer)
    assert made.spec.images == ImageSpec('crop', 'area', CropSpec(64, 0.9, letterbox=True))
    height, width = made.spec.dims.image
    assert height == width
    # What older releases of NVIDIA's did is told.
    assert [note for note in made.notes if 'letter_box_transform' in note] or kind == 'LeRobot'


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        ('strict_action_padding_mask', True),
        ('state_history_length', 2),
        ('num_timestep_buckets', 500),
        ('add_pos_embed', False),
        ('diffusion_model_cfg', {'interleave_self_attention': False}),
    ],
)
def test_settings_of_the_network_that_are_not_served_are_refused(tmp_path, tokenizer, key, value):
    folder = write_nvidia_folder(tmp_path / 'policy', CASE)
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps({**config, key: value}))
    with pytest.raises(REFUSED, match=key):
        plan(folder, tokenizer)


@pytest.mark.parametrize('kind', WRITERS)
def test_the_steps_that_the_folder_says_are_taken(tmp_path, tokenizer, kind):
    folder = WRITERS[kind](tmp_path / 'policy', CASE)
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps({**config, 'num_inference_timesteps': 7}))
    assert plan(folder, tokenizer).spec.denoise_steps == 7


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
