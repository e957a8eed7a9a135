"""Resize and crop of images inside a network, as training code does them on normalised pixels."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def resize_bilinear(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize (n, C, h, w) to (n, C, *size), bilinear with antialiasing, not keeping the aspect.

    Weights are triangles as wide as a pixel of the coarser grid (torchvision's `resize` on
    tensors).
    """
    high, wide = pixels.shape[-2:]
    if size[0] != high:
        pixels = _weights(high, size[0], pixels.device) @ pixels
    if size[1] != wide:
        pixels = pixels @ _weights(wide, size[1], pixels.device).transpose(0, 1)
    return pixels


def _weights(before: int, after: int, device: torch.device) -> Tensor:
    """Weights (after, before) float32 of an axis; each row sums to 1."""
    scale = before / after
    reach = max(scale, 1.0)
    centres = (torch.arange(after, dtype=torch.float32, device=device) + 0.5) * scale
    places = torch.arange(before, dtype=torch.float32, device=device) + 0.5
    distance = (places[None] - centres[:, None]) / reach
    # |d| as a maximum: fewer operators than the export would need for it.
    weights = (1.0 - torch.maximum(distance, -distance)).relu()
    return weights / weights.sum(dim=[1], keepdim=True)


def bicubic_weights(before: int, after: int, device: torch.device) -> Tensor:
    """Weights (after, before) float32 of a bicubic resize with antialiasing; rows sum to 1."""
    scale = before / after
    reach = max(scale, 1.0)
    centres = (torch.arange(after, dtype=torch.float32, device=device) + 0.5) * scale
    places = torch.arange(before, dtype=torch.float32, device=device) + 0.5
    signed = (places[None] - centres[:, None]) / reach
    x = torch.maximum(signed, -signed)
    # Keys' kernel with the coefficient -0.5, as PyTorch has it with antialiasing.
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((2.5 - 0.5 * x) * x - 4.0) * x + 2.0
    weights = torch.where(x < 1.0, near, torch.where(x < 2.0, far, 0.0))
    return weights / weights.sum(dim=[1], keepdim=True)


def crop_middle(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut the middle (n, C, *size) out of (n, C, h, w); halves round to even, as torchvision's."""
    high, wide = pixels.shape[-2:]
    top, left = round((high - size[0]) / 2), round((wide - size[1]) / 2)
    return pixels[:, :, top : top + size[0], left : left + size[1]]


class Framing(nn.Module):
    """Resize and crop of a camera's images."""

    def __init__(self, resize: tuple[int, int] | None, crop: tuple[int, int] | None) -> None:
        super().__init__()
        self.resize, self.crop = resize, crop

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) to (n, 3, height, width) of what the network sees."""
        if self.resize is not None:
            pixels = resize_bilinear(pixels, self.resize)
        return pixels if self.crop is None else crop_middle(pixels, self.crop)


class FramedVision(nn.Module):
    """Vision of a policy with an encoder for each camera: the pixels, which the prefix encodes."""

    def __init__(self, resize: tuple[int, int] | None, crop: tuple[int, int] | None) -> None:
        super().__init__()
        self.framing = Framing(resize, crop)

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) to (n, 3 * height, width): rows of pixels, colour by colour."""
        return self.framing(pixels).flatten(1, 2)
