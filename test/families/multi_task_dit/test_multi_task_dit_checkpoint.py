"""LeRobot's folders of Multi-Task DiT: what they say, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_folders import edit_config, edit_tensors
from multi_task_dit_cases import flow_network, load_multi_task_dit_case
from multi_task_dit_folders import options_of, write_folder
from reference_cases import shipped
from torch import Tensor

from vla_runtime.checkpoints.errors import ExportError
from vla_runtime.export.conversion import plan_export
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


def one_tower_a_camera(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.replace('.vision_encoder.', '.vision_encoders.0.'): t for name, t in tensors.items()
    }


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
        (lambda f: edit_tensors(f, one_tower_a_camera), 'vision'),
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
