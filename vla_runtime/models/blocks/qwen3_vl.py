"""Qwen3-VL's tower (arXiv 2511.21631): patches with rotary positions, merged by squares."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.family.frame_vision import FRAMES, FrameVisionDims
from vla_runtime.models.blocks.attention import (
    Rotary,
    rotary_frequencies,
    rotary_of_angles,
)
from vla_runtime.models.blocks.layers import Linear
from vla_runtime.models.blocks.siglip import vision_block

ROTARY_BASE = 10000.0


class FramePatches(nn.Module):
    """Patches of an image, in two equal frames, to tokens: a convolution as a matrix product."""

    def __init__(self, dims: FrameVisionDims) -> None:
        super().__init__()
        patch = dims.patch_size
        self.weight = nn.Parameter(torch.empty(dims.width, 3, FRAMES, patch, patch))
        self.bias = nn.Parameter(torch.zeros(dims.width))
        nn.init.normal_(self.weight, std=1 / math.sqrt(3 * FRAMES * patch**2))

    def forward(self, patches: Tensor) -> Tensor:
        """(n, patches, 3, patch, patch) to (n, patches, width)."""
        frames = torch.stack([patches] * FRAMES, dim=3)
        return F.linear(frames.flatten(2), self.weight.flatten(1), self.bias)


class Merger(nn.Module):
    """Squares of patches to tokens of language width; `joined_norm` is over a whole square."""

    def __init__(self, dims: FrameVisionDims, outputs: int, joined_norm: bool) -> None:
        super().__init__()
        self.square = dims.merge**2
        self.joined_norm = joined_norm
        inputs = dims.width * self.square
        self.norm = nn.LayerNorm(inputs if joined_norm else dims.width, eps=1e-6)
        self.fc1 = Linear(inputs, inputs)
        self.fc2 = Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(n, patches, width), square by square, to (n, N, outputs) float32."""
        squares = (x.shape[0], x.shape[1] // self.square, -1)
        x = self.norm(x.view(squares)) if self.joined_norm else self.norm(x).view(squares)
        return self.fc2(F.gelu(self.fc1(x))).float()


class QwenVision(nn.Module):
    """Pixels to image tokens, those of deepstack beside them."""

    def __init__(self, vision: FrameVisionDims, outputs: int) -> None:
        super().__init__()
        self.dims = vision
        self.patch_embedding = FramePatches(vision)
        self.position_embedding = nn.Parameter(torch.empty(vision.positions**2, vision.width))
        nn.init.normal_(self.position_embedding, std=0.02)
        self.blocks = nn.ModuleList(vision_block(vision) for _ in range(vision.depth))
        self.merger = Merger(vision, outputs, joined_norm=False)
        self.deepstack = nn.ModuleList(
            Merger(vision, outputs, joined_norm=True) for _ in vision.deepstack
        )

    def squares(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Order (…, rows * columns, w), row by row, square by square and row by row within."""
        edge, lead = self.dims.merge, x.shape[:-2]
        x = x.view(*lead, rows // edge, edge, columns // edge, edge, x.shape[-1])
        return x.transpose(-4, -3).reshape(*lead, rows * columns, x.shape[-1])

    def cut(self, pixels: Tensor) -> Tensor:
        """Patches of images: (n, 3, height, width) to (n, patches, 3, patch, patch)."""
        n, channels, height, width = pixels.shape
        patch = self.dims.patch_size
        rows, columns = height // patch, width // patch
        patches = pixels.view(n, channels, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
        patches = self.squares(patches.reshape(n, rows * columns, -1), rows, columns)
        return patches.view(n, rows * columns, channels, patch, patch)

    def positions(self, rows: int, columns: int) -> Tensor:
        """Position embeddings of a grid of patches, (patches, width), square by square.

        The square table is interpolated bilinearly, its corners on the grid's.
        """
        table = self.position_embedding
        side = self.dims.positions
        down, across = _taps(rows, side, table.device), _taps(columns, side, table.device)
        found = torch.zeros(rows * columns, table.shape[1], device=table.device)
        for row, row_weight in down:
            for column, column_weight in across:
                places = row[:, None] * side + column[None]
                weights = row_weight[:, None] * column_weight[None]
                found = found + table[places.flatten()] * weights.flatten()[:, None]
        return self.squares(found, rows, columns)

    def rotary(self, rows: int, columns: int, device: torch.device) -> Rotary:
        """Rotary positions of a grid of patches, square by square: row angles, column angles."""
        row = torch.arange(rows, device=device)[:, None].expand(-1, columns)
        column = torch.arange(columns, device=device)[None].expand(rows, -1)
        places = torch.stack([row.flatten(), column.flatten()], dim=1)
        places = self.squares(places, rows, columns)
        frequencies = rotary_frequencies(self.dims.head_dim // 2, ROTARY_BASE, device)
        angles = places[:, :, None].float() * frequencies
        return rotary_of_angles(angles.flatten(1)[None, None])

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode images (n, 3, height, width) float32 in [-1, 1].

        Returns (n, N, (1 + deepstack blocks) * language width) float32: an image token, then what
        the language model adds to it behind each of its first blocks.
        """
        rows, columns = (edge // self.dims.patch_size for edge in pixels.shape[2:])
        x = self.patch_embedding(self.cut(pixels)) + self.positions(rows, columns)
        rotary = self.rotary(rows, columns, pixels.device)
        deep = dict(zip(self.dims.deepstack, self.deepstack, strict=True))
        added = []
        for number, block in enumerate(self.blocks, start=1):
            x = block(x, None, rotary)
            if number in deep:
                added.append(deep[number](x))
        return torch.cat([self.merger(x), *added], dim=-1)


def _taps(
    count: int, side: int, device: torch.device
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Lower and upper table row of each of `count` points, (count,) int64, and its weight."""
    places = torch.linspace(0, side - 1, count, device=device)
    low = places.long()
    high = (low + 1).clamp(max=side - 1)
    share = places - low
    return (low, 1 - share), (high, share)
