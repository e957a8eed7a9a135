"""LeRobot folders of GR00T N1.5 for tests: a reference case's weights, written as LeRobot does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from lerobot_folders import write_lerobot
from reference_cases import shipped
from safetensors.torch import load_file
from tiny_policy import tokenizer_of

JOINTS = tuple('abcdefgh')
CAMERAS = ('wrist', 'front')
SLOTS = {'new_embodiment': 3, 'so100': 2, 'gr1': 1}


def write_groot_folder(target: Path, tag: str = 'so100') -> Path:
    """Write a folder with eight joints, seven actions, two cameras and every embodiment."""
    case = shipped('groot_n15_a')
    sizes = json.loads(case.read_text())
    weights = load_file(case.with_suffix('.weights.safetensors'))
    named = {f'_groot_model.{name}': value for name, value in weights.items()}
    # What LeRobot saves and nothing reads.
    unused = '_groot_model.backbone.eagle_model.language_model.lm_head.weight'
    named[unused] = torch.zeros(sizes['vocab'], sizes['width'])
    random = np.random.default_rng(0)
    state, action = len(JOINTS), sizes['real_action_dim']
    low = {
        'observation.state': random.uniform(-2, -1, state),
        'action': random.uniform(-2, -1, action),
    }
    high = {key: value + 2.5 for key, value in low.items()}
    # A joint that never moved.
    high['observation.state'][-1] = low['observation.state'][-1]
    statistics = {
        f'{key}.{name}': torch.tensor(values[key], dtype=torch.float32)
        for key in low
        for name, values in (('min', low), ('max', high))
    }
    config = {
        'type': 'groot',
        'n_obs_steps': 1,
        'chunk_size': 50,
        'n_action_steps': 50,
        'max_state_dim': sizes['state_dim'],
        'max_action_dim': sizes['action_dim'],
        'embodiment_tag': tag,
        'input_features': {
            'observation.state': {'type': 'STATE', 'shape': [state]},
            **{
                f'observation.images.{name}': {'type': 'VISUAL', 'shape': [3, 60, 84]}
                for name in CAMERAS
            },
        },
        'output_features': {'action': {'type': 'ACTION', 'shape': [action]}},
    }
    pack = {
        'state_horizon': 1,
        'action_horizon': sizes['horizon'],
        'max_state_dim': sizes['state_dim'],
        'max_action_dim': sizes['action_dim'],
        'language_key': 'task',
        'formalize_language': False,
        'embodiment_tag': tag,
        'embodiment_mapping': SLOTS,
        'normalize_min_max': True,
    }
    unpack = {'env_action_dim': action, 'normalize_min_max': True}
    before = [
        ('groot_pack_inputs_v3', pack),
        ('groot_eagle_encode_v3', {}),
        ('groot_eagle_collate_v3', {}),
    ]
    after = [('groot_action_unpack_unnormalize_v1', unpack)]
    write_lerobot(target, named, config, before, after, statistics)
    (target / 'tokenizer.json').write_bytes(tokenizer_of('groot_n15').read_bytes())
    return target
