"""SigLIP vision transformer (arXiv 2303.15343), alone and with PaliGemma's projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.family.dimensions import VisionBlockDims, VisionDims
from vla_runtime.models.blocks.layers import Activation, LayerNorm, Linear, gelu_tanh
from vla_runtime.models.blocks.products import IMAGES
from vla_runtime.models.blocks.transformer import Attention, Block, Mlp


def vision_block(
    dims: VisionBlockDims,
    activation: Activation = gelu_tanh,
    *,
    epsilon: float = 1e-6,
    scaled: bool = False,
    attention: type[Attention] = Attention,
) -> Block:
    """Pre-norm block of a vision transformer, each patch seeing all.

    With `scaled` each branch has a learned scale a channel.
    """
    return Block(
        lambda: LayerNorm(dims.width, eps=epsilon),
        lambda: attention(dims.width, dims.num_heads),
        lambda: Mlp(dims.width, dims.mlp_dim, activation),
        scaled=dims.width if scaled else 0,
        way=IMAGES,
    )


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
        self.blocks = nn.ModuleList(vision_block(dims) for _ in range(dims.depth))
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


def shuffle_pixels(patches: Tensor, side: int, edge: int) -> Tensor:
    """Join each square of edge * edge patches into one vector, squares row by row.

    (n, side * side, width), patches row by row, to (n, (side / edge)^2, edge * edge * width).
    """
    n, _, width = patches.shape
    few = side // edge
    squares = patches.view(n, few, edge, few, edge, width).permute(0, 1, 3, 2, 4, 5)
    return squares.reshape(n, few * few, edge * edge * width)
