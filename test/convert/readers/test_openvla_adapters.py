"""Adapters (LoRA) of OpenVLA's fine-tuning: merged, and refused where it is not said what is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from openvla_folders import options_of, write_folder
from reference_cases import shipped
from safetensors.torch import load_file, save_file

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.export.conversion import ExportPlan, plan_export, write_export

CASE = shipped('openvla_full_a')
RANK, ALPHA = 4, 8
LAYER = 'language_model.model.layers.0.self_attn.q_proj'
PACKED = 'vision_backbone.featurizer.blocks.0.attn.qkv'
BESIDE = ('config.json', 'preprocessor_config.json', 'tokenizer.json')
DATA_SET = 'set_one'


@pytest.fixture
def base(tmp_path) -> Path:
    return write_folder(tmp_path / 'base', CASE)


@pytest.fixture
def adapter(tmp_path, base) -> Path:
    """The folder of `adapter_tmp_dir`, completed as the message asks."""
    folder = tmp_path / 'adapter'
    folder.mkdir()
    random = torch.Generator().manual_seed(0)
    weights = load_file(CASE.with_suffix('.weights.safetensors'))
    tensors = {}
    for module in (LAYER, PACKED):
        outputs, inputs = weights[f'{module}.weight'].shape
        for part, shape in (('A', (RANK, inputs)), ('B', (outputs, RANK))):
            name = f'base_model.model.{module}.lora_{part}.weight'
            tensors[name] = torch.randn(shape, generator=random)
    save_file(tensors, folder / 'adapter_model.safetensors')
    config = {
        'peft_type': 'LORA',
        'r': RANK,
        'lora_alpha': ALPHA,
        'init_lora_weights': 'gaussian',
        'base_model_name_or_path': 'openvla/openvla-7b',
    }
    (folder / 'adapter_config.json').write_text(json.dumps(config))
    for name in BESIDE:
        shutil.copy(base / name, folder)
    stats = json.loads((base / 'config.json').read_text())['norm_stats'][DATA_SET]
    (folder / 'dataset_statistics.json').write_text(json.dumps({DATA_SET: stats}))
    return folder


def plan(folder: Path, base: Path | None = None) -> ExportPlan:
    return plan_export(folder, replace(options_of(CASE), base=base), default_name='tiny')


def test_an_adapter_is_merged_into_the_policy_that_base_names(adapter, base, tmp_path):
    alone = load_file(write_export(plan(base), tmp_path / 'alone').weights_path)
    merged = load_file(write_export(plan(adapter, base), tmp_path / 'merged').weights_path)
    pairs = load_file(adapter / 'adapter_model.safetensors')

    def change(module: str) -> torch.Tensor:
        down, up = (pairs[f'base_model.model.{module}.lora_{part}.weight'] for part in 'AB')
        return ALPHA / RANK * up @ down

    expected = {'language.blocks.0.attention.q.weight': change(LAYER)}
    # Queries, keys and values are one weight in OpenVLA, and three here.
    parts = change(PACKED).chunk(3)
    for part, of_part in zip('qkv', parts, strict=True):
        expected[f'vision.dino.blocks.0.attention.{part}.weight'] = of_part
    for name, weight in alone.items():
        torch.testing.assert_close(merged[name], weight.float() + expected.get(name, 0.0))


def test_an_adapter_beside_weights_is_refused_whichever_it_is(adapter, base):
    for name in ('adapter_config.json', 'adapter_model.safetensors'):
        shutil.copy(adapter / name, base)
    with pytest.raises(ExportError, match=r'adapter_model\.safetensors.*--base'):
        plan(base)


def test_one_message_says_all_that_a_bare_adapter_lacks(adapter, base):
    for name in (*BESIDE, 'dataset_statistics.json'):
        (adapter / name).unlink()
    with pytest.raises(ExportError) as caught:
        plan(adapter)
    message = str(caught.value)
    assert 'openvla/openvla-7b' in message
    assert all(word in message for word in ('--base', 'dataset_statistics.json', 'run_root_dir'))
    # With the policy below it does not ask for that again.
    with pytest.raises(ExportError) as caught:
        plan(adapter, base)
    assert 'dataset_statistics.json' in str(caught.value)
    assert 'download that policy' not in str(caught.value)


def test_statistics_of_the_policy_below_do_not_stand_for_those_of_the_training(adapter, base):
    (adapter / 'dataset_statistics.json').unlink()
    with pytest.raises(ExportError, match=r'dataset_statistics\.json.*run_root_dir'):
        plan(adapter, base)


def test_an_adapter_of_a_table_alone_is_refused_as_one_that_is_not_merged(adapter, base):
    path = adapter / 'adapter_model.safetensors'
    save_file({'base_model.model.embed.lora_embedding_A': torch.zeros(2, 3)}, path)
    with pytest.raises(ExportError, match=r'lora_embedding_A.*merge_and_unload'):
        plan(adapter, base)


def test_an_adapter_of_another_policy_is_refused_by_its_module(adapter, base):
    path = adapter / 'adapter_model.safetensors'
    tensors = {name.replace('q_proj', 'w_proj'): t for name, t in load_file(path).items()}
    save_file(tensors, path)
    with pytest.raises(ExportError, match=r'w_proj.*--base'):
        plan(adapter, base)
