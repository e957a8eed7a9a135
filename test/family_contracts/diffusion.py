"""Diffusion Policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from diffusion_cases import load_diffusion_case
from reference_cases import find
from safetensors.torch import load_file

from family_contracts.declaration import Case, FamilyContract, Folder, Recorded
from family_contracts.robot import CAMERAS, IMAGE_SIZE, JOINTS, numbered
from vla_runtime.bundle.schema import ImageSpec, earlier_name
from vla_runtime.checkpoints.options import ExportOptions
from vla_runtime.families.blocks.resnet_dimensions import ResNetDims
from vla_runtime.families.diffusion.dimensions import DiffusionDims, UNetDims
from vla_runtime.family.noise_schedule import NoiseScheduler
from vla_runtime.types import Observation


def tiny(horizon: int) -> DiffusionDims:
    return DiffusionDims(
        backbone=ResNetDims(16, (16, 16, 32, 16), (1, 2, 1, 1), norm='group'),
        keypoints=5,
        separate_encoders=False,
        image=IMAGE_SIZE,
        crop=(44, 60),
        unet=UNetDims(channels=(16, 24), kernel_size=3, groups=8, time_width=12, scaled=True),
        scheduler=NoiseScheduler('ddpm', 20, 'squaredcos_cap_v2', 1e-4, 0.02, clip=1.5),
        cameras=len(CAMERAS),
        observation_steps=1,
        horizon=horizon,
        real_horizon=horizon,
        action_dim=len(JOINTS),
        state_dim=len(JOINTS),
    )


def case(path: Path, b: int) -> Case:
    found = load_diffusion_case(path)
    of, steps, cameras = found.tensors, found.description['n_obs_steps'], found.cameras
    features: list[Any] = []
    if found.network.encoders is None:
        features = [
            of[f'camera_features_{camera}'][b, at][None]
            for at in reversed(range(steps))
            for camera in cameras
        ]
    return Case(
        network=found.network,
        steps=found.samplings[0].steps,
        pixels=list(found.pixels(b)),
        image_mask=found.visible(),
        rows={'state': found.state(b)},
        noise=of['noise'][b],
        actions=of['trajectory'][b],
        image_tokens=features,
    )


_TINY = tiny(8)
VARIANTS = {
    'encoders for each camera': replace(_TINY, separate_encoders=True),
    'batch norms': replace(_TINY, backbone=replace(_TINY.backbone, norm='batch')),
    'an environment': replace(_TINY, state_dim=5, environment_dim=2),
    'resized, all of it seen': replace(_TINY, resize=(40, 37), crop=None),
    'three steps': replace(_TINY, cameras=6, observation_steps=3, real_horizon=6),
    'shifts alone': replace(_TINY, unet=replace(_TINY.unet, scaled=False)),
    'ddim on samples': replace(
        _TINY, scheduler=NoiseScheduler('ddim', 9, 'linear', 1e-4, 0.02, 'sample')
    ),
}


def folders() -> Mapping[str, Callable[[Path], Folder]]:
    return {
        path.name.removesuffix('.end_to_end.json'): partial(folder, path)
        for path in find('diffusion_folder*.end_to_end.json')
    }


def folder(path: Path, target: Path) -> Folder:
    description, of = json.loads(path.read_text()), load_file(path.with_suffix('.safetensors'))
    own = path.with_name(path.name.removesuffix('.end_to_end.json'))
    steps = json.loads((own / 'config.json').read_text())['n_obs_steps']

    def state(i: int) -> np.ndarray:
        names = (f'state_{i}', f'environment_state_{i}')
        return np.concatenate([of[name].numpy() for name in names if name in of])

    def seen(i: int) -> Observation:
        first = max(at for at in description['episodes_begin_at'] if at <= i)
        # The first observation of an episode stands for those before it.
        at = [max(first, i - ago) for ago in range(steps)]
        return Observation(
            images={
                earlier_name(name, ago) if ago else name: of[f'{name}_{at[ago]}'].numpy()
                for ago in range(steps)
                for name in description['cameras']
            },
            state=state(i),
            instruction='',
            earlier_states=[state(at[ago]) for ago in range(1, steps)],
        )

    noise = of['noise'].numpy()[0]
    if of.get('step_noise') is not None and of['step_noise'].numel():
        # The noise of a chunk, and that of its steps but the last.
        noise = np.concatenate([of['noise'].numpy(), of['step_noise'].numpy()[:-1, 0]])
    return Folder(
        path=own,
        options=ExportOptions(
            state_names=numbered('state', len(state(0))),
            action_names=numbered('action', of['chunk_0'].shape[1]),
            units=('1',),
            rate_hz=10.0,
        ),
        recorded=[
            Recorded(
                seen=seen(i),
                noise=noise,
                normalised=of[f'trajectory_normalised_{i}'],
                actions=of[f'chunk_{i}'],
                state=of.get(f'state_normalised_{i}'),
            )
            for i in range(description['observations'])
        ],
    )


CONTRACTS = (
    FamilyContract(
        family='diffusion',
        tiny=tiny,
        case=case,
        images=ImageSpec('none', 'none'),
        images_normalised=True,
        norms_pass=True,
        parameters={'diffusion': 262_709_044},
        past=lambda dims: {'modulation': (1, sum(dims.unet.modulations))},
        variants=VARIANTS,
        refused={
            'horizon': lambda dims: replace(dims, horizon=7),
            'real_horizon': lambda dims: replace(dims, real_horizon=9),
            'observation_steps': lambda dims: replace(dims, observation_steps=3),
            'crop': lambda dims: replace(dims, crop=(49, 60)),
            'environment_dim': lambda dims: replace(dims, environment_dim=3),
            'unet.groups|groups': lambda dims: replace(dims, unet=replace(dims.unet, groups=5)),
            'unet.kernel_size': lambda dims: replace(dims, unet=replace(dims.unet, kernel_size=4)),
            'scheduler.train_steps': lambda dims: replace(
                dims, scheduler=replace(dims.scheduler, train_steps=0)
            ),
            'norm group': lambda dims: replace(dims, backbone=replace(dims.backbone, stem=12)),
        },
        folders=folders,
    ),
)
