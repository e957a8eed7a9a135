"""Blocks of vision transformers with the exact GELU, their branches scaled or not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.dimensions import VisionDims
from vla_runtime.families.blocks.layers import Linear
from vla_runtime.families.blocks.siglip import VisionAttention


class GeluMlp(nn.Module):
    """Two layers with the exact GELU between them."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.fc1 = Linear(width, hidden)
        self.fc2 = Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class GeluVisionBlock(nn.Module):
    """Pre-norm transformer block with the exact GELU.

    Args:
        dims: sizes of the tower.
        scaled: each of its two branches has a learned scale a channel (LayerScale, arXiv
            2103.17239).
    """

    def __init__(self, dims: VisionDims, *, scaled: bool) -> None:
        super().__init__()
        self.scale1 = nn.Parameter(torch.ones(dims.width)) if scaled else None
        self.scale2 = nn.Parameter(torch.ones(dims.width)) if scaled else None
        self.norm1 = nn.LayerNorm(dims.width, eps=1e-6)
        self.attention = VisionAttention(dims)
        self.norm2 = nn.LayerNorm(dims.width, eps=1e-6)
        self.mlp = GeluMlp(dims.width, dims.mlp_dim, dims.width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, tokens, width) to the same, float32."""
        attended = self.attention(self.norm1(x)).float()
        x = x + (attended if self.scale1 is None else self.scale1 * attended)
        mixed = self.mlp(self.norm2(x)).float()
        return x + (mixed if self.scale2 is None else self.scale2 * mixed)
