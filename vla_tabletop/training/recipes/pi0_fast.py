"""pi0-FAST (arXiv 2501.09747), small: it writes the frequencies of a chunk as tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from vla_runtime.declarations.pi0_fast import Pi0FastDims
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.models.pi0_fast import Pi0Fast
from vla_runtime.processing.prompts import PromptFormat
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
from vla_tabletop.training.vocabulary import ACTION_SCALE, PROMPT_LENGTH, tokens_behind_actions
from vla_tabletop.training.world import IMAGE_SIZE

# Of the expert's chunks one in a hundred needs more.
_ANSWER_TOKENS = 28


def pi0_fast_dims(vocabulary: int) -> Pi0FastDims:
    """A pi0-FAST of about 1 million parameters.

    It has as many value heads as queries, so that a token's values are as wide as the token.
    """
    return Pi0FastDims(
        vision=VisionDims(
            width=96,
            depth=3,
            num_heads=4,
            mlp_dim=256,
            patch_size=PATCH_SIZE,
            image_size=IMAGE_SIZE,
        ),
        language=DecoderDims(
            width=WIDTH, depth=3, mlp_dim=256, num_heads=4, num_kv_heads=4, head_dim=24
        ),
        vocabulary=vocabulary,
        cameras=len(CAMERAS),
        prompt_length=PROMPT_LENGTH,
        horizon=HORIZON,
        action_dim=len(JOINT_NAMES),
        answer_tokens=_ANSWER_TOKENS,
        skipped_tokens=tokens_behind_actions(vocabulary),
        action_scale=ACTION_SCALE.scale,
        least_coefficient=float(ACTION_SCALE.min_token),
        checks_prefix=False,
    )


@torch.no_grad()
def initialise(network: Pi0Fast, number_tokens: np.ndarray, generator: torch.Generator) -> None:
    """Set the starting weights in place: neighbouring numbers alike, all tokens as likely."""
    table = network.language.embedding.weight
    initialise_text(table, generator)
    initialise_numbers(table, number_tokens)
    initialise_patches(network.vision, network.dims.vision)
    network.token_head.weight.zero_()


def encode_prefix(network: Pi0Fast, pixels: Tensor, rows: Mapping[str, Tensor]) -> Prefix:
    """One prefix forward for all objectives; the BOS behind the prompt has seen the others."""
    batch, cameras = pixels.shape[:2]
    image_tokens = network.vision(pixels.flatten(0, 1)).unflatten(0, (batch, cameras))
    everyone = torch.ones(cameras, dtype=torch.bool, device=pixels.device)
    past = network.prefix(image_tokens, everyone, **rows)
    values = past['prefix_value'][-1].transpose(1, 2).flatten(2)  # (B, T, WIDTH)
    places = cameras * image_tokens.shape[2]
    last = network.view(past['prefix_mask']).last
    every = torch.arange(batch, device=pixels.device)
    return Prefix(past, values[:, :places].unflatten(1, (cameras, -1)), values[every, last])


RECIPE = Recipe(
    name='pi0_fast',
    title='tabletop demo, pi0-FAST: touch a block by its colour',
    dims=pi0_fast_dims,
    steps={'see': 200, 'ground': 250, 'act': 1000},
    draws=1,
    tasks=TaskMix({'colour': 1.0}),
    prompt=PromptFormat('pi0_fast', 'openpi'),
    initialise=initialise,
    prefix=encode_prefix,
    denoise_steps=1,
    half=True,
)
