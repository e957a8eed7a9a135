"""Sine code of the time of a denoise step (arXiv 1706.03762); `flow_time` has it in NumPy."""

from __future__ import annotations

import torch
from torch import Tensor

# Logarithm of the longest wavelength over the shortest, 10000.
TIME_CODE_SPAN = 9.210340371976184


def time_code(times: Tensor, width: int) -> Tensor:
    """Sines, then cosines of training steps (N,), (N, width): wavelengths of 2 pi to 20000 pi."""
    half = width // 2
    places = torch.arange(half, dtype=torch.float32, device=times.device)
    frequencies = torch.exp(places * (-TIME_CODE_SPAN / (half - 1)))
    angles = times[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)
