"""A SmolVLA folder as a fine-tune on LIBERO's data sets is: steps of a pose, in shares of 5 cm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from checkpoint_folders import edit_config, edit_step
from safetensors.numpy import load_file, save_file
from tiny_policy import tokenizer_of

STATE = ('x', 'y', 'z', 'rx', 'ry', 'rz', 'finger_1', 'finger_2')
ACTIONS = ('dx', 'dy', 'dz', 'drx', 'dry', 'drz', 'grip')
# LIBERO's controller: metres and radians that 1 is.
SCALE = (0.05, 0.5)
POSE_OPTIONS = (
    *('--pose-steps', ','.join(ACTIONS[:6])),
    *('--pose-state', ','.join(STATE[:6])),
    *('--pose-scale', ','.join(map(str, SCALE))),
)
OPTIONS = (
    *('--state-names', ','.join(STATE)),
    *('--action-names', ','.join(ACTIONS)),
    *('--units', '1,finger_1=m,finger_2=m', '--rate-hz', '20'),
    *('--vision-heads', '4', '--kv-heads', '2'),
)


def write_libero_folder(
    target: Path, mean: np.ndarray, std: np.ndarray, state: int = len(STATE)
) -> Path:
    """Write a folder whose actions, (n,), have this mean and this spread; LIBERO has 7 of them."""
    shutil.copytree(tokenizer_of('smolvla').parent, target)
    random = np.random.default_rng(7)
    groups = {
        'observation.state': {'mean': 0.2 * random.normal(size=state), 'std': np.full(state, 0.3)},
        'action': {'mean': mean, 'std': std},
    }
    for path in target.glob('policy_*processor_step_*.safetensors'):
        tensors = load_file(path)
        for group, numbers in groups.items():
            for key in [key for key in tensors if key.rpartition('.')[0] == group]:
                del tensors[key]
            for name, values in numbers.items():
                tensors[f'{group}.{name}'] = values.astype(np.float32)
        save_file(tensors, path)
    features = {'observation.state': {'type': 'STATE', 'shape': [state]}}
    actions = {'action': {'type': 'ACTION', 'shape': [len(mean)]}}
    inputs = json.loads((target / 'config.json').read_text())['input_features'] | features
    edit_config(target, input_features=inputs, output_features=actions)
    both = inputs | actions
    edit_step(target, 'normalizer_processor', features=both)
    edit_step(target, 'unnormalizer_processor', features=actions)
    return target
