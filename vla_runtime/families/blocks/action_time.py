"""The flow time mixed into the noisy actions by a small MLP (arXiv 2410.24164).

The MLP's first layer sees [action, time] side by side, so its time half is a constant of the step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.flow_time import LONGEST, SHORTEST


def time_embedding(times: Tensor, width: int) -> Tensor:
    """Sine-cosine embedding of the flow time, periods 4e-3 to 4, computed in float64.

    Args:
        times: (N,) float32 flow times in [0, 1].
        width: even; half sines, then half cosines.

    Returns:
        (N, width) float32
    """
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=times.device)
    period = SHORTEST * (LONGEST / SHORTEST) ** fraction
    angle = times.to(torch.float64)[:, None] * (2.0 * math.pi / period)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(torch.float32)


def time_share(layer: nn.Linear, times: Tensor) -> Tensor:
    """Return the time's share of the MLP's first layer, with bias; (N,) flow times to (N, W)."""
    width = layer.out_features
    return F.linear(time_embedding(times, width), layer.weight[:, width:], layer.bias)


def mix_time(layer: nn.Linear, out: nn.Linear, embedded: Tensor, conditioning: Tensor) -> Tensor:
    """Mix projected noisy actions and their flow time into action tokens.

    Args:
        layer, out: the MLP's layers.
        embedded: (B, H, W).
        conditioning: rows of `time_share`, (B or 1, W); (B or 1, H, W) with one for each action.

    Returns:
        (B, H, W)
    """
    weight = layer.weight[:, : layer.out_features]
    time = conditioning if conditioning.dim() == 3 else conditioning[:, None]
    return out(F.silu(F.linear(embedded, weight) + time))
