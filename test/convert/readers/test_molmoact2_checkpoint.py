"""MolmoAct2's weights that are cut apart and joined: adapters (LoRA) on them, mixed precisions."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from checkpoint_folders import edit_config
from folder_cases import Change, made
from safetensors.torch import load_file, save_file

from vla_convert.export.conversion import plan_export, write_export

RANK, ALPHA = 4, 8
# Of LeRobot's own targets: queries, keys and values in one, and up and gate in one.
MODULES = tuple(
    f'model.model.transformer.blocks.1.{name}' for name in ('self_attn.att_proj', 'mlp.ff_proj')
)


def test_an_adapter_of_queries_keys_and_values_is_merged(tmp_path: Path) -> None:
    base, options = made('molmoact2', tmp_path, Change())
    weights, random = load_file(base / 'model.safetensors'), torch.Generator().manual_seed(0)
    stored, merged = {}, dict(weights)
    for module in MODULES:
        outputs, inputs = weights[f'{module}.weight'].shape
        down, up = (
            torch.randn(shape, generator=random) for shape in ((RANK, inputs), (outputs, RANK))
        )
        stored |= {
            f'base_model.model.{module}.lora_A.weight': down,
            f'base_model.model.{module}.lora_B.weight': up,
        }
        merged[f'{module}.weight'] = weights[f'{module}.weight'] + ALPHA / RANK * up @ down
    adapter, by_hand = (
        Path(shutil.copytree(base, tmp_path / name)) for name in ('adapter', 'by_hand')
    )
    save_file(merged, by_hand / 'model.safetensors')
    (adapter / 'model.safetensors').unlink()
    edit_config(adapter, use_peft=True)
    save_file(stored, adapter / 'adapter_model.safetensors')
    document = {'peft_type': 'LORA', 'r': RANK, 'lora_alpha': ALPHA}
    (adapter / 'adapter_config.json').write_text(json.dumps(document))

    plans = (
        plan_export(adapter, replace(options, base=base), default_name='tiny'),
        plan_export(by_hand, options, default_name='tiny'),
    )
    found, expected = (
        load_file(write_export(plan, tmp_path / f'bundle_{number}').weights_path)
        for number, plan in enumerate(plans)
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


def test_text_tables_of_two_precisions_are_joined_in_float32(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        stored = load_file(folder / 'model.safetensors')
        (name,) = (name for name in stored if name.endswith('wte.embedding'))
        save_file({**stored, name: stored[name].bfloat16()}, folder / 'model.safetensors')

    folder, options = made('molmoact2', tmp_path, Change(change))
    plan = plan_export(folder, options, default_name='tiny')
    found = load_file(write_export(plan, tmp_path / 'bundle').weights_path)
    stored = load_file(folder / 'model.safetensors')
    parts = [
        next(tensor for name, tensor in stored.items() if name.endswith(f'wte.{part}')).float()
        for part in ('embedding', 'new_embedding')
    ]
    assert torch.equal(found['language.embedding.weight'], torch.cat(parts))
