"""pi0.5 (arXiv 2504.16054): the policy that ships with the package."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from vla_runtime.declarations.pi import PiDims
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.models.blocks.attention import attend, rotary
from vla_runtime.models.blocks.layers import AdaptiveNorm, normalise_rms
from vla_runtime.models.pi import Pi05, PiNetwork
from vla_tabletop.sim.expert import HORIZON
from vla_tabletop.sim.scene import CAMERAS
from vla_tabletop.sim.world import JOINT_NAMES
from vla_tabletop.training.recipes.initialisation import (
    initialise_numbers,
    initialise_patches,
    initialise_text,
)
from vla_tabletop.training.recipes.recipe import WIDTH, Prefix, Recipe
from vla_tabletop.training.samples import PATCH_SIZE, TaskMix
from vla_tabletop.training.vocabulary import PROMPT_FORMAT, PROMPT_LENGTH
from vla_tabletop.training.world import IMAGE_SIZE


def pi05_dims(vocabulary: int) -> PiDims:
    """A pi0.5 of about 1.5 million parameters."""
    stack = DecoderDims(width=WIDTH, depth=4, mlp_dim=256, num_heads=4, num_kv_heads=1, head_dim=24)
    return PiDims(
        vision=VisionDims(
            width=96,
            depth=3,
            num_heads=4,
            mlp_dim=256,
            patch_size=PATCH_SIZE,
            image_size=IMAGE_SIZE,
        ),
        language=stack,
        expert=stack,
        vocabulary=vocabulary,
        cameras=len(CAMERAS),
        prompt_length=PROMPT_LENGTH,
        horizon=HORIZON,
        action_dim=len(JOINT_NAMES),
    )


@torch.no_grad()
def initialise(network: Pi05, number_tokens: np.ndarray, generator: torch.Generator) -> None:
    """Set the starting weights in place: neighbouring numbers alike, residual gates open.

    `number_tokens`: ids of consecutive integers.
    """
    dims = network.dims
    table = network.language.embedding.weight
    initialise_text(table, generator)
    initialise_numbers(table, number_tokens)
    initialise_patches(network.vision, dims.vision)
    for module in network.modules():
        if isinstance(module, AdaptiveNorm):
            # scale, shift, gate: with a gate of one an untrained expert is a plain transformer.
            width = module.modulation.out_features // 3
            module.modulation.bias[2 * width :] = 1.0


def encode_prefix(network: PiNetwork, pixels: Tensor, rows: Mapping[str, Tensor]) -> Prefix:
    """One prefix forward for all objectives.

    `pixels` (B, V, 3, S, S); `rows`: tokens and token_mask (B, L), right-padded. Training also
    runs the last layer for the last prompt token, as one head of values is too narrow to read
    from.
    """
    tokens, token_mask = rows['tokens'], rows['token_mask']
    batch, cameras = pixels.shape[:2]
    image_tokens = network.vision(pixels.flatten(0, 1)).unflatten(0, (batch, cameras))
    everyone = torch.ones(batch, cameras, dtype=torch.bool, device=pixels.device)
    x, mask = network.embed_prefix(image_tokens, everyone, tokens, token_mask)
    rotation = rotary(mask.long().cumsum(dim=1) - 1, network.dims.language.head_dim)
    seen = mask[:, None]
    keys, values = [], []
    for block in network.language.layers[:-1]:
        q, k, v = block.project(x, rotation)
        x = block.combine(x, attend(q, k, v, seen))
        keys.append(k)
        values.append(v)
    block = network.language.layers[-1]
    q, k, v = block.project(x, rotation)
    every = torch.arange(batch, device=x.device)
    last = mask.shape[1] - tokens.shape[1] + token_mask.sum(dim=1) - 1
    attended = attend(q[every, :, last][:, :, None], k, v, seen)
    final = block.combine(x[every, last][:, None], attended)
    final = network.language.norm(final)
    places = cameras * image_tokens.shape[2]
    images = normalise_rms(x[:, :places]).unflatten(1, (cameras, -1))
    past = {
        'past_key': torch.stack([*keys, k]),
        'past_value': torch.stack([*values, v]),
        'prefix_mask': mask,
    }
    return Prefix(past, images, final[:, 0])


RECIPE = Recipe(
    name='pi05',
    title='tabletop demo',
    dims=pi05_dims,
    steps={'see': 500, 'ground': 1200, 'act': 4000},
    draws=4,
    tasks=TaskMix({'colour': 0.33, 'position': 0.27, 'push': 0.4}),
    prompt=PROMPT_FORMAT,
    initialise=initialise,
    prefix=encode_prefix,
    denoise_steps=10,
)
