"""InternVL3's vision tower (arXiv 2504.10479), its patches shuffled into wider image tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.gelu_vision import GeluVisionBlock
from vla_runtime.families.blocks.layers import Linear
from vla_runtime.families.blocks.siglip import PatchEmbedding
from vla_runtime.families.evo1.dimensions import Evo1Dims


class Projector(nn.Module):
    """Shuffled patches to the width of the language model."""

    def __init__(self, wide: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(wide, eps=1e-5)
        self.fc1 = Linear(wide, width)
        self.fc2 = Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.norm(x))))


def shuffle_pixels(patches: Tensor, side: int, edge: int) -> Tensor:
    """Join each square of patches into one vector, row by row.

    Args:
        patches: (n, side * side, width), row by row.
        side: patches of an image's edge.
        edge: patches of a square's edge.

    Returns:
        (n, (side / edge)^2, edge * edge * width), squares row by row
    """
    n, _, width = patches.shape
    few = side // edge
    squares = patches.view(n, few, edge, few, edge, width).permute(0, 1, 3, 2, 4, 5)
    return squares.reshape(n, few * few, edge * edge * width)


class InternVision(nn.Module):
    """Evo-1's vision engine: pixels to image tokens of language width."""

    def __init__(self, dims: Evo1Dims) -> None:
        super().__init__()
        vision = dims.vision
        self.edge = dims.pixel_shuffle
        self.side = vision.image_size // vision.patch_size
        self.class_token = nn.Parameter(torch.zeros(1, 1, vision.width))
        self.position_embedding = nn.Parameter(torch.zeros(1, 1 + vision.tokens, vision.width))
        self.patch_embedding = PatchEmbedding(vision)
        self.blocks = nn.ModuleList(
            GeluVisionBlock(vision, scaled=True) for _ in range(vision.depth)
        )
        self.projector = Projector(vision.width * self.edge**2, dims.language.width)

    def features(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) to (n, 1 + patches, width), the class token first; no final norm."""
        patches = self.patch_embedding(pixels)
        x = torch.cat([self.class_token.expand(patches.shape[0], -1, -1), patches], dim=1)
        x = x + self.position_embedding
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode images.

        Args:
            pixels: (n, 3, S, S) float32, normalised with ImageNet's mean and std.

        Returns:
            (n, N, language width) float32
        """
        patches = self.features(pixels)[:, 1:]
        return self.projector(shuffle_pixels(patches, self.side, self.edge)).float()
