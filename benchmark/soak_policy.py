"""The soak's robot and policy: ALOHA's 14 joints, four cameras, a small policy of random weights.

The policy's actions depend on the measured state and the images, vary smoothly along a chunk, and
stay around one pose; a little white noise on them keeps the acceleration limit at work at every
tick, and one joint is at home where its range ends.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import yaml
from random_policy import random_network

sys.path.insert(0, str(Path(__file__).parents[1] / 'test'))
from written_bundle import write_bundle  # isort: skip

from vla_runtime.bundle.schema import (
    ActionSpec,
    BundleSpec,
    CameraSpec,
    ImageSpec,
    NormalisationSpec,
    StateSpec,
)
from vla_runtime.families.blocks.dimensions import DecoderDims, VisionDims
from vla_runtime.families.pi.dimensions import PiDims
from vla_runtime.policy import Policy
from vla_runtime.processing.prompts import PromptFormat
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.schema import Robot
from vla_runtime.types import Observation

_ROOT = Path(__file__).resolve().parents[1]
_ALOHA = _ROOT / 'config' / 'robots' / 'aloha.yaml'
_TOKENIZER = _ROOT / 'test' / 'cases' / 'lerobot_pi05_tiny' / 'tokenizer.json'
INSTRUCTION = 'put the cup on the shelf'
_HEADS = {'depth': 4, 'num_heads': 4, 'num_kv_heads': 1, 'head_dim': 32}
_DIMS = PiDims(
    vision=VisionDims(width=128, depth=4, num_heads=4, mlp_dim=512, patch_size=14, image_size=112),
    language=DecoderDims(width=192, mlp_dim=768, **_HEADS),
    expert=DecoderDims(width=96, mlp_dim=384, **_HEADS),
    vocabulary=400,
    cameras=4,
    prompt_length=160,
    horizon=50,
    action_dim=32,
)
_DENOISE_STEPS = 4
AT_ITS_LIMIT = 'left_elbow'
# The noise that a chunk is denoised from stays in its rows: this much of a joint's range.
ROW_NOISE = 0.001
# How many times the noise a chunk's own motion is.
_GAIN = 100.0
_LOOKS = 8


def write_robot(target: Path) -> Robot:
    """Write ALOHA's robot file with outputs whose messages are stamped, and read it."""
    content = yaml.safe_load(_ALOHA.read_text(encoding='utf-8'))
    names = [joint['name'] for joint in content['joints']]
    for joint in content['joints']:
        # What is commanded is compared with the limits, in their units.
        joint.pop('command', None)
    content['name'] = 'soak'
    content['outputs'] = [
        {
            'kind': 'joint_state',
            'topic': f'follower_{side}/commands',
            'joints': [name for name in names if name.startswith(side)],
        }
        for side in ('left', 'right')
    ]
    target.write_text(yaml.safe_dump(content, sort_keys=False), encoding='utf-8')
    return load_robot(target)


def home(robot: Robot) -> np.ndarray:
    """(joints,) what the policy's actions lie around: the middle of each range, but for one joint.

    `AT_ITS_LIMIT` is around its upper limit, so that half of its actions are beyond it.
    """
    return np.array(
        [
            joint.upper if joint.name == AT_ITS_LIMIT else (joint.lower + joint.upper) / 2
            for joint in robot.joints
        ]
    )


def _half_range(robot: Robot) -> np.ndarray:
    return np.array([(joint.upper - joint.lower) / 2 for joint in robot.joints])


def _spec(robot: Robot, step_time_s: float) -> BundleSpec:
    return BundleSpec(
        name='soak',
        family='pi05',
        dims=_DIMS,
        cameras=tuple(CameraSpec(camera.name) for camera in robot.cameras),
        images=ImageSpec(padding='centre', resample='bilinear'),
        state=tuple(StateSpec(joint.name, joint.unit) for joint in robot.joints),
        actions=tuple(ActionSpec(joint.name, joint.unit, 'absolute') for joint in robot.joints),
        step_time_s=step_time_s,
        denoise_steps=_DENOISE_STEPS,
        prompt=PromptFormat(template='pi05_state', cleaning='openpi', advantage='before_action'),
        normalisation=NormalisationSpec(state='quantiles_openpi', actions='quantiles_openpi'),
        tokenizer='tokenizer.json',
    )


def _weights(seed: int) -> dict[str, np.ndarray]:
    """Random weights of an expert that does not see its noise, so that its rows are smooth."""
    network = random_network('pi05', _DIMS, 'cpu', 'float32', seed)
    weights = {name: value.numpy() for name, value in network.state_dict().items()}
    weights['action_in.weight'] = np.zeros_like(weights['action_in.weight'])
    weights['action_out.weight'] = _GAIN * weights['action_out.weight']
    return weights


def write_policy(folder: Path, robot: Robot, step_time_s: float, seed: int) -> Path:
    """Write the bundle to `folder`, which must not exist yet.

    The statistics are made such that the mean action is `home`.
    """
    # Threads that spin lose tenfold on a busy machine.
    torch.set_num_threads(1)
    spec, weights = _spec(robot, step_time_s), _weights(seed)
    centre, half = home(robot), _half_range(robot)
    lower, upper = (np.array([getattr(j, key) for j in robot.joints]) for key in ('lower', 'upper'))
    statistics = {'state.q01': lower, 'state.q99': upper}

    def write(where: Path, offset: np.ndarray) -> None:
        actions = {
            'actions.q01': centre - ROW_NOISE * half * (1.0 + offset),
            'actions.q99': centre + ROW_NOISE * half * (1.0 - offset),
        }
        write_bundle(
            where, spec, weights=weights, statistics=statistics | actions, tokenizer=_TOKENIZER
        )

    with tempfile.TemporaryDirectory() as draft:
        write(Path(draft) / 'bundle', np.zeros(len(centre)))
        offset = _mean_action(Path(draft) / 'bundle', centre, half, seed)
    write(folder, offset)
    return folder


def _mean_action(bundle: Path, centre: np.ndarray, half: np.ndarray, seed: int) -> np.ndarray:
    """(joints,) mean normalised action over random observations."""
    random = np.random.default_rng(seed)
    policy = Policy.load(bundle, threads=1, verify=False)
    means = []
    for _ in range(_LOOKS):
        images = {
            name: random.integers(0, 256, (480, 640, 3), dtype=np.uint8)
            for name in policy.spec.camera_names
        }
        state = centre + half * random.uniform(-0.5, 0.5, len(half))
        chunk, _ = policy.infer(Observation(images, state.astype(np.float32), INSTRUCTION))
        means.append(((chunk.actions - centre) / (ROW_NOISE * half)).mean(axis=0))
    policy.close()
    return np.mean(means, axis=0)
