"""Diffusion Policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusion_cases import load_diffusion_case
from reference_cases import find
from safetensors.torch import load_file
from torch import Tensor

from family_contracts.declaration import Case, FamilyContract, Fault, Folder, Patched, Recorded
from family_contracts.robot import CAMERAS, IMAGE_SIZE, JOINTS, numbered
from vla_convert.checkpoints.lerobot_folder import with_earlier_frames
from vla_convert.checkpoints.options import ExportOptions
from vla_runtime.bundle.schema import BundleSpec, ImageSpec, earlier_name
from vla_runtime.declarations.diffusion import DiffusionDims, UNetDims
from vla_runtime.family.dimensions import ResNetDims
from vla_runtime.family.noise_schedule import NoiseScheduler
from vla_runtime.models import diffusion as networks
from vla_runtime.models.base import diffusion_network
from vla_runtime.models.blocks import resize
from vla_runtime.models.blocks.resize import crop_middle
from vla_runtime.types import Observation


def tiny(horizon: int) -> DiffusionDims:
    return DiffusionDims(
        backbone=ResNetDims(16, (16, 16, 32, 16), (1, 2, 1, 1), norm='group'),
        keypoints=5,
        separate_encoders=False,
        image=IMAGE_SIZE,
        crop=(44, 60),
        unet=UNetDims(channels=(16, 24), kernel_size=3, groups=8, time_width=12, scaled=True),
        scheduler=NoiseScheduler('ddpm', 20, 'linear', 1e-3, 0.2, clip=4.0),
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
        rows=found.rows(b),
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


_POINTS, _BLOCK = networks.Keypoints.forward, networks.ResidualBlock.forward
_OBSERVATION, _FEATURES = networks.Diffusion.observation, networks.Diffusion.image_features
_ADVANCE, _TIME_CODE = diffusion_network.advance, networks.time_code


def middle_off_by_one(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    return crop_middle(pixels.roll(1, dims=-1), size)


def down_before_across(self: networks.Keypoints, features: Tensor) -> Tensor:
    return _POINTS(self, features).flip(-1)


def brightest_place(self: networks.Keypoints, features: Tensor) -> Tensor:
    maps = self.maps(features).flatten(2)
    return (100.0 * maps).softmax(dim=-1) @ self.grid.to(maps.device)


def newest_state_first(self: networks.Diffusion, features: Tensor, state: Tensor) -> Tensor:
    return _OBSERVATION(self, features, state.flip(1))


def newest_image_first(self: networks.Diffusion, tokens: Tensor, mask: Tensor) -> Tensor:
    return _FEATURES(self, tokens, mask).flip(0)


def images_before_state(self: networks.Diffusion, features: Tensor, state: Tensor) -> Tensor:
    width = self.dims.state_dim
    steps = _OBSERVATION(self, features, state).unflatten(1, (self.dims.observation_steps, -1))
    return torch.cat([steps[..., width:], steps[..., :width]], dim=2).flatten(1)


def modulated(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A residual block whose modulation is a wrong one."""

    def forward(self: networks.ResidualBlock, x: Tensor, modulation: Tensor) -> Tensor:
        return _BLOCK(self, x, change(modulation))

    return forward


def one_more(modulation: Tensor) -> Tensor:
    scale, shift = modulation.chunk(2, dim=1)
    return torch.cat([scale + 1, shift], dim=1)


def shift_before_scale(modulation: Tensor) -> Tensor:
    return torch.cat(modulation.chunk(2, dim=1)[::-1], dim=1)


def updated(*places: int, value: float = 0.0) -> Callable[..., Tensor]:
    """The scheduler's update with other numbers at these places."""

    def advance(x: Tensor, predicted: Tensor, update: Tensor, *rest: Tensor) -> Tensor:
        for place in places:
            before, after = update[:place], update[place + 1 :]
            update = torch.cat([before, torch.full_like(update[:1], value), after])
        return _ADVANCE(x, predicted, update, *rest)

    return advance


def turned_code(times: Tensor, width: int) -> Tensor:
    return torch.cat(_TIME_CODE(times, width).chunk(2, dim=1)[::-1], dim=1)


def faults() -> Mapping[str, Fault]:
    vision: dict[str, Any] = {
        'crop off by one': (resize, 'crop_middle', middle_off_by_one),
        'down before across': (networks.Keypoints, 'forward', down_before_across),
        'the brightest place alone': (networks.Keypoints, 'forward', brightest_place),
    }
    prefix: dict[str, Any] = {
        'newest state first': (networks.Diffusion, 'observation', newest_state_first),
        'newest image first': (networks.Diffusion, 'image_features', newest_image_first),
        'images before the state': (networks.Diffusion, 'observation', images_before_state),
    }
    expert: dict[str, Any] = {
        'one plus the scale': (networks.ResidualBlock, 'forward', modulated(one_more)),
        'shift before scale': (networks.ResidualBlock, 'forward', modulated(shift_before_scale)),
        'clean actions not clipped': (diffusion_network, 'advance', updated(3, value=1e9)),
        'no noise in a step': (diffusion_network, 'advance', updated(8)),
        'no plan': (diffusion_network, 'advance', updated(7)),
        'x forgotten': (diffusion_network, 'advance', updated(5)),
    }
    files = {'vision.onnx': vision, 'prefix.onnx': prefix, 'expert.onnx': expert}
    return {
        name: Patched(*planted, file, quick=number == 0)  # type: ignore[arg-type]
        for file, of_file in files.items()
        for number, (name, planted) in enumerate(of_file.items())
    } | {
        'cosines before sines': Patched(
            networks, 'time_code', turned_code, 'time table', quick=True
        )
    }


def with_history(spec: BundleSpec) -> BundleSpec:
    """The tiny policy with two steps of the observation."""
    dims = replace(spec.dims, cameras=4, observation_steps=2, real_horizon=7)
    return replace(spec, cameras=with_earlier_frames(spec.cameras, 2), dims=dims)


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
        # A hundred steps add up their roundings.
        bound=1e-4,
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
        faults=faults,
        fault_spec=with_history,
        folders=folders,
    ),
)
