"""SmolVLA (arXiv 2506.01844), small: state token, expert of self and cross layers in turn."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from vla_runtime.declarations.smolvla import SmolVlaDims
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.models.smolvla import SmolVla
from vla_runtime.processing.prompts import PromptFormat
from vla_tabletop.sim.expert import HORIZON
from vla_tabletop.sim.scene import CAMERAS
from vla_tabletop.sim.world import JOINT_NAMES
from vla_tabletop.training.recipes.initialisation import initialise_patches, initialise_text
from vla_tabletop.training.recipes.recipe import WIDTH, Prefix, Recipe, values_of_last_layer
from vla_tabletop.training.samples import PATCH_SIZE, TaskMix
from vla_tabletop.training.vocabulary import PROMPT_LENGTH
from vla_tabletop.training.world import IMAGE_SIZE


def smolvla_dims(vocabulary: int) -> SmolVlaDims:
    """A SmolVLA of about 1.3 million parameters.

    It has as many value heads as queries, so that a token's values are as wide as the token.
    Patches of 16 pixels are not shuffled: smaller ones together see no more here.
    """
    stack = DecoderDims(width=WIDTH, depth=4, mlp_dim=256, num_heads=4, num_kv_heads=4, head_dim=24)
    return SmolVlaDims(
        vision=VisionDims(
            width=96,
            depth=3,
            num_heads=4,
            mlp_dim=256,
            patch_size=PATCH_SIZE,
            image_size=IMAGE_SIZE,
        ),
        pixel_shuffle=1,
        language=stack,
        expert=stack,
        vocabulary=vocabulary,
        cameras=len(CAMERAS),
        prompt_length=PROMPT_LENGTH,
        horizon=HORIZON,
        action_dim=len(JOINT_NAMES),
        state_dim=len(JOINT_NAMES),
        self_attention_every=2,
    )


@torch.no_grad()
def initialise(network: SmolVla, number_tokens: np.ndarray, generator: torch.Generator) -> None:
    """Set the starting weights in place; no number is in its prompts."""
    width = network.dims.language.width
    initialise_text(network.language.embedding.weight, generator)
    initialise_patches(network.vision, network.dims.vision)
    # Image tokens are multiplied by sqrt(W), as text is.
    network.vision.projector.weight.mul_(width**-0.5)


def encode_prefix(network: SmolVla, pixels: Tensor, rows: Mapping[str, Tensor]) -> Prefix:
    """One prefix forward for all objectives; the state token has seen the images and the text."""
    batch, cameras = pixels.shape[:2]
    image_tokens = network.vision(pixels.flatten(0, 1)).unflatten(0, (batch, cameras))
    everyone = torch.ones(cameras, dtype=torch.bool, device=pixels.device)
    past = network.prefix(image_tokens, everyone, **rows)
    values = values_of_last_layer(past)
    places = cameras * image_tokens.shape[2]
    return Prefix(past, values[:, :places].unflatten(1, (cameras, -1)), values[:, -1])


RECIPE = Recipe(
    name='smolvla',
    title='tabletop demo, SmolVLA',
    dims=smolvla_dims,
    steps={'see': 400, 'ground': 800, 'act': 2000},
    draws=2,
    tasks=TaskMix({'colour': 0.55, 'position': 0.45}),
    prompt=PromptFormat('task_line', 'openpi', 'before_action'),
    initialise=initialise,
    prefix=encode_prefix,
    denoise_steps=10,
    half=True,
)
