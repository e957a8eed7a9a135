"""Diffusion Policy (arXiv 2303.04137), small and with one task.

It reads no instruction and learns to touch the red block. The data's frames are not consecutive
steps, so it sees one frame and no history.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from vla_runtime.declarations.diffusion import DiffusionDims, UNetDims
from vla_runtime.family.dimensions import ResNetDims
from vla_runtime.family.noise_schedule import NoiseScheduler
from vla_runtime.models.diffusion import Diffusion, EncodedVision
from vla_tabletop.sim.expert import HORIZON
from vla_tabletop.sim.scene import CAMERAS
from vla_tabletop.sim.world import JOINT_NAMES
from vla_tabletop.training.recipes.recipe import Prefix, Recipe
from vla_tabletop.training.samples import IMAGE_SIZE, TaskMix

_KEYPOINTS = 32
# Quantiles are 1 in normalised actions: further out lies a chunk in a hundred.
_MOST = 2.0


def diffusion_dims(vocabulary: int) -> DiffusionDims:
    """A policy of about 2 million parameters; its map has a cell for every `PATCH_SIZE` pixels."""
    return DiffusionDims(
        backbone=ResNetDims(
            stem=16,
            channels=(16, 16, 32, 32),
            blocks=(1, 1, 1, 1),
            bottleneck=True,
            dilated=True,
            norm='group',
        ),
        keypoints=_KEYPOINTS,
        separate_encoders=False,
        image=(IMAGE_SIZE, IMAGE_SIZE),
        unet=UNetDims(channels=(32, 64, 128), kernel_size=5, groups=8, time_width=64, scaled=True),
        scheduler=NoiseScheduler('ddpm', 100, 'squaredcos_cap_v2', 1e-4, 0.02, clip=_MOST),
        cameras=len(CAMERAS),
        observation_steps=1,
        horizon=HORIZON,
        real_horizon=HORIZON,
        action_dim=len(JOINT_NAMES),
        state_dim=len(JOINT_NAMES),
    )


@torch.no_grad()
def initialise(network: Diffusion, number_tokens: np.ndarray, generator: torch.Generator) -> None:
    """Set the starting weights in place: convolutions of images as He, arXiv 1502.01852."""
    for module in network.vision.modules():
        if isinstance(module, nn.Conv2d):
            fan_in = module.weight[0].numel()
            noise = torch.randn(module.weight.shape, generator=generator)
            module.weight.copy_(noise * (2.0 / fan_in) ** 0.5)


def see_map(network: Diffusion, images: Tensor) -> Tensor:
    """The feature map as tokens (n, cells, channels) of images (n, 3, S, S)."""
    return _map(_vision(network), images).flatten(2).transpose(1, 2)


def encode_prefix(network: Diffusion, pixels: Tensor, rows: Mapping[str, Tensor]) -> Prefix:
    """One forward for all objectives; what the U-Net is modulated by is what the heads read."""
    batch, cameras = pixels.shape[:2]
    vision = _vision(network)
    maps = _map(vision, pixels.flatten(0, 1))
    features = vision.encoder.features(maps).unflatten(0, (batch, 1, cameras))
    observation = network.observation(features, rows['state'][:, None])
    past = {'modulation': network.unet.observed_modulation(observation)}
    images = maps.flatten(2).transpose(1, 2).unflatten(0, (batch, cameras))
    return Prefix(past, images, observation)


def _vision(network: Diffusion) -> EncodedVision:
    assert isinstance(network.vision, EncodedVision)
    return network.vision


def _map(vision: EncodedVision, images: Tensor) -> Tensor:
    """Feature maps (n, channels, h', w') of images (n, 3, S, S)."""
    maps: Tensor = vision.encoder.backbone(vision.framing(images))
    return maps


_DIMS = diffusion_dims(0)

RECIPE = Recipe(
    name='diffusion',
    title='tabletop demo, Diffusion Policy: touch the red block',
    dims=diffusion_dims,
    steps={'see': 150, 'ground': 150, 'act': 1300},
    draws=1,
    tasks=TaskMix({'colour': 1.0}, colours=('red',)),
    prompt=None,
    initialise=initialise,
    prefix=encode_prefix,
    denoise_steps=100,
    half=True,
    see=see_map,
    image_width=_DIMS.backbone.width,
    last_width=lambda dims: int(dims.step_width),
)
