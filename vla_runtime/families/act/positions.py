"""Positions of the places of a feature map, as sines and cosines."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Largest wavelength over the smallest, and what keeps the last place just below a full turn.
_TEMPERATURE = 10000.0
_EPSILON = 1e-6


def map_positions(height: int, width: int, channels: int, device: torch.device) -> Tensor:
    """Sine code of a map's rows, then of its columns (DETR, arXiv 2005.12872, appendix A.4).

    Place i of n is the angle 2 pi (i + 1) / n. Numbers 2j and 2j + 1 of a code are the sine and
    the cosine of that angle over 10000^(2j / (channels / 2)).

    Args:
        height, width: height and width of the map.
        channels: W, a multiple of 4; half for the row and half for the column.
        device: device of the result.

    Returns:
        (height * width, W) float32, row by row
    """
    half = channels // 2
    rows, columns = (_code(count, half, device) for count in (height, width))
    both = [
        rows[:, None].expand(height, width, half),
        columns[None].expand(height, width, half),
    ]
    return torch.cat(both, dim=-1).reshape(height * width, channels)


def _code(count: int, numbers: int, device: torch.device) -> Tensor:
    """Sine code of the places 0 to count - 1 of an axis, (count, numbers)."""
    places = torch.arange(1, count + 1, dtype=torch.float32, device=device)
    angles = places / (count + _EPSILON) * (2 * math.pi)
    exponents = torch.arange(0, numbers, 2, dtype=torch.float32, device=device) / numbers
    angles = angles[:, None] / _TEMPERATURE**exponents
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
