"""The flow time mixed into the noisy actions by a small MLP (arXiv 2410.24164).

Its first layer sees [action, time] side by side, so its time half is a constant of the step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.family.flow_time import LONGEST, SHORTEST


def time_embedding(times: Tensor, width: int) -> Tensor:
    """Sine-cosine embedding of flow times (N,) in [0, 1], periods 4e-3 to 4; (N, width) float32.

    Computed in float64; half sines, then half cosines.
    """
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=times.device)
    period = SHORTEST * (LONGEST / SHORTEST) ** fraction
    angle = times.to(torch.float64)[:, None] * (2.0 * math.pi / period)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(torch.float32)


def time_share(layer: nn.Linear, times: Tensor) -> Tensor:
    """Return the time's contribution to the MLP's first layer, with bias; (N,) to (N, W)."""
    width = layer.out_features
    return F.linear(time_embedding(times, width), layer.weight[:, width:], layer.bias)


def mix_time(layer: nn.Linear, out: nn.Linear, embedded: Tensor, conditioning: Tensor) -> Tensor:
    """Mix projected noisy actions (B, H, W) and their flow time into action tokens (B, H, W).

    `layer` and `out` are the MLP's; `conditioning` has rows of `time_share`, (B or 1, W), or
    (B or 1, H, W) with one for each action.
    """
    weight = layer.weight[:, : layer.out_features]
    time = conditioning if conditioning.dim() == 3 else conditioning[:, None]
    return out(F.silu(F.linear(embedded, weight) + time))
