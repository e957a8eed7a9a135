"""Llama decoder blocks (arXiv 2302.13971), whose attention may read another stack's tokens.

A block has two halves, `project` and `combine`, because one attention may run over the keys of two
stacks.
"""

from __future__ import annotations

from collections.abc import Container
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.attention import Attention, Rotary, attend
from vla_runtime.families.blocks.dimensions import DecoderDims
from vla_runtime.families.blocks.layers import GatedMlp, QueryScale, normalise_rms


class RMSNorm(nn.Module):
    """Llama's RMSNorm; (B, T, W) to (B, T, W) float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return normalise_rms(x, self.weight.float(), self.epsilon)


class QueryNorm(RMSNorm, QueryScale):
    """RMSNorm of the queries of each head, for attention with scores scaled by 1/sqrt(head_dim)."""

    def __init__(self, head_dim: int, epsilon: float) -> None:
        super().__init__(head_dim, epsilon)
        self.scale = head_dim**-0.5


class LlamaBlock(nn.Module):
    """One decoder block; all tensors of the residual stream are (B, T, W) float32.

    `memory_width` is the input width of a cross-attending block's keys and values; `bias` is in
    queries, keys and values, as in Qwen2 (arXiv 2407.10671).
    """

    def __init__(
        self,
        dims: DecoderDims,
        epsilon: float,
        memory_width: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.input_norm = RMSNorm(dims.width, epsilon)
        self.attention = Attention(dims, memory_width, bias)
        self.post_norm = RMSNorm(dims.width, epsilon)
        self.mlp = GatedMlp(dims, F.silu)

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, heads, T, D), keys and values (B, kv_heads, T, D)."""
        return self.attention.project(self.input_norm(x), rotary)

    def project_keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        return self.attention.project_keys_values(self.input_norm(x), rotary)

    def project_queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Queries only: all that a cross-attending block computes from its own tokens."""
        return self.attention.project_queries(self.input_norm(x), rotary)

    def forward(self, x: Tensor, rotary: Rotary, seen: Tensor) -> Tensor:
        """Run the block over its own tokens x; `seen` is (B, T or 1, T) bool."""
        q, k, v = self.project(x, rotary)
        return self.combine(x, attend(q, k, v, seen))

    def combine(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention's output (B, T, heads * D) and the MLP to the residual stream."""
        x = x + self.attention.out(attended).float()
        return x + self.mlp(self.post_norm(x)).float()


class Llama(nn.Module):
    """A stack of blocks with its final norm; a language model also has a text table.

    Args:
        vocabulary: rows of the text table, 0 for none.
        cross: layers whose keys and values are computed from another stack's, `memory_width` wide.
        bias: query, key and value projections have a bias.
    """

    def __init__(
        self,
        dims: DecoderDims,
        epsilon: float,
        *,
        vocabulary: int = 0,
        cross: Container[int] = (),
        memory_width: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if vocabulary:
            self.embedding = nn.Embedding(vocabulary, dims.width)
        self.blocks = nn.ModuleList(
            LlamaBlock(dims, epsilon, memory_width if layer in cross else None, bias)
            for layer in range(dims.depth)
        )
        self.norm = RMSNorm(dims.width, epsilon)

    @property
    def layers(self) -> list[LlamaBlock]:
        return [cast(LlamaBlock, block) for block in self.blocks]

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, L) token ids to (B, L, W) float32."""
        return self.embedding(tokens).float()
