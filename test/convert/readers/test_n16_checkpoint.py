"""NVIDIA's folders of GR00T N1.6: what they say, the backbone's settings, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from groot_cases import N16, load_groot_case
from groot_n17_folders import cameras_of, joints_of, write_backbone, write_nvidia_folder
from reference_cases import shipped

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import ExportPlan, plan_export
from vla_runtime.bundle.schema import CropSpec, ImageSpec
from vla_runtime.files.json_file import JsonError

CASE = shipped('groot_n16_a')
REFUSED = (ExportError, JsonError)
D = json.loads(CASE.read_text())
# Text tokens of the prompt: N1.6's own has more around the images than the cases'.
LENGTH = 60


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    return write_backbone(tmp_path / 'backbone', CASE)


def plan(folder: Path, tokenizer: Path, **changes) -> ExportPlan:
    kinds = [kind for _, width, _, kind in D['groups'] for _ in range(width)]
    names = joints_of(CASE, 'action')
    options = ExportOptions(
        tokenizer=tokenizer,
        state_names=joints_of(CASE),
        action_names=names,
        targets=tuple(name for name, kind in zip(names, kinds, strict=True) if kind == 'absolute'),
        units=('deg',),
        rate_hz=30.0,
        heads={'dit': D['dit_heads']},
        prompt_length=LENGTH,
        image_size=(D['raw_height'], D['raw_width']),
    )
    return plan_export(folder, replace(options, **changes), default_name='tiny')


def backbone(tokenizer: Path, part: str | None = None, **changes: object) -> None:
    """Change the backbone's config.json, or a part of it."""
    path = tokenizer.with_name('config.json')
    document = json.loads(path.read_text())
    (document if part is None else document[part]).update(changes)
    path.write_text(json.dumps(document))


def test_sizes_cameras_and_images_are_those_of_the_reference_case(tmp_path, tokenizer):
    spec = plan(write_nvidia_folder(tmp_path / 'policy', CASE), tokenizer).spec
    expected = load_groot_case(CASE, 0).network.dims
    assert spec.family == N16
    # The prompt's length and the places in it are not the case's.
    assert spec.dims == replace(expected, prompt_length=LENGTH, image_places=spec.dims.image_places)
    assert spec.camera_names == cameras_of(CASE)
    transform = D['image_transform']
    crop = CropSpec(
        transform['shortest_image_edge'], transform['crop_fraction'], last='bicubic_pillow'
    )
    assert spec.images == ImageSpec('crop', 'area', crop)
    assert spec.denoise_steps == 4
    kinds = {'relative': 'delta', 'absolute': 'absolute'}
    wanted = [kinds[rep] for _, width, _, rep in D['groups'] for _ in range(width)]
    assert [action.kind for action in spec.actions] == wanted


def test_images_stand_at_the_end_of_the_prompt(tmp_path, tokenizer):
    folder = write_nvidia_folder(tmp_path / 'policy', CASE)
    short, long = (
        plan(folder, tokenizer, prompt_length=length).spec.dims for length in (LENGTH, 75)
    )
    assert [place - 15 for place in long.image_places] == list(short.image_places)
    # `</img><|im_end|>\n` behind the last one.
    assert short.image_places[-1] == LENGTH - 3


def test_rotary_positions_and_windows_are_as_the_backbone_s_config_says(tmp_path, tokenizer):
    folder = write_nvidia_folder(tmp_path / 'policy', CASE)
    plain = plan(folder, tokenizer).spec.dims.vision
    assert (plain.rope_base, plain.window, plain.full_attention) == (None, None, ())
    backbone(tokenizer, 'vision_config', use_rope=True, window_size=3)
    found = plan(folder, tokenizer).spec.dims.vision
    # The base is the window's edge, whether there are windows or not.
    assert found == replace(plain, rope_base=3.0)
    backbone(tokenizer, 'vision_config', use_windows_attn=True, full_attention_indexes=[0, 2, 26])
    found = plan(folder, tokenizer).spec.dims.vision
    assert found == replace(plain, rope_base=3.0, window=3, full_attention=(1, 3))


def test_a_backbone_that_is_not_the_published_one_is_asked_for(tmp_path, tokenizer):
    folder = write_nvidia_folder(tmp_path / 'policy', CASE)
    tokenizer.with_name('config.json').unlink()
    with pytest.raises(REFUSED, match=r'config\.json'):
        plan(folder, tokenizer)


@pytest.mark.parametrize(
    ('part', 'change', 'field'),
    [
        (None, {'select_layer': -2}, 'select_layer'),
        (None, {'use_pixel_shuffle': False}, 'use_pixel_shuffle'),
        ('vision_config', {'full_attention_indexes': ['7']}, 'full_attention_indexes'),
        ('vision_config', {'num_attention_heads': 'many'}, 'num_attention_heads'),
    ],
)
def test_a_backbone_of_other_settings_is_refused_by_field(tmp_path, tokenizer, part, change, field):
    backbone(tokenizer, part, **change)
    with pytest.raises(JsonError, match=rf'config\.json.*{field}'):
        plan(write_nvidia_folder(tmp_path / 'policy', CASE), tokenizer)


@pytest.mark.parametrize(
    ('change', 'field'),
    [
        ({'formalize_language': False}, 'formalize_language'),
        ({'clip_outliers': False}, 'clip_outliers'),
        ({'letter_box_transform': True}, 'letter_box_transform'),
        ({'image_target_size': None}, 'image_target_size'),
    ],
)
def test_what_is_not_reproduced_is_refused_by_field(tmp_path, tokenizer, change, field):
    with pytest.raises(JsonError, match=field):
        plan(write_nvidia_folder(tmp_path / 'policy', CASE, **change), tokenizer)


@pytest.mark.parametrize(
    ('change', 'field'),
    [
        ({'use_alternate_vl_dit': False}, 'use_alternate_vl_dit'),
        ({'attend_text_every_n_blocks': 'two'}, 'attend_text_every_n_blocks'),
    ],
)
def test_a_head_of_other_settings_is_refused_by_field(tmp_path, tokenizer, change, field):
    folder = write_nvidia_folder(tmp_path / 'policy', CASE)
    path = folder / 'config.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(REFUSED, match=field):
        plan(folder, tokenizer)


def test_a_history_of_states_is_refused(tmp_path, tokenizer):
    modality = json.loads(json.dumps(D['modality_config']))
    modality['video'] = {'modality_keys': D['camera_order'], 'delta_indices': [0]}
    modality['state']['delta_indices'] = [-1, 0]
    folder = write_nvidia_folder(
        tmp_path / 'policy', CASE, modality_configs={D['embodiment_tag']: modality}
    )
    with pytest.raises(JsonError, match='delta_indices'):
        plan(folder, tokenizer)


def test_the_tensors_of_n16_in_a_folder_of_lerobot_s_are_refused(tmp_path, tokenizer):
    folder = write_nvidia_folder(tmp_path / 'policy', CASE)
    (folder / 'config.json').write_text(json.dumps({'type': 'groot'}))
    with pytest.raises(ExportError, match=r'N1\.6.*LeRobot'):
        plan(folder, tokenizer)
