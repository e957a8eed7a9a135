"""GR00T's vision towers: SigLIP (N1.5) and SigLIP 2 (N1.6)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.declarations.groot import GrootDims, GrootN16Dims
from vla_runtime.models.blocks.attention import (
    Rotary,
    rotary_frequencies,
    rotary_of_angles,
    rotate,
)
from vla_runtime.models.blocks.layers import Linear
from vla_runtime.models.blocks.siglip import Siglip, shuffle_pixels, vision_block
from vla_runtime.models.blocks.transformer import Attention

# --------------------------------------------------------------------------------------------------
# N1.5: Eagle (arXiv 2504.15271), SigLIP and a connector to the language model.


def connector(inputs: int, outputs: int, layers: int) -> nn.Sequential:
    """Patches to image tokens: a linear layer, or norm, linear layer, exact GELU, linear layer."""
    if layers == 1:
        return nn.Sequential(Linear(inputs, outputs))
    return nn.Sequential(
        nn.LayerNorm(inputs), Linear(inputs, outputs), nn.GELU(), Linear(outputs, outputs)
    )


class EagleVision(Siglip):
    """GR00T N1.5's vision engine: pixels to image tokens of language width."""

    def __init__(self, dims: GrootDims) -> None:
        super().__init__(dims.vision)
        self.edge = dims.pixel_shuffle
        self.side = dims.image_size // dims.vision.patch_size
        inputs = dims.vision.width * dims.pixel_shuffle**2
        self.connector = connector(inputs, dims.language.width, dims.connector_layers)

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) float32 in [-1, 1] to (n, N, language width) float32."""
        patches = self.patches(pixels)
        if self.edge > 1:
            patches = shuffle_pixels(patches, self.side, self.edge)
        return self.connector(patches).float()


# --------------------------------------------------------------------------------------------------
# N1.6: Eagle's SigLIP 2 tower (arXiv 2502.14786), for images of any grid of patches.


class GridAttention(Attention):
    """Self-attention whose heads have the numbers of a rotated pair side by side."""

    def rotate(self, x: Tensor, rotation: Rotary) -> Tensor:
        # Queries and keys are reordered alike, so their products stay.
        pairs = x.unflatten(-1, (x.shape[-1] // 2, 2))
        return rotate(pairs.transpose(-1, -2).reshape(x.shape), rotation)


class EagleVision2(nn.Module):
    """GR00T N1.6's vision engine: pixels to image tokens of language width."""

    def __init__(self, dims: GrootN16Dims) -> None:
        super().__init__()
        vision = dims.vision
        self.dims = vision
        self.patch_embedding = nn.Linear(3 * vision.patch_size**2, vision.width)
        self.position_embedding = nn.Parameter(torch.empty(vision.positions**2, vision.width))
        nn.init.normal_(self.position_embedding, std=0.02)
        self.blocks = nn.ModuleList(
            vision_block(vision, attention=GridAttention) for _ in range(vision.depth)
        )
        self.norm = nn.LayerNorm(vision.width, eps=1e-6)
        self.connector = connector(vision.width * vision.merge**2, dims.language.width, 2)

    def cut(self, pixels: Tensor) -> Tensor:
        """Patches of images (n, 3, height, width): (n, patches, rows * columns * channels)."""
        n, channels, height, width = pixels.shape
        patch = self.dims.patch_size
        rows, columns = height // patch, width // patch
        patches = pixels.view(n, channels, rows, patch, columns, patch).permute(0, 2, 4, 3, 5, 1)
        return patches.reshape(n, rows * columns, patch * patch * channels)

    def positions(self, rows: int, columns: int) -> Tensor:
        """Position embeddings of a grid of patches, (patches, width), row by row.

        The square table is resized bilinearly with antialiasing, pixel centres at halves.
        """
        table, side = self.position_embedding, self.dims.positions
        square = table.view(side, side, -1)
        across = torch.einsum('xc,ycw->yxw', resizing(side, columns, table.device), square)
        found = torch.einsum('ry,yxw->rxw', resizing(side, rows, table.device), across)
        return found.flatten(0, 1)

    def places(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Column and row of each patch, (patches, 2) int64."""
        place = torch.arange(rows * columns, device=device)
        return torch.stack([place % columns, place // columns], dim=1)

    def rotary(self, rows: int, columns: int, device: torch.device) -> Rotary | None:
        """Rotary positions of a grid of patches: pairs turn by column and row, by turns."""
        if self.dims.rope_base is None:
            return None
        frequencies = rotary_frequencies(self.dims.head_dim // 2, self.dims.rope_base, device)
        places = self.places(rows, columns, device).float()
        angles = frequencies[None, :, None] * places[:, None]
        return rotary_of_angles(angles.flatten(1)[None, None])

    def windows(self, rows: int, columns: int, device: torch.device) -> Tensor | None:
        """Patches that each patch sees, (1, patches, patches) bool: those of its own window."""
        if self.dims.window is None:
            return None
        corner = self.places(rows, columns, device) // self.dims.window
        row, column = (corner[:, None] == corner[None]).unbind(dim=-1)
        return torch.logical_and(row, column)[None]

    def unshuffled(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Join squares of patches: (n, rows * columns, width) to (n, N, width * merge * merge).

        Squares stand row by row; the numbers of a square are by channel, then row, then column.
        """
        n, _, width = x.shape
        edge = self.dims.merge
        squares = x.view(n, rows // edge, edge, columns // edge, edge, width)
        return squares.permute(0, 1, 3, 5, 2, 4).reshape(
            n, (rows // edge) * (columns // edge), width * edge * edge
        )

    def patches(self, pixels: Tensor) -> Tensor:
        """(n, 3, height, width) float32 in [-1, 1] to (n, patches, width) float32."""
        rows, columns = (edge // self.dims.patch_size for edge in pixels.shape[2:])
        x = self.patch_embedding(self.cut(pixels)) + self.positions(rows, columns)
        rotary = self.rotary(rows, columns, pixels.device)
        windows = self.windows(rows, columns, pixels.device)
        for number, block in enumerate(self.blocks, start=1):
            x = block(x, None if number in self.dims.full_attention else windows, rotary)
        return self.norm(x)

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, height, width) float32 in [-1, 1] to (n, N, language width) float32."""
        rows, columns = (edge // self.dims.patch_size for edge in pixels.shape[2:])
        return self.connector(self.unshuffled(self.patches(pixels), rows, columns)).float()


def resizing(side: int, count: int, device: torch.device) -> Tensor:
    """Weights (count, side) that resize an axis: a triangle as wide as a step, 1 at least."""
    scale = side / count
    centres = (torch.arange(count, device=device) + 0.5) * scale
    places = torch.arange(side, device=device) + 0.5
    weights = F.relu(1 - (places[None] - centres[:, None]).abs() / max(scale, 1.0))
    return weights / weights.sum(dim=1, keepdim=True)
