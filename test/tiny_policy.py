"""Tiny policies with random weights, as real bundles on disk."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from family_contracts import contract_of, contracts
from family_contracts.robot import CAMERAS, CASES, IMAGE_SIZE, JOINTS, places_of
from made_once import made_once
from written_bundle import write_bundle

from vla_convert.checkpoints.lerobot_folder import with_earlier_frames
from vla_runtime.bundle.schema import (
    PACKED,
    ActionSpec,
    BundleSpec,
    CameraSpec,
    NormalisationSpec,
    PoseSpec,
    StateSpec,
)
from vla_runtime.bundle.statistics import image_group
from vla_runtime.family.listing import find_family
from vla_runtime.family.ternary_weights import pack
from vla_runtime.models.base.flow_network import build_network
from vla_runtime.processing.prompts import PromptFormat
from vla_runtime.types import ROTATION_LENGTH, AdvantageTemplate, Observation, RotationForm

TOKENIZER = CASES / 'lerobot_pi05_tiny' / 'tokenizer.json'
# Families whose heads give numbers, not tokens.
TINY_FAMILIES = tuple(name for name in contracts() if find_family(name).head != 'tokens')
# Families that the self-test's policies are of. Random weights of pi0-FAST write no chunk.
TRIED_FAMILIES = tuple(name for name in contracts() if name != 'pi0_fast')


def tokenizer_of(family: str) -> Path:
    """A vocabulary in the family's layout."""
    return CASES / contract_of(family).tokenizer


def tiny_dims(family: str, horizon: int = 8) -> Any:
    """Sizes of a tiny policy, the same to whoever looks at observations and actions."""
    return contract_of(family).tiny(horizon)


def tiny_spec(
    family: str = 'pi05',
    *,
    advantage: AdvantageTemplate | None = None,
    delta: bool = False,
) -> BundleSpec:
    contract, takes_steps = contract_of(family), find_family(family).takes_steps
    prompt = contract.template and PromptFormat(
        template=contract.template, cleaning='lerobot', advantage=advantage
    )
    return BundleSpec(
        name=f'tiny {family}',
        family=family,
        dims=tiny_dims(family),
        cameras=tuple(CameraSpec(name) for name in CAMERAS),
        images=contract.images,
        state=tuple(StateSpec(name, 'rad') for name in JOINTS),
        actions=tuple(
            ActionSpec(name, 'rad', 'delta', relative_to=name)
            if delta and name != 'gripper'
            else ActionSpec(name, 'rad', 'absolute')
            for name in JOINTS
        ),
        step_time_s=0.05,
        denoise_steps=3 if takes_steps else 1,
        prompt=prompt or None,
        normalisation=NormalisationSpec(
            state='quantiles_lerobot',
            actions='mean_std_lerobot',
            images='mean_std_lerobot' if contract.images_normalised else None,
        ),
        tokenizer='tokenizer.json' if prompt else None,
    )


def aloha_spec() -> BundleSpec:
    """A pi0.5 policy of openpi for ALOHA's 14 joints, arms as deltas, in pi's joint space."""
    names = tuple(f'{side}{joint}' for side in 'lr' for joint in (*range(1, 7), 'g'))
    spec = tiny_spec()
    units = tuple('1' if name.endswith('g') else 'rad' for name in names)
    return replace(
        spec,
        dims=replace(spec.dims, action_dim=16),
        state=tuple(StateSpec(name, unit) for name, unit in zip(names, units, strict=True)),
        actions=tuple(
            ActionSpec(name, unit, 'absolute')
            if unit == '1'
            else ActionSpec(name, unit, 'delta', relative_to=name)
            for name, unit in zip(names, units, strict=True)
        ),
        joint_space='openpi_aloha',
    )


def history_spec(steps: int = 2, family: str = 'diffusion', **changes: Any) -> BundleSpec:
    """A policy that sees the frames and states of several steps."""
    spec = tiny_spec(family)
    dims = replace(
        spec.dims,
        cameras=steps * len(CAMERAS),
        observation_steps=steps,
        real_horizon=spec.dims.horizon - steps + 1,
        **changes,
    )
    return replace(spec, cameras=with_earlier_frames(spec.cameras, steps), dims=dims)


def two_frames_spec(steps_ago: int = 4) -> BundleSpec:
    """A policy that sees an earlier frame of every camera, then the newest of each."""
    spec = tiny_spec('groot_n17')
    earlier = (CameraSpec(f'{name}_before', frame_of=name, steps_ago=steps_ago) for name in CAMERAS)
    places = places_of('groot_n17', contract_of('groot_n17').tokenizer, 2 * len(CAMERAS))
    dims = replace(
        spec.dims,
        cameras=2 * len(CAMERAS),
        image_places=places,
        prompt_length=places[-1] + 64,
    )
    return replace(spec, cameras=(*earlier, *spec.cameras), dims=dims)


