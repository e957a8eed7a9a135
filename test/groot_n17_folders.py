"""Folders of GR00T N1.6 and N1.7 for tests: a case as LeRobot (N1.7) and as NVIDIA write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from groot_cases import load_groot_case
from lerobot_folders import write_lerobot
from safetensors.torch import load_file, save_file

from vla_runtime.types import Observation

RATE_HZ = 30


def cameras_of(case: Path) -> tuple[str, ...]:
    """Names of a case's cameras in the checkpoint's order."""
    return tuple(json.loads(case.read_text())['camera_order'])


def joints_of(case: Path, group: str = 'state') -> tuple[str, ...]:
    """Names of a case's real dimensions."""
    d = json.loads(case.read_text())
    widths = [
        len(d['statistics'][group][name]['min'])
        for name in d['modality_config'][group]['modality_keys']
    ]
    return tuple(f'j{index}' for index in range(sum(widths)))


def write_backbone(target: Path, case: Path) -> Path:
    """Write what of the backbone's folder an export reads; return its tokenizer."""
    d = json.loads(case.read_text())
    target.mkdir(parents=True)
    tokenizer = json.loads(case.with_suffix('.tokenizer.json').read_text())
    flags = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False}
    tokenizer['added_tokens'] = [
        {'id': index, 'content': word, 'special': True, **flags}
        for word, index in tokenizer['model']['vocab'].items()
        if word.startswith('<|') or word in ('<img>', '</img>', '<IMG_CONTEXT>')
    ]
    _write(target / 'tokenizer.json', tokenizer)
    if d['kind'] == 'groot_n16':
        _write(target / 'config.json', _eagle(d))
        return target / 'tokenizer.json'
    text = {
        'rms_norm_eps': d['rms_eps'],
        'rope_parameters': {'rope_theta': d['rope_theta'], 'mrope_section': d['mrope_section']},
    }
    vision = {'num_heads': d['v_heads'], 'deepstack_visual_indexes': d['deepstack']}
    _write(target / 'config.json', {'text_config': text, 'vision_config': vision})
    least = {'min_pixels': d['image_processor']['min_pixels']}
    _write(target / 'preprocessor_config.json', least)
    return target / 'tokenizer.json'


def _eagle(d: Mapping[str, Any]) -> dict[str, Any]:
    """Write the config.json of N1.6's backbone, as Isaac-GR00T ships it."""
    return {
        'model_type': 'eagle_3_vl',
        'select_layer': -1,
        'use_pixel_shuffle': True,
        'downsample_ratio': 0.5,
        'text_config': {'rms_norm_eps': d['rms_eps'], 'rope_theta': d['rope_theta']},
        'vision_config': {
            'num_attention_heads': d['v_heads'],
            'window_size': 14,
            'full_attention_indexes': [7, 14, 21, 26],
            'use_rope': d['vision_rope'],
            'use_windows_attn': d['vision_windows'],
        },
    }


def write_lerobot_folder(target: Path, case: Path, **changes: Any) -> Path:
    """Write a LeRobot folder of a case.

    Args:
        target: the folder.
        case: description of the case.
        **changes: changes of the settings in the preprocessor's steps.
    """
    d = json.loads(case.read_text())
    shape = [3, d['raw_height'], d['raw_width']]
    features = {name: {'type': 'VISUAL', 'shape': shape} for name in d['camera_order']}
    config = {
        'type': 'groot',
        'n_obs_steps': 1,
        'chunk_size': 40,
        'n_action_steps': 40,
        'input_features': {
            'observation.state': {'type': 'STATE', 'shape': [len(joints_of(case))]},
            **{f'observation.images.{name}': value for name, value in features.items()},
        },
        'output_features': {
            'action': {'type': 'ACTION', 'shape': [len(joints_of(case, 'action'))]}
        },
    }
    modality = {**d['modality_config'], 'video': {'modality_keys': d['camera_order']}}
    modality['video']['delta_indices'] = [0]
    pack = {
        'state_horizon': 1,
        'action_horizon': d['horizon'],
        'valid_action_horizon': d['valid_horizon'],
        'video_horizon': None,
        'formalize_language': True,
        'embodiment_tag': d['embodiment_tag'],
        'embodiment_mapping': d['embodiment_tags'],
        'normalize_min_max': True,
        'clip_outliers': True,
        'use_percentiles': d['use_percentiles'],
        'video_modality_keys': d['camera_order'],
        'raw_stats': d['statistics'],
        'modality_config': modality,
    }
    encode = {**_images(d), 'device': 'cpu'}
    decode = {
        'env_action_dim': d['env_action_dim'],
        'raw_stats': d['statistics'],
        'modality_config': modality,
        'use_percentiles': d['use_percentiles'],
        'use_relative_action': True,
        'action_decode_transform': None,
    }
    for step in (pack, encode, decode):
        step.update({key: value for key, value in changes.items() if key in step})
    return write_lerobot(
        target,
        _weights(case, '_groot_model.'),
        config,
        before=[('groot_n1_7_pack_inputs_v1', pack), ('groot_n1_7_vlm_encode_v1', encode)],
        after=[('groot_n1_7_action_decode_v1', decode)],
        statistics={},
    )


