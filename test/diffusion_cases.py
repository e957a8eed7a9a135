"""Loads the network cases of Diffusion Policy (test/cases/README.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from network_cases import ReferenceCase, our_weights
from safetensors.torch import load_file
from torch import Tensor

from vla_runtime.families.blocks.resnet_dimensions import ResNetDims
from vla_runtime.families.diffusion.checkpoint import NAMES
from vla_runtime.families.diffusion.dimensions import DiffusionDims, UNetDims
from vla_runtime.families.diffusion.networks import Diffusion
from vla_runtime.families.flow_network import build_network
from vla_runtime.family.noise_schedule import NoiseScheduler


@dataclass(frozen=True)
class Sampling:
    """One run of the scheduler that a case recorded; `prefix` begins the names of its tensors."""

    name: str
    prefix: str
    scheduler: NoiseScheduler
    steps: int


@dataclass(frozen=True)
class DiffusionCase(ReferenceCase):
    """A case of Diffusion Policy, and our network with its weights."""

    network: Diffusion

    @property
    def cameras(self) -> range:
        return range(self.description['cameras'])

    @property
    def samplings(self) -> tuple[Sampling, ...]:
        """The case's own run of the scheduler, and those under other settings."""
        return samplings_of(self.description)

    def pixels(self, b: int) -> Tensor:
        """Normalised images of batch entry b, (V, 3, height, width), the newest step first."""
        steps = self.description['n_obs_steps']
        return torch.stack(
            [
                self._image(camera)[b, step]
                for step in reversed(range(steps))
                for camera in self.cameras
            ]
        )

    def _image(self, camera: int) -> Tensor:
        """Images of a camera (B, T, 3, height, width), normalised by the case's statistics."""
        statistics = self.description['statistics'][f'observation.images.cam{camera}']
        mean, std = (torch.tensor(statistics[name])[:, None, None] for name in ('mean', 'std'))
        raw = self.tensors[f'raw_image_{camera}'].permute(0, 1, 4, 2, 3).float() / 255
        mode = self.description['normalization']['VISUAL']
        if mode == 'MEAN_STD':
            return (raw - mean) / (std + 1e-8)
        assert mode == 'IDENTITY'
        return raw

    def state(self, b: int) -> Tensor:
        """States of all steps, those of the environment behind them, (1, T, S)."""
        parts = [self.tensors[name] for name in ('state', 'env_state') if name in self.tensors]
        return torch.cat([part[b : b + 1] for part in parts], dim=2)

    def visible(self) -> Tensor:
        """A mask (V,) that hides nothing."""
        return torch.ones(self.network.dims.cameras, dtype=torch.bool)

    def image_tokens(self, b: int) -> Tensor:
        """Image tokens of all images as an engine holds them, (V, N, W)."""
        return self.network.vision(self.pixels(b))

    def prefix(self, b: int) -> Mapping[str, Tensor]:
        """Outputs of the prefix network for batch entry b."""
        return self.network.prefix(self.image_tokens(b), self.visible(), state=self.state(b))

    def step_noise(self, sampling: Sampling, b: int) -> np.ndarray:
        """Noise of every step (N, H, A); zeros where none is drawn."""
        found = self.tensors.get(f'{sampling.prefix}step_noise')
        dims = self.network.dims
        if found is None or not found.numel():
            return np.zeros((sampling.steps, dims.horizon, dims.action_dim), np.float32)
        return found[:, b].numpy()


def scheduler_of_case(d: Mapping[str, Any]) -> NoiseScheduler:
    """Our scheduler of a case's description."""
    return NoiseScheduler(
        kind=d['noise_scheduler_type'].lower(),
        train_steps=d['num_train_timesteps'],
        betas=d['beta_schedule'],
        beta_start=d['beta_start'],
        beta_end=d['beta_end'],
        prediction=d['prediction_type'],
        clip=d['clip_sample_range'] if d['clip_sample'] else None,
    )


def samplings_of(d: Mapping[str, Any]) -> tuple[Sampling, ...]:
    """Runs of the scheduler that a case recorded; those of a flow are left out."""

    def sampling(name: str, changes: Mapping[str, Any]) -> Iterator[Sampling]:
        own = {**d, **changes}
        if own.get('objective', 'diffusion') == 'diffusion':
            steps = own['num_inference_steps'] or own['num_train_timesteps']
            prefix = f'sampler_{name}.' if name else ''
            yield Sampling(name or 'own', prefix, scheduler_of_case(own), steps)

    others = [one for other in d['samplers'] for one in sampling(other['name'], other)]
    return (*sampling('', {}), *others)


def dims_of_case(d: Mapping[str, Any]) -> DiffusionDims:
    """Our dimensions of a case's description."""
    # What no policy changes is a constant of the networks.
    assert (d['norm_eps'], d['final_conv_n_groups']) == (1e-5, 8)
    bottleneck = d['resnet'] >= 50
    expansion = 4 if bottleneck else 1
    resize, crop = d['resize_shape'], d['crop_shape_used']
    first, last = d['actions_returned']
    assert first == d['n_obs_steps'] - 1
    return DiffusionDims(
        backbone=ResNetDims(
            stem=64 // d['width_divisor'],
            channels=tuple(width // expansion for width in d['backbone_widths']),  # type: ignore[arg-type]
            blocks=tuple(d['backbone_blocks']),
            bottleneck=bottleneck,
            norm='group' if d['use_group_norm'] else 'batch',
        ),
        keypoints=d['spatial_softmax_num_keypoints'],
        separate_encoders=d['use_separate_rgb_encoder_per_camera'],
        image=tuple(d['image']),
        resize=tuple(resize) if resize else None,
        crop=tuple(crop) if crop else None,
        unet=UNetDims(
            channels=tuple(d['down_dims']),
            kernel_size=d['kernel_size'],
            groups=d['n_groups'],
            time_width=d['diffusion_step_embed_dim'],
            scaled=d['use_film_scale_modulation'],
        ),
        scheduler=scheduler_of_case(d),
        cameras=d['cameras'] * d['n_obs_steps'],
        observation_steps=d['n_obs_steps'],
        horizon=d['horizon'],
        real_horizon=last - first,
        action_dim=d['action_dim'],
        state_dim=d['state_dim'] + d['env_state_dim'],
        environment_dim=d['env_state_dim'],
    )


@lru_cache(maxsize=4)
def load_diffusion_case(path: Path) -> DiffusionCase:
    """Read a case and load its weights under our names, every one of them."""
    description = json.loads(path.read_text())
    network = build_network('diffusion', dims_of_case(description))
    assert isinstance(network, Diffusion)
    network.load_state_dict(our_weights(path, NAMES))
    network.eval().requires_grad_(False)
    return DiffusionCase(description, load_file(path.with_suffix('.case.safetensors')), network)