def pose_spec(form: RotationForm) -> BundleSpec:
    """A policy whose actions are one end-effector pose, relative to the measured one."""
    width = ROTATION_LENGTH[form]
    position, rotation = ('x', 'y', 'z'), tuple(f'r{i}' for i in range(width))
    names = (*position, *rotation)
    spec = tiny_spec()
    return replace(
        spec,
        dims=replace(spec.dims, action_dim=12),
        state=tuple(StateSpec(name, 'm' if name in position else '1') for name in names),
        actions=tuple(
            ActionSpec(name, 'm' if name in position else '1', 'delta') for name in names
        ),
        poses=(
            PoseSpec(
                name='hand',
                position=position,
                rotation=rotation,
                form=form,
                kind='delta',
                frame='base',
                state_position=position,
                state_rotation=rotation,
            ),
        ),
    )


def tiny_statistics(
    spec: BundleSpec, seed: int = 0, action_scale: float = 1.0
) -> dict[str, np.ndarray]:
    """Statistics of a tiny policy's joints, actions and images."""
    random = np.random.default_rng(seed)
    count = len(spec.actions)
    statistics = {
        'state.q01': np.full(len(spec.state), -1.5),
        'state.q99': np.full(len(spec.state), 1.5),
        'actions.mean': action_scale * random.normal(size=count) * 0.1,
        'actions.std': action_scale * random.uniform(0.2, 1.0, size=count),
    }
    if spec.normalisation.images is not None:
        for name in (camera.name for camera in spec.cameras if camera.frame_of is None):
            statistics[f'{image_group(name)}.mean'] = random.uniform(0.4, 0.6, 3)
            statistics[f'{image_group(name)}.std'] = random.uniform(0.2, 0.3, 3)
    return statistics


def write_tiny_policy(
    target: Path, spec: BundleSpec, seed: int = 0, action_scale: float = 1.0
) -> Path:
    """Write a bundle with random weights of a size that makes everything matter.

    Zero-initialised modulations would make the expert the identity, so every weight is drawn.
    `action_scale` makes all actions smaller, for a robot that moves by them. A test run draws and
    seals each policy once, and copies it.
    """

    def draw(folder: Path) -> None:
        _draw_tiny_policy(folder, spec, seed, action_scale)

    if 'VLA_RUNTIME_TEST_SCRATCH' in os.environ:
        drawn = hashlib.sha256(repr((spec, seed, action_scale)).encode()).hexdigest()
        # As if it was written now: what was remembered of a file goes by its time.
        shutil.copytree(made_once(f'tiny_{drawn}', draw), target, copy_function=shutil.copyfile)
    else:
        draw(target)
    return target


def _draw_tiny_policy(target: Path, spec: BundleSpec, seed: int, action_scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    network = build_network(spec.family, spec.dims)
    norms_pass = contract_of(spec.family).norms_pass
    weights = {
        name: (torch.randn(value.shape, generator=generator) * 0.2).numpy()
        for name, value in network.state_dict().items()
    }
    for name in weights:
        if name.endswith(PACKED):
            outputs, width = weights[name].shape
            drawn = torch.randint(-1, 2, (outputs, 4 * width), generator=generator)
            weights[name] = pack(drawn.to(torch.int8).numpy())
        elif name.endswith(('.weight_scale', 'running_var')):
            weights[name] = np.abs(weights[name]) + 0.1
        elif norms_pass and 'norm' in name and name.endswith('.weight'):
            weights[name] = weights[name] + 1.0
    statistics = tiny_statistics(spec, seed, action_scale)
    tokenizer = tokenizer_of(spec.family) if spec.tokenizer else None
    write_bundle(
        target,
        spec,
        weights=weights,
        statistics=statistics,
        tokenizer=tokenizer,
        files={name: CASES / of for name, of in contract_of(spec.family).files.items()},
    )


def observation(seed: int = 0, **changes) -> Observation:
    """A seeded observation of the tiny policies' robot."""
    random = np.random.default_rng(seed)
    values = {
        'images': {
            name: random.integers(0, 256, (*IMAGE_SIZE, 3), dtype=np.uint8) for name in CAMERAS
        },
        'state': random.uniform(-1, 1, len(JOINTS)).astype(np.float32),
        'instruction': 'pick up the red cup',
    }
    return Observation(**{**values, **changes})
