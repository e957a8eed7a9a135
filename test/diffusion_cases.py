"""Loads the network cases of Diffusion Policy (test/cases/README.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from network_cases import load_case
from sampled_cases import SampledCase, scheduler_of_case
from torch import Tensor

from vla_convert.readers.diffusion import NAMES
from vla_runtime.declarations.diffusion import DiffusionDims, UNetDims
from vla_runtime.family.dimensions import ResNetDims
from vla_runtime.models.diffusion import Diffusion


@dataclass(frozen=True)
class DiffusionCase(SampledCase):
    """A case of Diffusion Policy, and our network with its weights."""

    network: Diffusion

    def rows(self, b: int) -> dict[str, Tensor]:
        """States of all steps, those of the environment behind them, (1, T, S)."""
        parts = [self.tensors[name] for name in ('state', 'env_state') if name in self.tensors]
        return {'state': torch.cat([part[b : b + 1] for part in parts], dim=2)}


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
    return load_case(path, DiffusionCase, 'diffusion', dims_of_case, NAMES)
