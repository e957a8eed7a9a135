"""SigLIP vision transformer (arXiv 2303.15343), alone and with PaliGemma's projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.attention import Rotary, rotate
from vla_runtime.families.blocks.dimensions import VisionBlockDims, VisionDims
from vla_runtime.families.blocks.layers import Linear, MultiHeadAttention, gelu_tanh


class VisionAttention(MultiHeadAttention):
    """Full self-attention over the patches of one image."""

    def __init__(self, dims: VisionBlockDims) -> None:
        super().__init__(dims.width, dims.num_heads)

    def turned(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Rotate queries or keys, (n, heads, N, D)."""
        return rotate(x, rotary)

    def forward(
        self, x: Tensor, rotary: Rotary | None = None, seen: Tensor | None = None
    ) -> Tensor:
        """(n, N, width) to (n, N, width).

        `rotary` are positions that queries and keys are rotated by, if any; `seen` (N, N) bool are
        the patches that each patch sees; None: all.
        """
        n, tokens, width = x.shape
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        if rotary is not None:
            q, k = self.turned(q, rotary), self.turned(k, rotary)
        mask = None if seen is None else seen[None, None]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(attended.transpose(1, 2).reshape(n, tokens, width))


class VisionMlp(nn.Module):
    def __init__(self, dims: VisionBlockDims) -> None:
        super().__init__()
        self.fc1 = Linear(dims.width, dims.mlp_dim)
        self.fc2 = Linear(dims.mlp_dim, dims.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu_tanh(self.fc1(x)))


class VisionBlock(nn.Module):
    """Pre-norm transformer block; norms and residual stream stay in float32."""

    def __init__(self, dims: VisionBlockDims) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dims.width, eps=1e-6)
        self.attention = VisionAttention(dims)
        self.norm2 = nn.LayerNorm(dims.width, eps=1e-6)
        self.mlp = VisionMlp(dims)

    def forward(
        self, x: Tensor, rotary: Rotary | None = None, seen: Tensor | None = None
    ) -> Tensor:
        x = x + self.attention(self.norm1(x), rotary, seen)
        return x + self.mlp(self.norm2(x))


class PatchEmbedding(nn.Module):
    """Square patches to tokens: SigLIP's convolution as a product, free of CUDA's default TF32."""

    def __init__(self, dims: VisionDims) -> None:
        super().__init__()
        self.patch_size = dims.patch_size
        # Shape and initialisation of the convolution, which is what checkpoints hold.
        convolution = nn.Conv2d(3, dims.width, kernel_size=dims.patch_size)
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) to (n, N, width), patches row by row."""
        n, channels, size, _ = pixels.shape
        side = size // self.patch_size
        patches = pixels.view(n, channels, side, self.patch_size, side, self.patch_size)
        patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(n, side * side, -1)
        return F.linear(patches, self.weight.flatten(1), self.bias)


class Siglip(nn.Module):
    """Vision transformer: pixels to one vector per patch."""

    def __init__(self, dims: VisionDims) -> None:
        super().__init__()
        self.patch_embedding = PatchEmbedding(dims)
        self.position_embedding = nn.Parameter(torch.empty(dims.tokens, dims.width))
        nn.init.normal_(self.position_embedding, std=0.02)
        self.blocks = nn.ModuleList(VisionBlock(dims) for _ in range(dims.depth))
        self.norm = nn.LayerNorm(dims.width, eps=1e-6)

    def positions(self) -> Tensor:
        """Return the position embeddings, (N, width), patches row by row."""
        return self.position_embedding

    def patches(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) float32 in [-1, 1] to (n, N, width) float32."""
        x = self.patch_embedding(pixels) + self.positions()
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def project(self, patches: Tensor) -> Tensor:
        """Return the image tokens of what `patches` returns; by default they are the same."""
        return patches


class VisionEncoder(Siglip):
    """Pixels to image tokens of language width: PaliGemma's vision engine."""

    def __init__(self, dims: VisionDims, out_width: int) -> None:
        super().__init__(dims)
        self.projector = Linear(dims.width, out_width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode images (n, 3, S, S) in [-1, 1] to tokens (n, N, out_width) float32, unscaled."""
        return self.project(self.patches(pixels))

    def project(self, patches: Tensor) -> Tensor:
        """(n, N, width) float32 to (n, N, out_width) float32."""
        return self.projector(patches).float()


# --------------------------------------------------------------------------------------------------
# Blocks of vision transformers with the exact GELU, their branches scaled or not.


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

    With `scaled` each branch has a learned scale a channel (LayerScale, arXiv 2103.17239).
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
