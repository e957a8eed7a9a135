"""OpenVLA-OFT's folders: read, refused, and driven from raw images to robot units."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_folders import edit_config
from network_cases import network_case_paths
from oft_cases import (
    DATA_SET,
    HEADS,
    description_of,
    expected_chunk,
    head_weights,
    load_oft_case,
    make_oft_case,
    observed,
    oft_options,
    statistics_of,
    write_heads,
    write_oft_folder,
)
from reference_cases import shipped

from vla_convert.checkpoints.errors import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import ExportPlan, plan_export, write_export
from vla_runtime.families.bundle_contents import check_contents, check_finite
from vla_runtime.files.json_file import JsonError
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy

pytestmark = pytest.mark.cases
PATHS = network_case_paths('openvla_full')
PATH = shipped('openvla_full_a')
REFUSED = (ExportError, JsonError)
ALOHA = 'aloha1_fold_shirt_30_demos'


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_oft_folder(tmp_path / 'policy', PATH)


def plan(folder: Path, options: ExportOptions | None = None) -> ExportPlan:
    return plan_export(folder, options or oft_options(PATH), default_name='tiny')


def asked(folder: Path, options: ExportOptions) -> set[str]:
    with pytest.raises(ExportError) as caught:
        plan(folder, options)
    return set(re.findall(r'^  (--\S+)', str(caught.value), flags=re.M))


@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
def test_a_folder_becomes_a_bundle_of_the_same_network(tmp_path: Path, path: Path):
    case = load_oft_case(path)
    source = write_oft_folder(tmp_path / 'policy', path, parallel=False)
    bundle = write_export(
        plan_export(source, oft_options(path), default_name='tiny'), tmp_path / 'bundle'
    )
    assert check_contents(bundle) and check_finite(bundle) == []
    dims, expected = bundle.spec.dims, case.network.dims
    assert {**vars(dims), 'prompt_length': 0} == {**vars(expected), 'prompt_length': 0}
    with closing(Policy.load(tmp_path / 'bundle', backend='torch')) as policy:
        seen = observed(case, 0)
        chunk, _ = policy.infer(seen)
        again, report = policy.infer(seen)
    assert all(outcome.reuse == 'hit' for outcome in report.cache.prefixes)
    assert np.array_equal(again.actions, chunk.actions)


@pytest.mark.parametrize('backend', ['torch', 'onnxruntime'])
def test_an_aloha_policy_has_three_cameras_25_actions_and_least_and_greatest_values(
    tmp_path: Path, backend: str
):
    d = description_of(PATH, chunk=25, action_dim=14, state_dim=14, cameras=3)
    case = make_oft_case(PATH, d)
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
        seen = observed(case, 0)
        chunk, _ = policy.infer(seen)
    normalised, actions = expected_chunk(case, seen, 0, by='m')
    assert np.abs(chunk.normalised - normalised.numpy()).max() <= 2e-5
    assert chunk.actions.shape == (25, 14)
    assert np.abs(chunk.actions - actions).max() <= 2e-5


def test_heads_in_bfloat16_are_read(tmp_path: Path):
    source = write_oft_folder(tmp_path / 'policy', PATH, dtype=torch.bfloat16)
    write_export(plan(source), tmp_path / 'bundle')
    with closing(Policy.load(tmp_path / 'bundle', backend='torch')) as policy:
        chunk, _ = policy.infer(observed(load_oft_case(PATH), 0))
    assert np.isfinite(chunk.actions).all()


def test_a_folder_says_all_but_names_units_rate_and_heads(folder: Path):
    assert asked(folder, ExportOptions()) == {
        *('--state-names', '--action-names', '--units', '--rate-hz', '--delta', '--heads'),
    }
    found = plan(folder, oft_options(PATH, horizon=None)).spec
    assert (found.dims.horizon, found.dims.cameras) == (8, 2)
    assert found.source['unnorm_key'] == DATA_SET


def test_a_data_set_without_constants_has_its_chunk_asked_for_and_a_note(folder: Path):
    d = description_of(PATH)
    path = folder / 'dataset_statistics.json'
    path.write_text(json.dumps({'my_robot': statistics_of(d)}))
    assert asked(folder, oft_options(PATH, horizon=None)) == {'--horizon'}
    assert any('my_robot' in note for note in plan(folder).notes)
    # A known name, but not its numbers.
    path.write_text(json.dumps({ALOHA: statistics_of(d)}))
    assert asked(folder, oft_options(PATH, horizon=None)) == {'--horizon'}
    assert plan(folder, oft_options(PATH, horizon=3)).spec.dims.horizon == 3


def test_several_data_sets_need_a_name(folder: Path):
    d = description_of(PATH)
    both = {name: statistics_of(d) for name in (DATA_SET, 'libero_goal_no_noops')}
    (folder / 'dataset_statistics.json').write_text(json.dumps(both))
    assert asked(folder, oft_options(PATH)) == {'--unnorm-key'}
    found = plan(folder, oft_options(PATH, unnorm_key='libero_goal_no_noops'))
    assert found.spec.source['unnorm_key'] == 'libero_goal_no_noops'


def test_what_nothing_reads_is_left_out(folder: Path):
    tensors, d = plan(folder).tensors, description_of(PATH)
    assert 'token_head.weight' not in tensors
    assert f'vision.dino.blocks.{d["dino_depth"] - 1}.norm1.weight' not in tensors


def test_settings_of_a_flow_are_refused_by_name(tmp_path: Path, folder: Path):
    write_export(plan(folder), tmp_path / 'bundle')
    with closing(Policy.load(tmp_path / 'bundle', backend='torch')) as policy:
        for name, value in (('seed', 7), ('denoise_steps', 5)):
            with pytest.raises(ValueError, match=name):
                policy.check(PolicySettings(**{name: value}))


@pytest.mark.parametrize(
    ('file', 'named'),
    [
        ('vision_backbone--150000_checkpoint.pt', 'FiLM'),
        ('noisy_action_projector--150000_checkpoint.pt', 'use_diffusion'),
        ('action_head--10_checkpoint.pt', 'action_head'),
        ('proprio_projector--10_checkpoint.pt', 'proprio_projector'),
    ],
)
def test_further_files_of_a_training_are_refused_by_name(folder: Path, file: str, named: str):
    (folder / file).write_bytes(b'')
    with pytest.raises(ExportError, match=named):
        plan(folder)


@pytest.mark.parametrize(
    ('head', 'remedy'), list(zip(HEADS, ('use_l1_regression', '--use_proprio True'), strict=True))
)
def test_a_part_that_is_missing_is_named_with_what_mends_it(folder: Path, head: str, remedy: str):
    (path,) = folder.glob(f'{head}--*')
    path.unlink()
    with pytest.raises(ExportError, match=f'{head}.*{remedy}.* copy'):
        plan(folder)


def test_a_head_that_denoises_is_refused_by_its_tensors(folder: Path):
    weights = {
        name.replace('action_head.model.', 'action_head.noise_predictor.mlp_resnet.'): tensor
        for name, tensor in head_weights(description_of(PATH)).items()
    }
    write_heads(folder, weights)
    with pytest.raises(ExportError, match='use_diffusion'):
        plan(folder)


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


def test_an_adapter_beside_weights_is_told(folder: Path):
    (note,) = [note for note in plan(folder).notes if 'lora_adapter/' in note]
    assert 'merged' in note
    shutil.rmtree(folder / 'lora_adapter')
    assert [note for note in plan(folder).notes if 'lora_adapter/' in note] == []


def test_a_run_folder_with_an_adapter_alone_leads_to_it(folder: Path):
    for path in [*folder.glob('model*'), *folder.glob('*.pt')]:
        path.unlink()
    adapter = folder / 'lora_adapter'
    (adapter / 'adapter_model.safetensors').write_bytes(b'')
    with pytest.raises(ValueError, match=f'did you mean {adapter}, with --base'):
        plan(folder)


@pytest.mark.parametrize('group', ['action', 'proprio'])
def test_statistics_of_another_length_than_the_heads_are_refused(folder: Path, group: str):
    statistics = statistics_of(description_of(PATH))
    for key, values in statistics[group].items():
        statistics[group][key] = values[:-1]
    path = folder / 'dataset_statistics.json'
    path.write_text(json.dumps({DATA_SET: statistics}))
    with pytest.raises(REFUSED, match='dimensions'):
        plan(folder)
    del statistics[group]
    path.write_text(json.dumps({DATA_SET: statistics}))
    with pytest.raises(REFUSED, match=group):
        plan(folder)


@pytest.mark.parametrize(
    ('key', 'value'),
    [('use_fused_vision_backbone', False), ('arch_specifier', 'no-align+linear')],
)
def test_settings_that_are_not_served_are_refused(folder: Path, key: str, value: Any):
    edit_config(folder, **{key: value})
    with pytest.raises(REFUSED, match=key):
        plan(folder)


def test_no_guidance(folder: Path):
    with pytest.raises(ExportError, match=r'prompt\.advantage'):
        plan(folder, oft_options(PATH, advantage='task_newline'))