def write_nvidia_folder(target: Path, case: Path, **changes: Any) -> Path:
    """Write a folder of a case as NVIDIA does; `changes` are of the processor's settings."""
    d = json.loads(case.read_text())
    target.mkdir(parents=True)
    save_file(_weights(case, ''), target / 'model.safetensors')
    _write(
        target / 'config.json',
        {
            'model_type': 'Gr00tN1d6' if d['kind'] == 'groot_n16' else 'Gr00tN1d7',
            'action_horizon': d['horizon'],
            'use_alternate_vl_dit': True,
            'attend_text_every_n_blocks': d['attend_text_every_n_blocks'],
        },
    )
    tag = d['embodiment_tag']
    modality = {**d['modality_config'], 'video': {'modality_keys': d['camera_order']}}
    modality['video']['delta_indices'] = [0]
    settings = {
        **_images(d),
        'formalize_language': True,
        'clip_outliers': True,
        'use_percentiles': d['use_percentiles'],
        'use_relative_action': True,
        'modality_configs': {tag: modality},
        **changes,
    }
    _write(target / 'processor_config.json', {'processor_kwargs': settings})
    _write(target / 'statistics.json', {tag: d['statistics']})
    _write(target / 'embodiment_id.json', d['embodiment_tags'])
    return target


def _images(d: Mapping[str, Any]) -> dict[str, Any]:
    if d['kind'] == 'groot_n16':
        return {**d['image_transform'], 'use_albumentations': True}
    return {
        'image_crop_size': d['image_crop'],
        'image_target_size': d['image_target'],
        'shortest_image_edge': None,
        'crop_fraction': None,
        'use_albumentations': False,
        'letter_box_transform': False,
    }


def _weights(case: Path, prefix: str) -> dict[str, torch.Tensor]:
    weights = load_file(case.with_suffix('.weights.safetensors'))
    named = {f'{prefix}{name}': value.contiguous() for name, value in weights.items()}
    # What is saved and nothing reads.
    eagle = 'language_model.' if case.stem.startswith('groot_n16') else ''
    return {**named, f'{prefix}backbone.model.{eagle}lm_head.weight': torch.zeros(4, 4)}


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document))


def is_of_a_folder(case: Path) -> bool:
    """Whether its chunk in robot units is that of a folder: one row, no history of states."""
    d = json.loads(case.read_text())
    return d['batch'] == 1 and d['state_history'] == 1


def observation_of(case: Path) -> Observation:
    """The case's own observation."""
    loaded = load_groot_case(case, 0)
    return Observation(
        images={name: loaded.tensors[name][0].numpy() for name in cameras_of(case)},
        state=loaded.tensors['raw_state'][0].numpy(),
        instruction=loaded.description['tasks'][0],
    )


def noise_of(case: Path) -> np.ndarray:
    """(horizon, action dim) float32, noise of the case's chunk."""
    return load_groot_case(case, 0).tensors['noise'][0].numpy()
