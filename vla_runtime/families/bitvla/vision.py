"""BitVLA's vision tower: SigLIP, in ternary weights or not, and its projector."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.bitvla.dimensions import BitVlaDims
from vla_runtime.families.blocks.dimensions import VisionDims
from vla_runtime.families.blocks.gelu_vision import GeluMlp
from vla_runtime.families.blocks.layers import gelu_tanh
from vla_runtime.families.blocks.siglip import PatchEmbedding, VisionBlock
from vla_runtime.families.blocks.ternary import TernaryLinear, TernaryQuery, apply_together


class TernaryVisionAttention(nn.Module):
    """Full self-attention over the patches of one image."""

    def __init__(self, dims: VisionDims) -> None:
        super().__init__()
        width = dims.width
        self.num_heads = dims.num_heads
        self.q = TernaryQuery(width, width, width // dims.num_heads)
        self.k = TernaryLinear(width, width)
        self.v = TernaryLinear(width, width)
        self.out = TernaryLinear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, N, width) to the same."""
        n, tokens, width = x.shape
        q, k, v = (
            projected.view(n, tokens, self.num_heads, -1).transpose(1, 2)
            for projected in apply_together((self.q, self.k, self.v), x)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).reshape(n, tokens, width))


class TernaryVisionMlp(nn.Module):
    def __init__(self, dims: VisionDims) -> None:
        super().__init__()
        self.fc1 = TernaryLinear(dims.width, dims.mlp_dim)
        self.fc2 = TernaryLinear(dims.mlp_dim, dims.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu_tanh(self.fc1(x)))


class TernaryVisionBlock(nn.Module):
    """Pre-norm transformer block; norms and residual stream are float32."""

    def __init__(self, dims: VisionDims) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dims.width, eps=1e-6)
        self.attention = TernaryVisionAttention(dims)
        self.norm2 = nn.LayerNorm(dims.width, eps=1e-6)
        self.mlp = TernaryVisionMlp(dims)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class BitVlaVision(nn.Module):
    """BitVLA's vision engine: pixels to image tokens of language width.

    The features are those behind the tower's last block but one, without the final norm.
    """

    def __init__(self, dims: BitVlaDims) -> None:
        super().__init__()
        vision = dims.vision
        self.patch_embedding = PatchEmbedding(vision)
        self.position_embedding = nn.Parameter(torch.empty(vision.tokens, vision.width))
        nn.init.normal_(self.position_embedding, std=0.02)
        block = TernaryVisionBlock if dims.ternary_vision else VisionBlock
        self.blocks = nn.ModuleList(block(vision) for _ in range(vision.depth))
        self.projector = GeluMlp(vision.width, dims.language.width, dims.language.width)

    def features(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) float32 in [-1, 1] to (n, N, width of the tower) float32."""
        x = self.patch_embedding(pixels) + self.position_embedding
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode images.

        Args:
            pixels: (n, 3, S, S) float32 in [-1, 1].

        Returns:
            (n, N, language width) float32
        """
        return self.projector(self.features(pixels)).float()
