"""LeRobot's folders of Multi-Task DiT, written from the network cases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lerobot_folders import numbers_of, write_lerobot
from multi_task_dit_cases import load_multi_task_dit_case
from safetensors.torch import load_file

from vla_convert.checkpoints.options import ExportOptions

_CONFIG_KEYS = (
    *('n_obs_steps', 'horizon', 'n_action_steps', 'objective', 'noise_scheduler_type'),
    *('num_train_timesteps', 'beta_schedule', 'beta_start', 'beta_end', 'prediction_type'),
    *('clip_sample', 'clip_sample_range', 'num_inference_steps', 'num_integration_steps'),
    *('integration_method', 'hidden_dim', 'num_layers', 'num_heads', 'use_positional_encoding'),
    *('timestep_embed_dim', 'use_rope', 'rope_base', 'image_resize_shape', 'image_crop_shape'),
    *('use_separate_rgb_encoder_per_camera', 'tokenizer_max_length'),
)


def write_folder(folder: Path, path: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Write a case as LeRobot saves a policy, with CLIP's tokenizer beside it.

    Args:
        folder: folder that appears.
        path: the case's description.
        changes: other values of config.json, as of the case's `samplers`.
    """
    d = load_multi_task_dit_case(path).description
    image = {'type': 'VISUAL', 'shape': [3, *d['image']]}
    inputs: dict[str, Any] = dict.fromkeys(d['camera_keys'], image)
    inputs['observation.state'] = {'type': 'STATE', 'shape': [d['state_dim']]}
    outputs = {'action': {'type': 'ACTION', 'shape': [d['action_dim']]}}
    config = {
        'type': 'multi_task_dit',
        **{key: d[key] for key in _CONFIG_KEYS},
        'input_features': inputs,
        'output_features': outputs,
        'normalization_mapping': d['normalization'],
        'use_peft': False,
        'vision_encoder_name': 'openai/clip-vit-base-patch16',
        'text_encoder_name': 'openai/clip-vit-base-patch16',
        **(changes or {}),
    }
    tokenizer = {
        'max_length': d['tokenizer_max_length'],
        'task_key': 'task',
        'padding_side': 'right',
        'padding': 'max_length',
        'truncation': True,
        'tokenizer_name': 'openai/clip-vit-base-patch16',
    }
    normal = {'eps': 1e-8, 'norm_map': d['normalization']}
    write_lerobot(
        folder,
        load_file(path.with_suffix('.weights.safetensors')),
        config,
        before=[
            ('tokenizer_processor', tokenizer),
            ('normalizer_processor', {**normal, 'features': inputs | outputs}),
        ],
        after=[('unnormalizer_processor', {**normal, 'features': outputs})],
        statistics=numbers_of(d['statistics']),
    )
    (folder / 'tokenizer.json').write_bytes(path.with_suffix('.tokenizer.json').read_bytes())
    return folder


def options_of(path: Path) -> ExportOptions:
    """The options that complete such a folder."""
    d = load_multi_task_dit_case(path).description
    return ExportOptions(
        state_names=tuple(f'state_{i}' for i in range(d['state_dim'])),
        action_names=tuple(f'action_{i}' for i in range(d['action_dim'])),
        units=('1',),
        rate_hz=30.0,
        vision_heads=d['v_heads'],
        kv_heads=d['t_heads'],
    )
