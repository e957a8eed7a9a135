"""CLIP's two transformers (arXiv 2103.00020): one vector of an image, and one of a prompt."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.dimensions import VisionDims
from vla_runtime.families.blocks.layers import Linear, MultiHeadAttention
from vla_runtime.families.blocks.resize import Framing
from vla_runtime.families.multi_task_dit.dimensions import TextDims

_EPSILON = 1e-5
_STEEPNESS = 1.702


class BlockDims(Protocol):
    """Sizes of a CLIP transformer's blocks."""

    @property
    def width(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def mlp_dim(self) -> int: ...


class ClipAttention(MultiHeadAttention):
    """Attention of each token to those that it sees, (T, T) bool; None: to all."""

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        mask = None if seen is None else seen[None, None]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(attended.transpose(1, 2).reshape(x.shape))


class ClipMlp(nn.Module):
    def __init__(self, dims: BlockDims) -> None:
        super().__init__()
        self.fc1 = Linear(dims.width, dims.mlp_dim)
        self.fc2 = Linear(dims.mlp_dim, dims.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(quick_gelu(self.fc1(x)))


class ClipBlock(nn.Module):
    """Pre-norm transformer block; norms and residual stream stay in float32."""

    def __init__(self, dims: BlockDims) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dims.width, eps=_EPSILON)
        self.attention = ClipAttention(dims.width, dims.num_heads)
        self.norm2 = nn.LayerNorm(dims.width, eps=_EPSILON)
        self.mlp = ClipMlp(dims)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), seen)
        return x + self.mlp(self.norm2(x))


class Patches(nn.Module):
    """Square patches to tokens: a strided convolution without bias, as a matrix product."""

    def __init__(self, width: int, patch_size: int) -> None:
        super().__init__()
        self.weight = nn.Conv2d(3, width, kernel_size=patch_size, bias=False).weight

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) to (n, N, width), patches row by row."""
        n, channels, size, _ = pixels.shape
        patch = self.weight.shape[-1]
        side = size // patch
        patches = pixels.reshape(n, channels, side, patch, side, patch)
        patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(n, side * side, -1)
        return F.linear(patches, self.weight.flatten(1))


class ClipVision(nn.Module):
    """Normalised images to one token each: the class token, without CLIP's norm behind it."""

    def __init__(self, vision: VisionDims, framing: Framing) -> None:
        super().__init__()
        self.framing = framing
        self.patch_embedding = Patches(vision.width, vision.patch_size)
        self.class_embedding = nn.Parameter(torch.empty(vision.width))
        self.position_embedding = nn.Parameter(torch.empty(vision.tokens + 1, vision.width))
        for table in (self.class_embedding, self.position_embedding):
            nn.init.normal_(table, std=0.02)
        self.norm = nn.LayerNorm(vision.width, eps=_EPSILON)
        self.blocks = nn.ModuleList(ClipBlock(vision) for _ in range(vision.depth))

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) to (n, 1, width)."""
        patches = self.patch_embedding(self.framing(pixels))
        first = self.class_embedding[None, None].expand(patches.shape[0], -1, -1)
        x = self.norm(torch.cat([first, patches], dim=1) + self.position_embedding)
        for block in self.blocks:
            x = block(x)
        return x[:, :1].float()


class ClipText(nn.Module):
    """A prompt to the vector of the token that ends it."""

    def __init__(self, dims: TextDims, vocabulary: int, out_width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dims.width)
        self.position_embedding = nn.Parameter(torch.empty(dims.positions, dims.width))
        nn.init.normal_(self.position_embedding, std=0.02)
        self.blocks = nn.ModuleList(ClipBlock(dims) for _ in range(dims.depth))
        self.norm = nn.LayerNorm(dims.width, eps=_EPSILON)
        self.projection = nn.Linear(dims.width, out_width)

    def forward(self, tokens: Tensor, token_mask: Tensor) -> Tensor:
        """(R, L) to (R, out_width)."""
        # A token sees those before it and itself, so padding behind the end changes nothing.
        places = torch.arange(tokens.shape[1], device=tokens.device)
        seen = places[None] <= places[:, None]
        x = self.embedding(tokens).float() + self.position_embedding[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, seen)
        return self.projection(ending(self.norm(x), token_mask))


def ending(x: Tensor, token_mask: Tensor) -> Tensor:
    """The vectors (R, W) of the last tokens that are no padding: of the end of the prompts.

    Args:
        x: (R, L, W).
        token_mask: (R, L) bool.
    """
    places = torch.arange(x.shape[1], device=x.device)[None]
    end = torch.where(token_mask, places.float(), -1.0).argmax(dim=1)
    return torch.where((places == end[:, None])[:, :, None], x, 0.0).sum(dim=[1])


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's activation: x sigmoid(1.702 x)."""
    return F.silu(_STEEPNESS * x) / _STEEPNESS
