"""ACT (arXiv 2304.13705), small, without its variational encoder, and with one task.

ACT reads no instruction, so it learns one: touch the red block. Its variational encoder would
separate different demonstrations of the same observation, which this expert hardly gives. So it is
trained without (LeRobot's `use_vae: false`), by the L1 loss; the latent token stays constant, as
in serving.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from vla_runtime.declarations.act import ActDims, StackDims
from vla_runtime.family.dimensions import ResNetDims
from vla_runtime.models.act import Act
from vla_runtime.models.blocks.resnet import Block, ConvNorm
from vla_tabletop.sim.expert import HORIZON
from vla_tabletop.sim.scene import CAMERAS
from vla_tabletop.sim.world import JOINT_NAMES
from vla_tabletop.training.recipes.recipe import WIDTH, Prefix, Recipe, values_of_last_layer
from vla_tabletop.training.samples import TaskMix
from vla_tabletop.training.world import IMAGE_SIZE


def act_dims(vocabulary: int) -> ActDims:
    """An ACT of about 0.7 million parameters; its map has a cell for every `PATCH_SIZE` pixels."""
    stack = StackDims(width=WIDTH, depth=3, num_heads=4, mlp_dim=256)
    return ActDims(
        backbone=ResNetDims(
            stem=16,
            channels=(8, 16, 24, 48),
            blocks=(1, 1, 1, 1),
            bottleneck=True,
            dilated=True,
        ),
        encoder=stack,
        decoder=stack,
        cameras=len(CAMERAS),
        images=((IMAGE_SIZE, IMAGE_SIZE),),
        horizon=HORIZON,
        action_dim=len(JOINT_NAMES),
        state_dim=len(JOINT_NAMES),
        pre_norm=True,
    )


@torch.no_grad()
def initialise(network: Act, number_tokens: np.ndarray, generator: torch.Generator) -> None:
    """Set the starting weights in place.

    The backbone's norms do not normalise, so its convolutions do (He, arXiv 1502.01852), and a
    block begins as its shortcut. Positions alone distinguish a chunk's steps.
    """
    for module in network.vision.backbone.modules():
        if isinstance(module, nn.Conv2d):
            fan_in = module.weight[0].numel()
            noise = torch.randn(module.weight.shape, generator=generator)
            module.weight.copy_(noise * (2.0 / fan_in) ** 0.5)
        elif isinstance(module, Block):
            last = module.convolutions[-1]
            assert isinstance(last, ConvNorm)
            last.norm.weight.zero_()
    for positions in (network.vector_positions, network.action_positions, network.latent):
        positions.copy_(torch.randn(positions.shape, generator=generator))


def encode_prefix(network: Act, pixels: Tensor, rows: Mapping[str, Tensor]) -> Prefix:
    """One encoder forward for all objectives; the latent token is the one that the heads read."""
    batch, cameras = pixels.shape[:2]
    image_tokens = network.vision(pixels.flatten(0, 1)).unflatten(0, (batch, cameras))
    everyone = torch.ones(cameras, dtype=torch.bool, device=pixels.device)
    past = network.prefix(image_tokens, everyone, **rows)
    values = values_of_last_layer(past)
    images = values[:, network.dims.vector_tokens :].unflatten(1, (cameras, -1))
    return Prefix(past, images, values[:, 0])


RECIPE = Recipe(
    name='act',
    title='tabletop demo, ACT: touch the red block',
    dims=act_dims,
    steps={'see': 500, 'ground': 400, 'act': 3000},
    draws=1,
    tasks=TaskMix({'colour': 1.0}, colours=('red',)),
    prompt=None,
    initialise=initialise,
    prefix=encode_prefix,
    denoise_steps=1,
    half=True,
)
