"""Qwen3 decoder (arXiv 2505.09388): Llama's blocks with a norm on every query and key head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.attention import Rotary, SplitHeads, attend, rotate
from vla_runtime.families.blocks.dimensions import DecoderDims
from vla_runtime.families.blocks.layers import GatedMlp, Linear
from vla_runtime.families.blocks.llama import QueryNorm, RMSNorm


class Qwen3Attention(SplitHeads):
    """Grouped-query attention with norms on query and key heads, which carry the scores' scale."""

    def __init__(self, dims: DecoderDims, epsilon: float) -> None:
        super().__init__()
        self.head_dim = dims.head_dim
        queries, keys = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
        self.q = Linear(dims.width, queries, bias=False)
        self.k = Linear(dims.width, keys, bias=False)
        self.v = Linear(dims.width, keys, bias=False)
        self.out = Linear(queries, dims.width, bias=False)
        self.q_norm = QueryNorm(dims.head_dim, epsilon)
        self.k_norm = RMSNorm(dims.head_dim, epsilon)

    def forward(self, x: Tensor, rotary: Rotary, seen: Tensor) -> Tensor:
        """(B, T, W) float32 to (B, T, W), where `seen` (B, T, T) is True."""
        v = self.heads(self.v(x))
        q = rotate(self.heads(self.q(x), self.q_norm), rotary).to(v.dtype)
        k = rotate(self.heads(self.k(x), self.k_norm), rotary).to(v.dtype)
        return self.out(attend(q, k, v, seen))


class Qwen3Block(nn.Module):
    """One decoder block; the residual stream is (B, T, W) float32."""

    def __init__(self, dims: DecoderDims, epsilon: float) -> None:
        super().__init__()
        self.input_norm = RMSNorm(dims.width, epsilon)
        self.attention = Qwen3Attention(dims, epsilon)
        self.post_norm = RMSNorm(dims.width, epsilon)
        self.mlp = GatedMlp(dims, F.silu)

    def forward(self, x: Tensor, rotary: Rotary, seen: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x), rotary, seen).float()
        return x + self.mlp(self.post_norm(x)).float()


class Qwen3(nn.Module):
    """Text table and blocks, with a final norm or without."""

    def __init__(
        self, dims: DecoderDims, epsilon: float, vocabulary: int, *, final_norm: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dims.width)
        self.blocks = nn.ModuleList(Qwen3Block(dims, epsilon) for _ in range(dims.depth))
        self.norm = RMSNorm(dims.width, epsilon) if final_norm else nn.Identity()

    @property
    def layers(self) -> list[Qwen3Block]:
        return [cast(Qwen3Block, block) for block in self.blocks]

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, L) token ids to (B, L, W) float32."""
        return self.embedding(tokens).float()

    def forward(
        self, x: Tensor, rotary: Rotary, seen: Tensor, between: Sequence[Tensor] = ()
    ) -> Tensor:
        """Embeddings (B, T, W) to features, where `seen` (B, T, T) bool.

        `between` is added behind the first blocks, one each, (B, T, W), but not behind the last.
        """
        last = len(self.layers) - 1
        for index, block in enumerate(self.layers):
            x = block(x, rotary, seen)
            if index < min(len(between), last):
                x = x + between[index]
        return self.norm(x)


def causal_attention(mask: Tensor) -> Tensor:
    """Keys that each token sees, (B, T, T) bool, causally, of those in the mask (B, T) bool.

    A hidden token sees itself, so that no token sees nothing.
    """
    length = mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    own = torch.eye(length, dtype=torch.bool, device=mask.device)
    return torch.logical_or(torch.logical_and(mask[:, None], causal), own)
