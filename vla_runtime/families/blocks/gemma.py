"""Gemma decoder blocks (arXiv 2403.08295), plain and with an adaptive norm.

A block has two halves, `project` and `combine`, because a policy may run one attention over the
keys of two stacks.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from vla_runtime.families.blocks.attention import Attention, Rotary
from vla_runtime.families.blocks.dimensions import DecoderDims
from vla_runtime.families.blocks.layers import GatedMlp, gelu_tanh, normalise_rms

# Scale (one is added already), shift and gate of an adaptive norm, (B or 1, 1 or T, W) each.
Modulation = tuple[Tensor, Tensor, Tensor]


class RMSNorm(nn.Module):
    """Gemma's RMSNorm: the weight is an offset from one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(
        self, x: Tensor, modulation: Modulation | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Norm (B, T, W) to (B, T, W) float32; there is no gate."""
        return normalise_rms(x, 1.0 + self.weight.float()), None


class AdaptiveRMSNorm(nn.Module):
    """RMSNorm whose scale, shift and residual gate come from the flow time, once a schedule."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 3 * width)
        # Gates start at zero: an untrained expert is the identity (adaLN-Zero, arXiv 2212.09748).
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(
        self, x: Tensor, modulation: Modulation | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Norm (B, T, W) to (B, T, W), and return the residual gate."""
        assert modulation is not None
        scale, shift, gate = modulation
        return normalise_rms(x) * scale + shift, gate


def split_modulations(conditioning: Tensor, width: int) -> list[Modulation]:
    """Split a row of the time table into the modulations of all norms, in the order they run in.

    `conditioning` is (B or 1, norms * 3 W), scale, shift and gate of each norm, or
    (B or 1, T, norms * 3 W) where each token has its own flow time.
    """
    rows = conditioning if conditioning.dim() == 3 else conditioning[:, None]
    norms = rows.shape[-1] // (3 * width)
    # All norms' scales first, so that one is added once.
    parts = rows.reshape(*rows.shape[:2], norms, 3, width).chunk(3, dim=3)
    scale, shift, gate = (part.flatten(2) for part in parts)
    each = (part.chunk(norms, dim=-1) for part in (1.0 + scale, shift, gate))
    return list(zip(*each, strict=True))


def add_residual(x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
    return x + (y.float() if gate is None else y.float() * gate)


class GemmaBlock(nn.Module):
    """One decoder block; with `adaptive` the caller passes the modulation of its norms.

    All tensors of the residual stream are (B, T, W) float32.
    """

    def __init__(self, dims: DecoderDims, adaptive: bool) -> None:
        super().__init__()
        norm = AdaptiveRMSNorm if adaptive else RMSNorm
        self.input_norm = norm(dims.width)
        self.attention = Attention(dims)
        self.post_norm = norm(dims.width)
        self.mlp = GatedMlp(dims, gelu_tanh)

    def project(
        self, x: Tensor, rotary: Rotary, modulation: Modulation | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries (B, heads, T, D), keys and values (B, kv_heads, T, D), and the residual gate."""
        h, gate = self.input_norm(x, modulation)
        return *self.attention.project(h, rotary), gate

    def project_keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys and values only: all that is needed of a prefix's last layer."""
        h, _ = self.input_norm(x)
        return self.attention.project_keys_values(h, rotary)

    def combine(
        self,
        x: Tensor,
        attended: Tensor,
        gate: Tensor | None,
        modulation: Modulation | None = None,
    ) -> Tensor:
        """Add the attention's output (B, T, heads * D) and the MLP to the residual stream."""
        x = add_residual(x, self.attention.out(attended), gate)
        h, gate = self.post_norm(x, modulation)
        return add_residual(x, self.mlp(h), gate)


class Gemma(nn.Module):
    """A stack of blocks with its final norm, and a text table of `vocabulary` rows, 0 for none.

    With `adaptive` the norms are modulated by the flow time.
    """

    def __init__(self, dims: DecoderDims, vocabulary: int = 0, adaptive: bool = False) -> None:
        super().__init__()
        if vocabulary:
            self.embedding = nn.Embedding(vocabulary, dims.width)
        self.blocks = nn.ModuleList(GemmaBlock(dims, adaptive) for _ in range(dims.depth))
        self.norm = (AdaptiveRMSNorm if adaptive else RMSNorm)(dims.width)

    @property
    def layers(self) -> list[GemmaBlock]:
        return [cast(GemmaBlock, block) for block in self.blocks]

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, L) token ids to (B, L, W) float32, scaled by sqrt(W) as PaliGemma does."""
        embedded = self.embedding(tokens).float()
        return embedded * embedded.shape[-1] ** 0.5
