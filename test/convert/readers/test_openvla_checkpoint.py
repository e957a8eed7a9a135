"""OpenVLA's folders: read, refused, and driven from raw images to robot units."""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_folders import edit_config, edit_json
from network_cases import network_case_paths
from openvla_cases import load_openvla_case
from openvla_folders import STATE, norm_stats, options_of, write_folder
from reference_cases import shipped
from safetensors.torch import load_file, save_file

from vla_convert.checkpoints.errors import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import ExportPlan, plan_export, write_export
from vla_runtime.bundle.schema import CameraSpec
from vla_runtime.families.openvla.action_bins import ActionBins
from vla_runtime.files.json_file import JsonError
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

pytestmark = pytest.mark.cases
PATHS = network_case_paths('openvla_full')
PATH = shipped('openvla_full_a')
REFUSED = (ExportError, JsonError)


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path / 'policy', PATH)


def plan(folder: Path, options: ExportOptions | None = None) -> ExportPlan:
    return plan_export(folder, options or options_of(PATH), default_name='tiny')


def observation(case, request: int) -> Observation:
    return Observation(
        images={'image': case.tensors[f'raw_image_{request}'].numpy()},
        state=np.zeros(len(STATE)),
        instruction=case.description['instructions'][request],
    )


def asked(folder: Path, options: ExportOptions) -> set[str]:
    with pytest.raises(ExportError) as caught:
        plan(folder, options)
    return set(re.findall(r'^  (--\S+)', str(caught.value), flags=re.M))


@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
@pytest.mark.parametrize('key', ['set_one', 'set_two'])
def test_raw_images_to_robot_units(tmp_path: Path, path: Path, key: str):
    case = load_openvla_case(path)
    source = write_folder(tmp_path / 'policy', path)
    written = write_export(
        plan_export(source, options_of(path, key), default_name='tiny'), tmp_path / 'bundle'
    )
    assert written.spec.dims == replace(
        case.network.dims, prompt_length=written.spec.dims.prompt_length
    )
    with closing(Policy.load(tmp_path / 'bundle', backend='torch')) as policy:
        for request in case.requests:
            seen = observation(case, request)
            chunk, _ = policy.infer(seen)
            expected = case.tensors[f'actions_{key}'][request].numpy()
            assert chunk.actions.shape == (1, len(expected))
            assert np.abs(chunk.actions[0] - expected).max() <= 1e-5
            again, report = policy.infer(seen)
            assert all(outcome.reuse == 'hit' for outcome in report.cache.prefixes)
            assert np.array_equal(again.actions, chunk.actions)


def test_settings_of_a_flow_are_refused_by_name(tmp_path: Path, folder: Path):
    write_export(plan(folder), tmp_path / 'bundle')
    with closing(Policy.load(tmp_path / 'bundle', backend='torch')) as policy:
        for name, value in (
            *(('seed', 7), ('denoise_steps', 5)),
            *(('rtc_mode', 'guided'), ('rtc_horizon', 1)),
        ):
            with pytest.raises(ValueError, match=name):
                policy.check(PolicySettings(**{name: value}))


def test_a_folder_says_all_but_names_units_rate_and_heads(folder: Path):
    assert asked(folder, ExportOptions()) == {
        *('--state-names', '--action-names', '--units', '--rate-hz'),
        *('--delta', '--heads', '--unnorm-key'),
    }


def test_one_data_set_needs_no_key_and_a_fine_tune_has_its_own(folder: Path):
    d = json.loads(PATH.read_text())
    tuned = {'tuned': norm_stats(d)['set_two']}
    tuned['tuned']['action']['q99'] = [2.0] * d['action_dim']
    (folder / 'dataset_statistics.json').write_text(json.dumps(tuned))
    found = plan(folder, options_of(PATH, None))
    assert found.spec.source['unnorm_key'] == 'tuned'
    assert (found.statistics['actions.q99'] == 2.0).all()


def test_masked_actions_stay_as_they_are(folder: Path):
    d, statistics = json.loads(PATH.read_text()), plan(folder).statistics
    mask = np.array(d['norm_stats']['set_one']['mask'])
    assert not mask.all()
    assert np.array_equal(statistics['actions.q01'][~mask], np.full((~mask).sum(), -1.0))
    assert np.array_equal(statistics['actions.q99'][~mask], np.full((~mask).sum(), 1.0))


def test_what_nothing_reads_is_left_out(folder: Path):
    found, d = plan(folder), json.loads(PATH.read_text())
    assert found.spec.dims.dino.depth == d['dino_depth'] - 1
    assert found.spec.dims.siglip.depth == d['siglip_depth'] - 1
    assert not [name for name in found.tensors if 'pool' in name]
    depth = d['dino_depth'] - 1
    assert not [name for name in found.tensors if name.startswith(f'vision.dino.blocks.{depth}.')]


