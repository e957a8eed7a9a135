"""LeRobot's folders of Multi-Task DiT: what they say, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_folders import edit_config, edit_tensors
from multi_task_dit_cases import load_multi_task_dit_case
from multi_task_dit_folders import options_of, write_folder
from reference_cases import shipped
from safetensors.torch import load_file
from torch import Tensor

from vla_convert.export.conversion import plan_export, write_export
from vla_runtime.models.base.flow_network import build_network
from vla_runtime.models.multi_task_dit import Dit

CASE = shipped('multi_task_dit_a')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / 'policy', CASE)


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
