"""Initial weights that shorten training, for the recipes that share them.

From scratch, on a few thousand steps, text embeddings should be as large as image tokens, and
patch positions 2-D sine-cosine.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from vla_runtime.family.dimensions import VisionDims
from vla_runtime.models.blocks.siglip import Siglip


@torch.no_grad()
def initialise_text(table: torch.Tensor, generator: torch.Generator) -> None:
    """Draw a text table (vocabulary, W) that is of unit size after its network's sqrt(W)."""
    table.copy_(torch.randn(table.shape, generator=generator) * table.shape[1] ** -0.5)


@torch.no_grad()
def initialise_numbers(table: torch.Tensor, number_tokens: np.ndarray) -> None:
    """Set the rows of consecutive numbers in a text table (vocabulary, W): neighbours are alike.

    They are of unit size after the network's sqrt(W).
    """
    width = table.shape[1]
    codes = waves(torch.linspace(-1, 1, len(number_tokens)), width)
    loudness = math.sqrt(2.0) * width**-0.5
    table[torch.as_tensor(number_tokens)] = codes.to(table) * loudness


@torch.no_grad()
def initialise_patches(vision: Siglip, dims: VisionDims) -> None:
    """Set the positions of a vision transformer's patches to 2-D sines and cosines."""
    side = dims.image_size // dims.patch_size
    half = waves(torch.linspace(-1, 1, side), dims.width // 2)
    rows = half[:, None].expand(-1, side, -1)
    columns = half[None].expand(side, -1, -1)
    vision.position_embedding.copy_(torch.cat([rows, columns], dim=-1).flatten(0, 1))


def waves(values: torch.Tensor, width: int) -> torch.Tensor:
    """Sine-cosine features (n, width) of values in [-1, 1], wavelengths from 4 down to 1/16."""
    frequency = 2.0 ** torch.linspace(-2, 4, width // 2)
    angle = 2 * math.pi * values[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)
