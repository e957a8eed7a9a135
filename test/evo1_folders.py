"""LeRobot's folders of Evo-1, written from the network cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
from evo1_cases import load_evo1_case
from lerobot_folders import write_lerobot
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from tokenizers.models import WordLevel

from vla_convert.checkpoints.options import ExportOptions


def write_folder(folder: Path, path: Path, b: int) -> Path:
    """Write a case's batch entry as LeRobot saves a policy, with its stand-in tokenizer."""
    case = load_evo1_case(path, b)
    d, actions = case.description, case.network.dims.real_actions
    weights = load_file(path.with_suffix('.weights.safetensors'))
    config = _config(d, len(case.of('raw_state')), actions)
    config['default_embodiment_id'] = int(case.of('embodiment_id'))
    lengths = {'observation.state': d['state_dim'], 'action': d['action_dim']}
    # Padded as LeRobot pads them; -1 and 1 change nothing.
    statistics = {
        f'{feature}.{name}': torch.full((length,), value)
        for feature, length in lengths.items()
        for name, value in (('min', -1.0), ('max', 1.0))
    }
    normal = {'eps': 1e-8, 'norm_map': config['normalization_mapping']}
    before = [
        ('evo1_pad_state_processor', {'max_state_dim': d['state_dim']}),
        ('evo1_pad_action_processor', {'max_action_dim': d['action_dim']}),
        ('normalizer_processor', normal),
    ]
    after = [
        ('unnormalizer_processor', normal),
        ('evo1_action_processor', {'action_dim': actions, 'binarize_gripper': False}),
    ]
    named = {f'model.{name}': value for name, value in weights.items()}
    write_lerobot(folder, named, config, before, after, statistics)
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
