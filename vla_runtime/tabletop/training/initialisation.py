"""Initial weights of the demo policy, chosen for a short training.

The networks' own initial values are for weights that a checkpoint replaces. From scratch, on a few
thousand steps, four choices pay: text as loud as image tokens, patch positions as 2-D sine-cosine,
neighbouring numbers alike, and open residual gates.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from vla_runtime.families.blocks.gemma import AdaptiveRMSNorm
from vla_runtime.families.pi.pi05 import Pi05


@torch.no_grad()
def initialise(network: Pi05, number_tokens: np.ndarray, generator: torch.Generator) -> None:
    """Set the starting weights in place.

    Args:
        network: freshly built.
        number_tokens: token ids of consecutive integers, in order.
        generator: makes the text table reproducible.
    """
    dims = network.dims
    table = network.language.embedding.weight
    # The network multiplies the table by sqrt(width): unit embeddings after that.
    scale = dims.language.width**-0.5
    table.copy_(torch.randn(table.shape, generator=generator) * scale)
    values = torch.linspace(-1, 1, len(number_tokens))
    waves = _waves(values, dims.language.width)
    table[torch.as_tensor(number_tokens)] = waves.to(table) * math.sqrt(2.0) * scale

    side = dims.vision.image_size // dims.vision.patch_size
    position = torch.linspace(-1, 1, side)
    half = _waves(position, dims.vision.width // 2)
    rows = half[:, None].expand(-1, side, -1)
    columns = half[None].expand(side, -1, -1)
    network.vision.position_embedding.copy_(torch.cat([rows, columns], dim=-1).flatten(0, 1))

    for module in network.modules():
        if isinstance(module, AdaptiveRMSNorm):
            # scale, shift, gate: with a gate of one an untrained expert is a plain transformer.
            width = module.modulation.out_features // 3
            module.modulation.bias[2 * width :] = 1.0


def _waves(values: torch.Tensor, width: int) -> torch.Tensor:
    """Sine-cosine features (n, width) of values in [-1, 1], wavelengths from 4 down to 1/16."""
    frequency = 2.0 ** torch.linspace(-2, 4, width // 2)
    angle = 2 * math.pi * values[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)
