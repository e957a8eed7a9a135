"""OpenVLA-OFT's folders: read, refused, and driven from raw images to robot units."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from oft_cases import description_of, expected, observed, oft_options, write_oft_folder
from reference_cases import shipped

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import ExportPlan, plan_export, write_export
from vla_runtime.policy import Policy

pytestmark = pytest.mark.cases
PATH = shipped('openvla_full_a')
ALOHA = 'aloha1_fold_shirt_30_demos'


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_oft_folder(tmp_path / 'policy', PATH)


def plan(folder: Path, options: ExportOptions | None = None) -> ExportPlan:
    return plan_export(folder, options or oft_options(PATH), default_name='tiny')


@pytest.mark.parametrize('backend', ['torch', 'onnxruntime'])
def test_an_aloha_policy_has_three_cameras_25_actions_and_least_and_greatest_values(
    tmp_path: Path, backend: str
):
    d = description_of(PATH, chunk=25, action_dim=14, state_dim=14, cameras=3)
    source = write_oft_folder(tmp_path / 'policy', PATH, d, ALOHA)
    # The folder's data set says how many actions a chunk has.
    made = plan(source, oft_options(PATH, d, horizon=None))
    assert made.spec.dims.horizon == 25
    assert set(made.statistics) == {'actions.min', 'actions.max', 'state.low', 'state.high'}
    finish = {}
    if backend == 'onnxruntime':
        from vla_convert.export.onnx.export import write_onnx

        finish = {'finish': lambda target, spec: write_onnx(target, spec, 'float32')}
    write_export(made, tmp_path / 'bundle', **finish)
    with closing(Policy.load(tmp_path / 'bundle', backend=backend)) as policy:
        chunk, _ = policy.infer(observed(PATH, d, 0, 'aloha_'))
    normalised, actions = (expected(PATH)[f'aloha_{name}_0'] for name in ('normalised', 'robot'))
    assert np.abs(chunk.normalised - normalised.numpy()).max() <= 2e-5
    assert chunk.actions.shape == (25, 14)
    assert np.abs(chunk.actions - actions.numpy()).max() <= 2e-5


def test_an_adapter_that_is_not_merged_is_refused_with_what_mends_it(folder: Path):
    for path in folder.glob('model*'):
        path.unlink()
    for source in (folder, folder / 'lora_adapter'):
        with pytest.raises(ExportError, match='merge_lora_weights_and_save'):
            plan(source)
    shutil.rmtree(folder / 'lora_adapter')
    (folder / 'adapter_model.safetensors').write_bytes(b'')
    with pytest.raises(ExportError, match='merge_lora_weights_and_save'):
        plan(folder)


def test_a_run_folder_with_an_adapter_alone_leads_to_it(folder: Path):
    for path in [*folder.glob('model*'), *folder.glob('*.pt')]:
        path.unlink()
    adapter = folder / 'lora_adapter'
    (adapter / 'adapter_model.safetensors').write_bytes(b'')
    with pytest.raises(ValueError, match=f'did you mean {adapter}, with --base'):
        plan(folder)