def test_a_letterboxed_folder(folder: Path):
    edit_config(folder, image_resize_strategy='letterbox')
    edit_json(
        folder / 'preprocessor_config.json',
        lambda document: document.update(image_resize_strategy='letterbox'),
    )
    images = plan(folder).spec.images
    means = json.loads(PATH.read_text())['image_means']
    assert (images.padding, images.fill) == (
        'letterbox',
        tuple(int(255 * value) for value in means[-1]),
    )


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        ('use_fused_vision_backbone', False),
        ('arch_specifier', 'no-align+linear'),
        ('timm_override_act_layers', ['quick_gelu', None]),
        ('n_action_bins', 0),
        ('image_resize_strategy', 'resize-crop'),
        ('pad_to_multiple_of', -64),
    ],
)
def test_settings_that_are_not_served_are_refused(folder: Path, key: str, value: object):
    edit_config(folder, **{key: value})
    with pytest.raises(REFUSED, match=key):
        plan(folder)


def test_an_unknown_data_set_and_damaged_statistics_are_refused(folder: Path):
    with pytest.raises(REFUSED, match='set_one, set_two'):
        plan(folder, options_of(PATH, 'bridge'))
    stats = norm_stats(json.loads(PATH.read_text()))
    for field, value in (('q01', [0.0, 'x']), ('mask', [True]), ('q99', None)):
        changed = json.loads(json.dumps(stats))
        changed['set_one']['action'][field] = value
        edit_config(folder, norm_stats=changed)
        with pytest.raises(REFUSED, match=field):
            plan(folder)


def test_what_is_wrong_in_a_file_is_named_with_file_and_field(folder: Path):
    stats = norm_stats(json.loads(PATH.read_text()))
    mask, action = stats['set_one']['action']['mask'], stats['set_one']['action']
    place = mask.index(True)
    action['q01'][place], action['q99'][place] = 5.0, 1.0
    edit_config(folder, norm_stats=stats)
    with pytest.raises(JsonError, match=r'config\.json.*norm_stats\.set_one\.action\.q01'):
        plan(folder)
    # Of a number that stays as it is, nobody reads the bounds.
    action['q01'][place], action['q99'][place] = 1.0, 5.0
    place = mask.index(False)
    action['q01'][place], action['q99'][place] = 5.0, 1.0
    edit_config(folder, norm_stats=stats)
    plan(folder)
    edit_config(folder, norm_stats={})
    with pytest.raises(ExportError, match=r'copy dataset_statistics\.json'):
        plan(folder)


def test_colour_statistics_are_asked_for_by_their_file(folder: Path):
    path = folder / 'preprocessor_config.json'
    edit_json(path, lambda document: document.update(stds=[[0.0] * 3, [0.5] * 3]))
    with pytest.raises(JsonError, match=r'preprocessor_config\.json: field stds'):
        plan(folder)
    path.unlink()
    with pytest.raises(ExportError, match=r'preprocessor_config\.json.*copy'):
        plan(folder)


def stored_transforms(document: dict[str, Any]) -> dict[str, Any]:
    """What the training's processor makes of its settings and saves."""
    edge = document['input_sizes'][0][-1]
    return {
        'tvf_do_letterbox': False,
        'tvf_letterbox_fill': None,
        'tvf_resize_params': [
            {'size': [edge, edge], 'interpolation': 3, 'max_size': None, 'antialias': True}
        ]
        * 2,
        'tvf_crop_params': [{'output_size': [edge, edge]}] * 2,
        'tvf_normalize_params': [
            {'mean': np.float32(mean).tolist(), 'std': np.float32(std).tolist(), 'inplace': False}
            for mean, std in zip(document['means'], document['stds'], strict=True)
        ],
    }


def test_stored_transforms_of_the_training_need_no_note(folder: Path):
    path = folder / 'preprocessor_config.json'
    edit_json(path, lambda document: document.update(stored_transforms(document)))
    assert [note for note in plan(folder).notes if 'tvf_' in note] == []


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        ('tvf_do_letterbox', True),
        ('tvf_letterbox_fill', [127, 127, 127]),
        ('tvf_resize_params', [{'size': 256}, {'size': 256}]),
        ('tvf_crop_params', [{'output_size': [20, 20]}] * 2),
        ('tvf_normalize_params', [{'mean': [0.1] * 3}, {'mean': [0.5] * 3}]),
        ('tvf_normalize_params', [{'std': [0.1] * 3}]),
    ],
)
def test_stored_transforms_that_differ_from_the_settings_are_told(folder: Path, key, value):
    path = folder / 'preprocessor_config.json'
    edit_json(path, lambda document: document.update(stored_transforms(document) | {key: value}))
    (note,) = [note for note in plan(folder).notes if 'tvf_' in note]
    assert f'preprocessor_config.json has {key}: ' in note


