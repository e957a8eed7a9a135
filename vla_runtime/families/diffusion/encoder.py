"""Images of Diffusion Policy: a residual network, and the places of its keypoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.layers import Linear
from vla_runtime.families.blocks.resize import Framing
from vla_runtime.families.blocks.resnet import ResNet
from vla_runtime.families.diffusion.dimensions import DiffusionDims


class Keypoints(nn.Module):
    """Spatial softmax (arXiv 1504.00702): the mean place of each keypoint on a feature map.

    Attributes:
        grid: (places, 2) across and down of each place, from -1 to 1.
    """

    def __init__(self, channels: int, keypoints: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.maps = nn.Conv2d(channels, keypoints, kernel_size=1)
        down, across = (torch.linspace(-1.0, 1.0, count) for count in size)
        places = torch.cartesian_prod(down, across).flip(1)
        # A tensor of the checkpoint: what training computed is what is served.
        self.grid = nn.Parameter(places.contiguous(), requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        """(n, channels, h, w) to (n, keypoints, 2)."""
        maps = F.linear(
            features.flatten(2).transpose(1, 2), self.maps.weight.flatten(1), self.maps.bias
        )
        return maps.transpose(1, 2).softmax(dim=-1) @ self.grid


class Encoder(nn.Module):
    """Framed images to their features: (n, 3, h, w) to (n, 2 * keypoints)."""

    def __init__(self, dims: DiffusionDims) -> None:
        super().__init__()
        self.backbone = ResNet(dims.backbone)
        size = dims.backbone.map_size(dims.seen)
        self.pool = Keypoints(dims.backbone.width, dims.keypoints, size)
        self.out = Linear(dims.image_width, dims.image_width)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.features(self.backbone(pixels).float())

    def features(self, maps: Tensor) -> Tensor:
        """Features (n, 2 * keypoints) of feature maps (n, channels, h', w')."""
        return F.relu(self.out(self.pool(maps).flatten(1)).float())


class EncodedVision(nn.Module):
    """Vision of a policy with one encoder for all cameras: an image is one token."""

    def __init__(self, dims: DiffusionDims) -> None:
        super().__init__()
        self.framing, self.encoder = Framing(dims.resize, dims.crop), Encoder(dims)

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) to (n, 1, 2 * keypoints)."""
        return self.encoder(self.framing(pixels))[:, None]
