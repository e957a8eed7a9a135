"""LeRobot's folders of Evo-1, written from the network cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from evo1_cases import load_evo1_case
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from tokenizers.models import WordLevel

from vla_convert.checkpoints.options import ExportOptions

PREPROCESSOR, POSTPROCESSOR = 'policy_preprocessor.json', 'policy_postprocessor.json'
_STATISTICS = 'policy_{}_step_{}_normalizer_processor.safetensors'


def write_folder(folder: Path, path: Path, b: int) -> Path:
    """Write a case's batch entry as LeRobot saves a policy, with its stand-in tokenizer."""
    case = load_evo1_case(path, b)
    d, dims = case.description, case.network.dims
    folder.mkdir()
    weights = load_file(path.with_suffix('.weights.safetensors'))
    save_file(
        {f'model.{name}': value for name, value in weights.items()}, folder / 'model.safetensors'
    )
    config = _config(d, len(case.of('raw_state')), dims.real_actions)
    config['default_embodiment_id'] = int(case.of('embodiment_id'))
    _write(folder / 'config.json', config)
    _write_processors(folder, d, dims.real_actions)
    _write_tokenizer(folder / 'tokenizer.json', d['words'])
    return folder


def options_of(path: Path, b: int) -> ExportOptions:
    """The options that complete such a folder."""
    case = load_evo1_case(path, b)
    return ExportOptions(
        state_names=tuple(f'state_{i}' for i in range(len(case.of('raw_state')))),
        action_names=tuple(f'action_{i}' for i in range(case.network.dims.real_actions)),
        units=('rad',),
        rate_hz=30.0,
        vision_heads=case.description['v_heads'],
        kv_heads=case.description['num_kv_heads'],
    )


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2))


def _config(d: dict[str, Any], state: int, actions: int) -> dict[str, Any]:
    image = {'type': 'VISUAL', 'shape': [3, d['raw_height'], d['raw_width']]}
    return {
        'type': 'evo1',
        'n_obs_steps': 1,
        'input_features': {
            **{f'observation.images.camera_{i}': image for i in range(d['cameras'])},
            'observation.state': {'type': 'STATE', 'shape': [state]},
        },
        'output_features': {'action': {'type': 'ACTION', 'shape': [actions]}},
        'use_peft': False,
        'chunk_size': d['chunk'],
        'max_state_dim': d['state_dim'],
        'max_action_dim': d['action_dim'],
        'max_views': d['max_views'],
        'image_resolution': [d['image'], d['image']],
        'empty_cameras': 0,
        'postprocess_action_dim': None,
        'binarize_gripper': False,
        'normalization_mapping': {'VISUAL': 'IDENTITY', 'STATE': 'MIN_MAX', 'ACTION': 'MIN_MAX'},
        'vlm_model_name': 'stand-in',
        'action_head': 'flowmatching',
        'num_heads': d['head_heads'],
        'num_inference_timesteps': d['steps'],
        'return_cls_only': False,
    }


def _write_processors(folder: Path, d: dict[str, Any], actions: int) -> None:
    mapping = {'VISUAL': 'IDENTITY', 'STATE': 'MIN_MAX', 'ACTION': 'MIN_MAX'}
    lengths = {'observation.state': d['state_dim'], 'action': d['action_dim']}
    # Padded as LeRobot pads them; -1 and 1 change nothing.
    statistics = {
        f'{feature}.{name}': torch.full((length,), value)
        for feature, length in lengths.items()
        for name, value in (('min', -1.0), ('max', 1.0))
    }

    def normalizer(name: str, pipeline: str, step: int) -> dict[str, Any]:
        file = _STATISTICS.format(pipeline, step)
        save_file(statistics, folder / file)
        config = {'eps': 1e-8, 'norm_map': mapping}
        return {'registry_name': name, 'config': config, 'state_file': file}

    before = [
        {'registry_name': 'rename_observations_processor', 'config': {'rename_map': {}}},
        {'registry_name': 'to_batch_processor', 'config': {}},
        {
            'registry_name': 'evo1_pad_state_processor',
            'config': {'max_state_dim': d['state_dim']},
        },
        {
            'registry_name': 'evo1_pad_action_processor',
            'config': {'max_action_dim': d['action_dim']},
        },
        normalizer('normalizer_processor', 'preprocessor', 4),
        {'registry_name': 'device_processor', 'config': {'device': 'cpu'}},
    ]
    after = [
        normalizer('unnormalizer_processor', 'postprocessor', 0),
        {
            'registry_name': 'evo1_action_processor',
            'config': {'action_dim': actions, 'binarize_gripper': False},
        },
        {'registry_name': 'device_processor', 'config': {'device': 'cpu'}},
    ]
    _write(folder / PREPROCESSOR, {'name': 'policy_preprocessor', 'steps': before})
    _write(folder / POSTPROCESSOR, {'name': 'policy_postprocessor', 'steps': after})


def _write_tokenizer(path: Path, words: list[str]) -> None:
    """A vocabulary of whole words, line breaks and signs, as the cases were made with."""
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token='<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(' +'), 'removed'),
            pre_tokenizers.Split(tokenizers.Regex(r'\n|\w+|[^\w\s]'), 'isolated'),
        ]
    )
    tokenizer.add_special_tokens(['<pad>', '<IMG_CONTEXT>', '<img>', '</img>'])
    tokenizer.save(str(path))
