"""OpenVLA's folders as published, made of a network case."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from vla_convert.checkpoints.options import ExportOptions

SHARDS = 2
ACTIONS = ('dx', 'dy', 'dz', 'drx', 'dry', 'drz', 'grip')
STATE = ('x', 'y', 'z', 'rx', 'ry', 'rz')


def norm_stats(d: dict[str, Any]) -> dict[str, Any]:
    """`norm_stats` of a case's description, in the published form."""
    return {
        name: {
            'action': {
                'mean': [0.0] * d['action_dim'],
                'std': [1.0] * d['action_dim'],
                **{key: list(values) for key, values in numbers.items()},
            },
            'proprio': {'q01': [0.0] * 7, 'q99': [0.0] * 7},
            'num_transitions': 1000,
            'num_trajectories': 10,
        }
        for name, numbers in d['norm_stats'].items()
    }


def write_folder(target: Path, path: Path) -> Path:
    """Write a folder with shards, and the code that transformers would run from it."""
    target.mkdir(parents=True)
    d = json.loads(path.read_text())
    tensors = load_file(path.with_suffix('.weights.safetensors'))
    names = sorted(tensors)
    shards = {
        f'model-{i + 1:05}-of-{SHARDS:05}.safetensors': names[i::SHARDS] for i in range(SHARDS)
    }
    for file, of_shard in shards.items():
        save_file({name: tensors[name] for name in of_shard}, target / file, {'format': 'pt'})
    weight_map = {name: file for file, of_shard in shards.items() for name in of_shard}
    index = {'metadata': {'total_size': 0}, 'weight_map': weight_map}
    (target / 'model.safetensors.index.json').write_text(json.dumps(index))
    shutil.copyfile(path.with_suffix('.tokenizer.json'), target / 'tokenizer.json')
    strategy = d['image_resize_strategy']
    config = {
        'arch_specifier': 'no-align+fused-gelu-mlp',
        'architectures': ['OpenVLAForActionPrediction'],
        'auto_map': {
            'AutoConfig': 'configuration_prismatic.OpenVLAConfig',
            'AutoModelForVision2Seq': 'modeling_prismatic.OpenVLAForActionPrediction',
        },
        'hf_llm_id': 'meta-llama/Llama-2-7b-hf',
        'image_resize_strategy': strategy,
        'image_sizes': [d['image']] * 2,
        'llm_backbone_id': 'llama2-7b-pure',
        'llm_max_length': 2048,
        'model_type': 'openvla',
        'n_action_bins': d['n_action_bins'],
        'norm_stats': norm_stats(d),
        'output_projector_states': False,
        'pad_to_multiple_of': d['pad_to_multiple_of'],
        'pad_token_id': 3,
        'text_config': {
            'model_type': 'llama',
            'num_attention_heads': d['num_heads'],
            'num_key_value_heads': d['num_kv_heads'],
            'rms_norm_eps': d['rms_eps'],
            'rope_theta': d['rope_theta'],
            'vocab_size': d['vocab'],
        },
        'timm_override_act_layers': [None, None],
        'torch_dtype': 'float32',
        'use_fused_vision_backbone': True,
        'vision_backbone_id': 'dinosiglip-vit-so-224px',
    }
    (target / 'config.json').write_text(json.dumps(config))
    preprocessor = {
        'image_processor_type': 'PrismaticImageProcessor',
        'image_resize_strategy': strategy,
        'input_sizes': [[3, d['image'], d['image']]] * 2,
        'interpolations': ['bicubic', 'bicubic'],
        'means': d['image_means'],
        'stds': d['image_stds'],
        'tvf_do_letterbox': strategy == 'letterbox',
        'use_fused_vision_backbone': True,
    }
    (target / 'preprocessor_config.json').write_text(json.dumps(preprocessor))
    # Anybody who runs it notices.
    (target / 'modeling_prismatic.py').write_text("raise SystemExit('the folder was executed')\n")
    return target


def options_of(path: Path, unnorm_key: str | None = 'set_one', **further: Any) -> ExportOptions:
    """What the folder of a case does not say."""
    d = json.loads(path.read_text())
    names = ACTIONS[: d['action_dim']] + tuple(f'a{i}' for i in range(7, d['action_dim']))
    given = {
        'unnorm_key': unnorm_key,
        'state_names': STATE,
        'action_names': names,
        'units': ('1',),
        'rate_hz': 5.0,
        'deltas': (),
        'heads': {'dino': d['dino_heads'], 'siglip': d['siglip_heads']},
    }
    return ExportOptions(**{**given, **further})
