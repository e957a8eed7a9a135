"""Checkpoint folders for tests: the LeRobot reference folder, and the same policy written as others
write it (openpi's names, shards, other precisions)."""

from __future__ import annotations

import json
import math
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
    """The options that complete a LeRobot reference folder; without a case `lerobot_folder`."""
    own = lerobot_folder().with_name('lerobot_pi05_tiny.end_to_end.json')
    description = json.loads((case or own).read_text())
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


def edit_config(folder: Path, **changes: Any) -> None:
    """Change values of a LeRobot folder's config.json."""
    edit_json(folder / 'config.json', lambda document: document.update(changes))


def edit_step(folder: Path, name: str, **changes: Any) -> None:
    """Change a processor step's configuration."""
    file = 'postprocessor' if name.startswith(('un', 'absolute')) else 'preprocessor'

    def change(document: dict[str, Any]) -> None:
        for entry in document['steps']:
            if entry['registry_name'] == name:
                entry['config'].update(changes)

    edit_json(folder / f'policy_{file}.json', change)


def make_relative(folder: Path, **changes: Any) -> None:
    """Relative actions as LeRobot 0.6 writes them in all three files."""
    names = joints().split(',')
    relative = {'exclude_joints': ['gripper'], 'action_names': names, **changes}
    edit_config(
        folder,
        use_relative_actions=True,
        relative_exclude_joints=relative['exclude_joints'],
        action_feature_names=relative['action_names'],
    )
    edit_step(folder, 'relative_actions_processor', enabled=True, **relative)
    edit_step(folder, 'absolute_actions_processor', enabled=True)


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
    """Plausible statistics in openpi's form: states are where their actions are."""
    random = np.random.default_rng(length)
    mean = random.normal(size=length)

    def group() -> dict[str, list[float]]:
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


def full_size_names(family: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published pi0.5 or pi0 policy, as openpi's converter writes them."""
    vision = 'paligemma_with_expert.paligemma.model.vision_tower.vision_model'
    language = 'paligemma_with_expert.paligemma.model.language_model'
    expert = 'paligemma_with_expert.gemma_expert.model'
    projector = 'paligemma_with_expert.paligemma.model.multi_modal_projector.linear'

    def linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
        return {f'{name}.weight': (out, into), f'{name}.bias': (out,)}

    def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
        return {f'{name}.weight': (width,), f'{name}.bias': (width,)}

    def expert_norm(name: str) -> dict[str, tuple[int, ...]]:
        return (
            linear(f'{name}.dense', 3072, 1024) if family == 'pi05' else {f'{name}.weight': (1024,)}
        )

    def gemma(prefix: str, width: int, mlp: int) -> dict[str, tuple[int, ...]]:
        return {
            f'{prefix}.self_attn.q_proj.weight': (2048, width),
            f'{prefix}.self_attn.k_proj.weight': (256, width),
            f'{prefix}.self_attn.v_proj.weight': (256, width),
            f'{prefix}.self_attn.o_proj.weight': (width, 2048),
            f'{prefix}.mlp.gate_proj.weight': (mlp, width),
            f'{prefix}.mlp.up_proj.weight': (mlp, width),
            f'{prefix}.mlp.down_proj.weight': (width, mlp),
        }

    shapes: dict[str, tuple[int, ...]] = {
        f'{vision}.embeddings.patch_embedding.weight': (1152, 3, 14, 14),
        f'{vision}.embeddings.patch_embedding.bias': (1152,),
        f'{vision}.embeddings.position_embedding.weight': (256, 1152),
        **norm(f'{vision}.post_layernorm', 1152),
        **linear(projector, 2048, 1152),
        # safetensors' save_model keeps one of two tied names: this one.
        'paligemma_with_expert.paligemma.lm_head.weight': (257152, 2048),
        'paligemma_with_expert.gemma_expert.lm_head.weight': (257152, 1024),
        f'{language}.norm.weight': (2048,),
        **expert_norm(f'{expert}.norm'),
        **linear('action_in_proj', 1024, 32),
        **linear('action_out_proj', 32, 1024),
    }
    for index in range(27):
        layer = f'{vision}.encoder.layers.{index}'
        shapes |= norm(f'{layer}.layer_norm1', 1152) | norm(f'{layer}.layer_norm2', 1152)
        for part in ('q_proj', 'k_proj', 'v_proj', 'out_proj'):
            shapes |= linear(f'{layer}.self_attn.{part}', 1152, 1152)
        shapes |= linear(f'{layer}.mlp.fc1', 4304, 1152) | linear(f'{layer}.mlp.fc2', 1152, 4304)
    for index in range(18):
        shapes |= gemma(f'{language}.layers.{index}', 2048, 16384)
        shapes |= gemma(f'{expert}.layers.{index}', 1024, 4096)
        for part in ('input_layernorm', 'post_attention_layernorm'):
            shapes[f'{language}.layers.{index}.{part}.weight'] = (2048,)
            shapes |= expert_norm(f'{expert}.layers.{index}.{part}')
    if family == 'pi05':
        return shapes | linear('time_mlp_in', 1024, 1024) | linear('time_mlp_out', 1024, 1024)
    return {
        **shapes,
        **linear('action_time_mlp_in', 1024, 2048),
        **linear('action_time_mlp_out', 1024, 1024),
        **linear('state_proj', 1024, 32),
    }


def write_sparse_checkpoint(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of bfloat16 zeros that takes no room: gigabytes of holes."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {'dtype': 'BF16', 'shape': shape, 'data_offsets': [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open('wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        file.truncate(8 + len(text) + end)
