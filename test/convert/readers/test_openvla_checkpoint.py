"""OpenVLA's folders: read, refused, and driven from raw images to robot units."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_folders import edit_config, edit_json
from network_cases import network_case_paths
from openvla_cases import load_openvla_case
from openvla_folders import STATE, norm_stats, options_of, write_folder
from reference_cases import shipped
from safetensors.torch import load_file, save_file

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import ExportPlan, plan_export, write_export
from vla_runtime.declarations.openvla import ActionBins
from vla_runtime.files.json_file import JsonError
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


def test_one_data_set_needs_no_key_and_a_fine_tune_has_its_own(folder: Path):
    d = json.loads(PATH.read_text())
    tuned = {'tuned': norm_stats(d)['set_two']}
    tuned['tuned']['action']['q99'] = [2.0] * d['action_dim']
    (folder / 'dataset_statistics.json').write_text(json.dumps(tuned))
    found = plan(folder, options_of(PATH, None))
    assert found.spec.source['unnorm_key'] == 'tuned'
    assert (found.statistics['actions.q99'] == 2.0).all()


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
