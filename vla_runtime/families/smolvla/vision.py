"""SmolVLM2's vision tower: SigLIP, its patches shuffled into fewer and wider image tokens."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from vla_runtime.families.blocks.layers import Linear
from vla_runtime.families.blocks.siglip import Siglip
from vla_runtime.families.smolvla.dimensions import SmolVlaDims

# torch.arange computes float32 numbers in pairs of vectors, whatever the processor has.
_VECTOR = 8
_PAIR = 2 * _VECTOR


def position_rows(side: int) -> list[int]:
    """Return the row of the position table for each row of patches; columns use the same.

    Transformers sorts i / side into buckets of 1 / side in float32. For most sides row i takes row
    i; for some (19, 25, 29, 31, 38, 40, …) a bound is off by one rounding, and a row is used
    twice. Policies were trained with those positions.
    """
    step = np.float32(1.0) / np.float32(side)
    places = np.minimum(np.arange(side, dtype=np.float32) * step, np.float32(1.0 - 1e-6))
    return [int(row) for row in np.searchsorted(_bounds(side), places, side='right')]


def _bounds(side: int) -> np.ndarray:
    """Return torch.arange(1 / side, 1, 1 / side) in float32, to the bit.

    PyTorch rounds the first number of each vector, adds the offsets of the others, and rounds
    again. Numbers after the last full pair of vectors are rounded once.
    """
    step = 1.0 / side
    count = math.ceil((1.0 - step) / step)
    exact = step + np.arange(count) * step
    whole = count - count % _PAIR
    first = exact[:whole:_VECTOR].astype(np.float32).astype(np.float64)
    exact[:whole] = (first[:, None] + np.arange(_VECTOR) * step).ravel()
    return exact.astype(np.float32)


class SmolVlmVision(Siglip):
    """SmolVLA's vision engine: pixels to image tokens of language width."""

    def __init__(self, dims: SmolVlaDims) -> None:
        super().__init__(dims.vision)
        self.edge = dims.pixel_shuffle
        self.side = dims.image_size // dims.vision.patch_size
        self._position_rows = position_rows(self.side)
        self.projector = Linear(
            dims.vision.width * dims.pixel_shuffle**2, dims.language.width, bias=False
        )

    def positions(self) -> Tensor:
        rows, table = self._position_rows, self.position_embedding
        if all(b - a == 1 for a, b in pairwise(rows)):
            return table
        grid = table.view(self.side, self.side, -1)
        for axis in (0, 1):
            grid = torch.stack([grid.select(axis, row) for row in rows], dim=axis)
        return grid.flatten(0, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode images.

        Args:
            pixels: (n, 3, S, S) float32 in [-1, 1].

        Returns:
            (n, N, language width) float32 image tokens, not yet scaled by sqrt(width)
        """
        return self.project(self.patches(pixels))

    def project(self, patches: Tensor) -> Tensor:
        """Shuffle patches into fewer tokens: (n, side^2, width) to (n, N, language width)."""
        n, _, width = patches.shape
        edge, few = self.edge, self.side // self.edge
        squares = patches.view(n, few, edge, few, edge, width).permute(0, 1, 3, 2, 4, 5)
        return self.projector(squares.reshape(n, few * few, edge * edge * width)).float()
