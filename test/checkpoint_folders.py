"""Checkpoint folders for tests: the LeRobot reference folder, and the same policy written as others
write it (openpi's names, shards, other precisions)."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference_cases import find
from safetensors.torch import load_file, save_file

from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.reader import find_reader
from vla_convert.checkpoints.tensor_names import TensorNames
from vla_runtime.family.listing import find_family
from vla_runtime.models.base.flow_network import weight_shapes

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


def draft_of(folder: Path, **options: Any) -> Draft:
    """What a folder of pi0.5 says, whoever wrote it."""
    draft = Draft(folder, ExportOptions(**options), MissingFacts(folder), family='pi05')
    find_reader(folder).read(draft)
    return draft


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


def full_size_shapes(
    family: str, names: TensorNames, stored: Iterable[str]
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a family's published policy, as its checkpoints have them.

    Args:
        family: name of the family and of the preset.
        names: what our names are, by theirs.
        stored: names of a tiny checkpoint; a layer of it stands for all.
    """
    layer = re.compile(r'\.\d+\.')
    theirs: dict[str, str] = {}
    for name in stored:
        if not names.is_unused(name):
            template = layer.sub('.{}.', name, count=1)
            theirs |= {layer.sub('.{}.', part, count=1): template for part in names.parts(name)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in weight_shapes(family, find_family(family).presets[family]).items():
        index = layer.search(name)
        template = theirs[layer.sub('.{}.', name, count=1)]
        full = template.format(index[0].strip('.')) if index else template
        # Packed tensors stand one behind the other.
        packed = shapes.get(full, (0,))[0]
        shapes[full] = (packed + shape[0], *shape[1:]) if shape else shape
    return shapes


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
