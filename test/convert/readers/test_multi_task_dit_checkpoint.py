"""LeRobot's folders of Multi-Task DiT: what they say, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_folders import edit_config, edit_tensors
from multi_task_dit_cases import flow_network, load_multi_task_dit_case
from multi_task_dit_folders import options_of, write_folder
from reference_cases import shipped
from safetensors.torch import load_file
from torch import Tensor

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.export.conversion import plan_export, write_export
from vla_runtime.families.flow_network import build_network
from vla_runtime.families.multi_task_dit.networks import Dit
from vla_runtime.files.json_file import JsonError

CASE = shipped('multi_task_dit_a')
FLOW = {'objective': 'flow_matching'}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / 'policy', CASE)


def test_a_folder_shows_the_dimensions_of_its_policy(folder: Path) -> None:
    spec = plan_export(folder, options_of(CASE), default_name='tiny').spec
    assert spec.dims == load_multi_task_dit_case(CASE).network.dims
    assert [(camera.frame_of, camera.steps_ago) for camera in spec.cameras] == [
        (None, None),
        (None, None),
        ('cam0', 1),
        ('cam1', 1),
    ]
    assert spec.denoise_steps == 10
    assert spec.prompt is not None and spec.prompt.template == 'clip'


@pytest.mark.parametrize('method', ['euler', 'rk4'])
def test_a_folder_of_a_flow_shows_how_it_is_followed(folder: Path, method: str) -> None:
    edit_config(folder, **FLOW, integration_method=method, num_integration_steps=7)
    spec = plan_export(folder, options_of(CASE), default_name='tiny').spec
    assert spec.family == 'multi_task_dit_flow'
    assert spec.dims == flow_network(load_multi_task_dit_case(CASE).network, method).dims
    assert spec.denoise_steps == 7


def of_cameras(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Tensors with an encoder for each camera, as LeRobot names them; each is another."""
    found = {}
    for name, tensor in tensors.items():
        if '.vision_encoder.' not in name:
            found[name] = tensor
            continue
        for camera in range(count):
            own = name.replace('.vision_encoder.', f'.vision_encoders.{camera}.')
            found[own] = tensor * (1.0 + 0.2 * camera)
    return found


class TestEncodersOfCameras:
    """`use_separate_rgb_encoder_per_camera`: LeRobot encodes each camera by its own CLIP."""

    @pytest.fixture
    def separate(self, folder: Path) -> Path:
        edit_tensors(folder, lambda tensors: of_cameras(tensors, 2))
        edit_config(folder, use_separate_rgb_encoder_per_camera=True)
        return folder

    def network(self, folder: Path, target: Path) -> Dit:
        plan = plan_export(folder, options_of(CASE), default_name='tiny')
        network = build_network(plan.spec.family, plan.spec.dims)
        network.load_state_dict(load_file(write_export(plan, target).weights_path))
        assert isinstance(network, Dit)
        return network.eval().requires_grad_(False)

    def test_the_tensors_show_them(self, separate: Path) -> None:
        spec = plan_export(separate, options_of(CASE), default_name='tiny').spec
        shared = load_multi_task_dit_case(CASE).network.dims
        assert spec.dims == replace(shared, separate_encoders=True)

    def test_each_camera_has_the_features_of_its_own(self, separate: Path, tmp_path: Path) -> None:
        case = load_multi_task_dit_case(CASE)
        network = self.network(separate, tmp_path / 'bundle')
        pixels, mask = torch.stack(list(case.pixels(0))), case.visible()
        found = network.image_features(network.vision(pixels), mask)
        # The reference's one encoder, with the weights of each camera's in turn.
        width, cameras = network.dims.vision.width, network.dims.own_cameras
        weights = case.network.state_dict()
        for camera in range(cameras):
            scaled = {
                name: tensor * (1.0 + 0.2 * camera) if name.startswith('vision.') else tensor
                for name, tensor in weights.items()
            }
            one = build_network('multi_task_dit', case.network.dims)
            one.load_state_dict(scaled)
            assert isinstance(one, Dit)
            with torch.inference_mode():
                expected = one.image_features(one.vision(pixels), mask)
            own = slice(camera * width, (camera + 1) * width)
            torch.testing.assert_close(found[:, own], expected[:, own], rtol=1e-5, atol=1e-5)
        assert cameras == 2


@pytest.mark.parametrize(
    ('spoil', 'field'),
    [
        (lambda f: edit_config(f, objective='score'), 'objective'),
        (lambda f: edit_config(f, **FLOW, integration_method='heun'), 'integration_method'),
        (lambda f: edit_config(f, **FLOW, num_integration_steps=101), 'denoise_steps'),
        (lambda f: edit_config(f, beta_schedule='laplace'), 'beta_schedule'),
        (lambda f: edit_config(f, image_crop_shape=[24, 24]), 'positions'),
        (lambda f: edit_config(f, image_crop_shape=[32]), 'image_crop_shape'),
        (lambda f: edit_config(f, num_heads=5), 'num_heads'),
        (lambda f: edit_config(f, n_obs_steps=3), 'numbers of an observation'),
        (lambda f: edit_tensors(f, lambda t: of_cameras(t, 1)), 'encoders'),
    ],
)
def test_a_policy_that_is_not_served_is_refused(
    folder: Path, spoil: Callable[[Path], object], field: str
) -> None:
    spoil(folder)
    with pytest.raises((ExportError, JsonError), match=field):
        plan_export(folder, options_of(CASE), default_name='tiny')


def test_heads_that_no_width_shows_are_asked_for(folder: Path) -> None:
    options = replace(options_of(CASE), vision_heads=None, kv_heads=None)
    with pytest.raises(ExportError, match=r'(?s)--vision-heads.*--kv-heads|--kv-heads.*--vision'):
        plan_export(folder, options, default_name='tiny')
