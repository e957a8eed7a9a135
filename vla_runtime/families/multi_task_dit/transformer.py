"""The transformer of Multi-Task DiT over the actions of a chunk (arXiv 2212.09748).

The modulation of its blocks is a linear layer of SiLU(time features, observation). SiLU goes number
by number, so the layer is a sum: the time's share is a row of the time table, the observation's is
computed in the prefix, and a step adds the two.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.attention import Rotary, rotary, rotate
from vla_runtime.families.blocks.layers import Linear, MultiHeadAttention, gelu_tanh
from vla_runtime.families.blocks.time_code import time_code
from vla_runtime.families.multi_task_dit.dimensions import TransformerDims


class ActionAttention(MultiHeadAttention):
    """Full attention over the actions of a chunk."""

    def forward(self, x: Tensor, positions: Rotary | None) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        if positions is not None:
            q, k = rotate(q, positions), rotate(k, positions)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).reshape(x.shape))


class ActionMlp(nn.Module):
    def __init__(self, dims: TransformerDims) -> None:
        super().__init__()
        self.fc1 = Linear(dims.width, dims.mlp_dim)
        self.fc2 = Linear(dims.mlp_dim, dims.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu_tanh(self.fc1(x)))


class ActionBlock(nn.Module):
    """A block whose inputs are scaled and shifted, and whose outputs are gated, by a modulation."""

    def __init__(self, dims: TransformerDims, observation: int) -> None:
        super().__init__()
        self.attention = ActionAttention(dims.width, dims.num_heads)
        self.mlp = ActionMlp(dims)
        self.modulation = Linear(dims.time_width + observation, dims.modulation)

    def forward(self, x: Tensor, modulation: Tensor, positions: Rotary | None) -> Tensor:
        """(B, H, W) to (B, H, W); modulation (B, 1 or H, 6 W)."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation.chunk(6, dim=2)
        x = x + gate * self.attention(modulated(x, shift, scale), positions)
        return x + mlp_gate * self.mlp(modulated(x, mlp_shift, mlp_scale))


class ActionTransformer(nn.Module):
    """Noisy actions and modulations to the prediction.

    Args:
        dims: sizes.
        horizon, action_dim: shape of a chunk.
        observation: numbers of an observation.
    """

    def __init__(
        self, dims: TransformerDims, horizon: int, action_dim: int, observation: int
    ) -> None:
        super().__init__()
        self.dims = dims
        self.time1 = nn.Linear(dims.time_width, 2 * dims.time_width)
        self.time2 = nn.Linear(2 * dims.time_width, dims.time_width)
        self.action_in = nn.Linear(action_dim, dims.width)
        self.position_embedding: nn.Parameter | None = None
        if dims.learned_positions:
            self.position_embedding = nn.Parameter(torch.empty(1, horizon, dims.width))
            nn.init.normal_(self.position_embedding, std=0.02)
        self.blocks = nn.ModuleList(ActionBlock(dims, observation) for _ in range(dims.depth))
        self.action_out = nn.Linear(dims.width, action_dim)

    def _modulations(self) -> list[Linear]:
        return [cast(ActionBlock, block).modulation for block in self.blocks]

    def time_features(self, times: Tensor) -> Tensor:
        """Features (N, time_width) of training steps (N,)."""
        return F.gelu(self.time2(F.gelu(self.time1(time_code(times, self.dims.time_width)))))

    def time_modulation(self, times: Tensor) -> Tensor:
        """The time's share of all modulations, (N, M), of training steps (N,)."""
        seen, width = F.silu(self.time_features(times)), self.dims.time_width
        parts = [_product(seen, layer.weight[:, :width]) for layer in self._modulations()]
        return torch.cat(parts, dim=1)

    def observed_modulation(self, observation: Tensor) -> Tensor:
        """The observation's share (R, observation) of all modulations, (R, M)."""
        seen, width = F.silu(observation), self.dims.time_width
        parts = [
            _product(seen, layer.weight[:, width:]) + layer.bias for layer in self._modulations()
        ]
        return torch.cat(parts, dim=1)

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """(B, H, A) and modulations (B, 1 or H, M) to (B, H, A)."""
        dims, positions = self.dims, None
        if dims.rotary_base is not None:
            places = torch.arange(x.shape[1], device=x.device)[None]
            positions = rotary(places, dims.width // dims.num_heads, dims.rotary_base)
        x = self.action_in(x)
        if self.position_embedding is not None:
            x = x + self.position_embedding
        shares = modulation.split([dims.modulation] * dims.depth, dim=2)
        for block, share in zip(self.blocks, shares, strict=True):
            x = block(x, share, positions)
        return self.action_out(x)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """The norm of x, scaled by one more than `scale` and shifted."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Product in the dtype of the weights, float32."""
    return F.linear(x.to(weight.dtype), weight).float()