def test_one_camera_one_action_and_no_guidance(folder: Path):
    cameras = (CameraSpec('left'), CameraSpec('right'))
    for changed, named in (
        ({'cameras': cameras}, '--cameras'),
        ({'horizon': 4}, '--horizon'),
        ({'denoise_steps': 10}, '--denoise-steps'),
        ({'advantage': 'task_newline'}, 'prompt.advantage'),
    ):
        with pytest.raises(ExportError, match=named):
            plan(folder, options_of(PATH, **changed))


def test_the_shortest_prompt_must_fit_into_the_prompt_length(folder: Path):
    for length in (1, 5):
        with pytest.raises(ExportError, match='--prompt-length'):
            plan(folder, options_of(PATH, prompt_length=length))
    # Most of them stand around the instruction.
    assert plan(folder, options_of(PATH, prompt_length=64)).spec.dims.prompt_length == 64


def test_unnorm_key_is_for_openvla_alone(tmp_path: Path):
    other = shipped('evo1_a')
    from evo1_folders import options_of as others_options
    from evo1_folders import write_folder as write_other

    source = write_other(tmp_path / 'policy', other, 0)
    with pytest.raises(ExportError, match='--unnorm-key'):
        plan_export(
            source,
            replace(others_options(other, 0), unnorm_key='bridge_orig'),
            default_name='tiny',
        )


def test_layer_scales_under_timms_own_name(folder: Path):
    for path in folder.glob('*.safetensors'):
        tensors = load_file(path)
        renamed = {name.replace('.scale_factor', '.gamma'): t for name, t in tensors.items()}
        save_file(renamed, path, {'format': 'pt'})
    edit_json(
        folder / 'model.safetensors.index.json',
        lambda document: document.update(
            weight_map={
                name.replace('.scale_factor', '.gamma'): file
                for name, file in document['weight_map'].items()
            }
        ),
    )
    assert 'vision.dino.blocks.0.scale1' in plan(folder).tensors


def test_steps_of_a_pose_start_from_the_measured_one(tmp_path: Path, folder: Path):
    pose = {'pose_steps': ('dx', 'dy', 'dz', 'drx', 'dry', 'drz'), 'pose_state': STATE}
    options = options_of(
        PATH,
        pose_scale=(1.0, 1.0),
        units=('m', 'rx=rad', 'ry=rad', 'rz=rad', 'drx=rad', 'dry=rad', 'drz=rad', 'grip=1'),
        **pose,
    )
    write_export(plan(folder, options), tmp_path / 'bundle')
    case = load_openvla_case(PATH)
    with closing(Policy.load(tmp_path / 'bundle', backend='torch')) as policy:
        state = np.array([0.4, -0.1, 0.3, 0.0, 0.0, 0.0])
        chunk, _ = policy.infer(replace(observation(case, 0), state=state))
    expected = case.tensors['actions_set_one'][0].numpy()
    assert np.abs(chunk.actions[0, :3] - (state[:3] + expected[:3])).max() <= 1e-5
    assert torch.isfinite(torch.from_numpy(chunk.actions)).all()


def letterboxed(image: np.ndarray, size: int, fill: tuple[int, ...]) -> np.ndarray:
    """Pad, resize and cut an image (H, W, 3) as OpenVLA's processor does, with Pillow."""
    pillow = pytest.importorskip('PIL.Image')
    height, width = image.shape[:2]
    across, down = ((max(height, width) - side) // 2 for side in (width, height))
    padded = pillow.new('RGB', (width + 2 * across, height + 2 * down), fill)
    padded.paste(pillow.fromarray(image), (across, down))
    shorter = min(padded.size)
    scaled = tuple(int(size * side / shorter) for side in padded.size)
    resized = padded.resize(scaled, pillow.Resampling.BICUBIC)
    left, top = (round((side - size) / 2) for side in scaled)
    return np.array(resized.crop((left, top, left + size, top + size)))


@pytest.mark.parametrize('size', [(97, 130), (150, 90), (112, 113)])
def test_a_letterboxed_image_to_robot_units(tmp_path: Path, folder: Path, size):
    edit_config(folder, image_resize_strategy='letterbox')
    edit_json(
        folder / 'preprocessor_config.json',
        lambda document: document.update(image_resize_strategy='letterbox'),
    )
    written = write_export(plan(folder), tmp_path / 'bundle').spec
    case = load_openvla_case(PATH)
    network, dims = case.network, case.network.dims
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    assert written.images.fill is not None
    seen = letterboxed(image, dims.image_size, written.images.fill)
    pixels = torch.from_numpy(seen).permute(2, 0, 1)[None].float() / 127.5 - 1.0
    tokens, mask = case.prompt(0)
    past = network.prefix(
        network.vision(pixels), torch.ones(1, dtype=torch.bool), tokens=tokens, token_mask=mask
    )
    answer = network.answer(past)[0][0].numpy()
    normalised = ActionBins(dims.used_vocabulary, dims.action_bins)(answer)
    with closing(Policy.load(tmp_path / 'bundle', backend='torch')) as policy:
        chunk, _ = policy.infer(replace(observation(case, 0), images={'image': image}))
    assert np.array_equal(chunk.normalised, normalised)
