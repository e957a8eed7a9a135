"""Checkpoint folders for tests: the LeRobot reference folder, and the same policy written as others
write it (openpi's names, shards, other precisions)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference_cases import find
from safetensors.torch import load_file, save_file

END_TO_END = 'lerobot_*.end_to_end.json'
LM_HEAD = 'paligemma_with_expert.paligemma.lm_head.weight'
TEXT_TABLE = 'paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight'


def end_to_end_cases() -> list[Path]:
    """The descriptions of all reference folders."""
    return find(END_TO_END)


def folder_of(case: Path) -> Path:
    """The checkpoint folder that a description belongs to."""
    return case.with_name(case.name.removesuffix('.end_to_end.json'))


def lerobot_folder() -> Path:
    """One LeRobot pi0.5 folder with six joints."""
    return Path(__file__).parent / 'cases' / 'lerobot_pi05_tiny'


def joints() -> str:
    case = lerobot_folder().with_name('lerobot_pi05_tiny.end_to_end.json')
    return ','.join(json.loads(case.read_text())['joints'])


def lerobot_arguments(case: Path | None = None) -> list[str]:
    """The options that complete a LeRobot reference folder."""
    description = json.loads((case or end_to_end_cases()[0]).read_text())
    names = ','.join(description['joints'])
    return [
        *('--state-names', names, '--action-names', names, '--units', 'rad', '--rate-hz', '30'),
        *('--vision-heads', str(description['dims']['vheads'])),
    ]


def copy_lerobot_folder(target: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(lerobot_folder(), target))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def edit_tensors(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """Change model.safetensors in place; `change` gets names without `model.`."""
    tensors = load_file(folder / 'model.safetensors')
    bare = {name.removeprefix('model.'): tensor for name, tensor in tensors.items()}
    save_tensors(folder, change(bare))


def save_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / 'model.safetensors')


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], count: int = 3) -> None:
    """Write tensors as Hugging Face shards with an index."""
    (folder / 'model.safetensors').unlink(missing_ok=True)
    names = sorted(tensors)
    weight_map = {}
    for index in range(count):
        file = f'model-{index + 1:05}-of-{count:05}.safetensors'
        part = names[index::count]
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index_file = folder / 'model.safetensors.index.json'
    index_file.write_text(json.dumps({'metadata': {}, 'weight_map': weight_map}))


def write_openpi_folder(
    target: Path,
    tensors: Mapping[str, torch.Tensor],
    statistics: Mapping[str, Any],
    *,
    horizon: int | None = 12,
    asset_id: str | None = 'lab/arm',
    outer_key: bool = True,
) -> Path:
    """A folder as openpi's converter writes it: config.json, model.safetensors, assets/."""
    target.mkdir(parents=True)
    save_tensors(target, tensors)
    if horizon is not None:
        config = {
            'action_dim': 32,
            'action_horizon': horizon,
            'paligemma_variant': 'gemma_2b',
            'action_expert_variant': 'gemma_300m',
            'precision': 'float32',
        }
        (target / 'config.json').write_text(json.dumps(config))
    if asset_id is not None:
        path = target / 'assets' / asset_id / 'norm_stats.json'
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({'norm_stats': statistics} if outer_key else statistics))
    return target


def openpi_statistics(length: int = 6) -> dict[str, dict[str, list[float]]]:
    """Plausible statistics in openpi's form."""
    random = np.random.default_rng(length)

    def group() -> dict[str, list[float]]:
        mean = random.normal(size=length)
        std = random.uniform(0.1, 1.0, length)
        numbers = {'mean': mean, 'std': std, 'q01': mean - 2 * std, 'q99': mean + 2 * std}
        return {name: values.tolist() for name, values in numbers.items()}

    return {'state': group(), 'actions': group()}


def openpi_arguments(names: str | None = None) -> list[str]:
    """The options that complete an openpi folder of the tiny pi0.5 policy."""
    names = names or joints()
    tokenizer = lerobot_folder() / 'tokenizer.json'
    return [
        *('--state-names', names, '--action-names', names, '--units', 'rad', '--rate-hz', '30'),
        *('--vision-heads', '4', '--tokenizer', str(tokenizer), '--prompt-template', 'pi05_state'),
        '--absolute',
    ]


def tiny_tensors() -> dict[str, torch.Tensor]:
    """The reference folder's tensors under openpi's names."""
    tensors = load_file(lerobot_folder() / 'model.safetensors')
    return {name.removeprefix('model.'): tensor for name, tensor in tensors.items()}


def pi0_tensors() -> dict[str, torch.Tensor]:
    """A tiny pi0 policy's tensors under openpi's names."""
    return load_file(Path(__file__).parent / 'cases' / 'pi0_a.weights.safetensors')
