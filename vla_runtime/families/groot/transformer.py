"""Attention blocks of GR00T's action head (arXiv 2503.14734): plain ones, and those of its DiT.

The DiT's norms have no weights; scale and shift come from the flow time (arXiv 2212.09748).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.attention import SplitHeads, attend
from vla_runtime.families.blocks.layers import Linear, QueryLinear
from vla_runtime.families.groot.dimensions import StackDims

# Epsilon of all norms of the blocks; that of the DiT's last one is smaller.
EPSILON, LAST_EPSILON = 1e-5, 1e-6


class HeadAttention(SplitHeads):
    """Multi-head attention with biases; keys and values may be of tokens `memory_width` wide."""

    def __init__(self, dims: StackDims, width: int, memory_width: int | None = None) -> None:
        super().__init__()
        memory = width if memory_width is None else memory_width
        self.head_dim = dims.head_dim
        self.q = QueryLinear(width, dims.heads_width, dims.head_dim)
        self.k = Linear(memory, dims.heads_width)
        self.v = Linear(memory, dims.heads_width)
        self.out = Linear(dims.heads_width, width)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens (B, K, memory width), (B, heads, K, D) each."""
        return self.heads(self.k(x)), self.heads(self.v(x))

    def forward(self, x: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        """Attend from (B, T, W) where `seen` (B or 1, 1, K) is True; (B, T, W) float32."""
        return self.out(attend(self.heads(self.q(x)), key, value, seen)).float()


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Linear(width, hidden)
        self.fc2 = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate='tanh')).float()


class ContextBlock(nn.Module):
    """Self-attention and MLP over the language model's features, each behind a norm."""

    def __init__(self, dims: StackDims, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=EPSILON)
        self.attention = HeadAttention(dims, width)
        self.norm2 = nn.LayerNorm(width, eps=EPSILON)
        self.mlp = Mlp(width, dims.mlp_dim)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """(B, P, W) to (B, P, W); tokens see those where `seen` (B, 1, P) is True."""
        h = self.norm1(x)
        x = x + self.attention(h, *self.attention.keys_values(h), seen)
        return x + self.mlp(self.norm2(x))


class DitBlock(nn.Module):
    """Cross- or self-attention and MLP of the DiT, as wide as its heads together.

    `memory_width` is the context's; None: the block attends to its own tokens.
    """

    def __init__(self, dims: StackDims, memory_width: int | None) -> None:
        super().__init__()
        width = dims.heads_width
        self.modulation = nn.Linear(width, 2 * width)
        self.attention = HeadAttention(dims, width, memory_width)
        self.mlp = Mlp(width, dims.mlp_dim)

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        memory: tuple[Tensor, Tensor] | None,
        seen: Tensor,
    ) -> Tensor:
        """Run the block over x (B, T, W) float32.

        Args:
            modulation: (B or 1, 1 or T, 2 W), scale and shift of the first norm.
            memory: keys and values of the context, (B, heads, P, D) each; None: of `x` itself.
            seen: (B or 1, 1, K) bool, keys that the tokens see.
        """
        scale, shift = modulation.chunk(2, dim=-1)
        h = modulated(x, scale, shift, EPSILON)
        key, value = self.attention.keys_values(h) if memory is None else memory
        x = x + self.attention(h, key, value, seen)
        return x + self.mlp(plain_norm(x, EPSILON))


def plain_norm(x: Tensor, epsilon: float) -> Tensor:
    """Layer norm without weights (arXiv 1607.06450), in float32."""
    return F.layer_norm(x, (x.shape[-1],), eps=epsilon)


def modulated(x: Tensor, scale: Tensor, shift: Tensor, epsilon: float) -> Tensor:
    """Norm without weights, then `* (1 + scale) + shift`."""
    return plain_norm(x, epsilon) * (1.0 + scale) + shift


class SlicedLinear(nn.Module):
    """A linear layer of one embodiment, cut from a stack of them: weight (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) to (…, outputs), in float32."""
        return F.linear(x, self.weight.t(), self.bias)


class SlicedMlp(nn.Module):
    """Two layers of one embodiment with a ReLU between them."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.fc1 = SlicedLinear(inputs, hidden)
        self.fc2 = SlicedLinear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))
