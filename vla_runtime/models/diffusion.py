"""Networks of Diffusion Policy: encoders of images, and a U-Net over the actions."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.declarations.diffusion import LAST_GROUPS, DiffusionDims, UNetDims
from vla_runtime.models.base.diffusion_network import DiffusionNetwork
from vla_runtime.models.blocks.layers import Linear
from vla_runtime.models.blocks.products import FEW, Product
from vla_runtime.models.blocks.resize import FramedVision, Framing
from vla_runtime.models.blocks.resnet import ConvNorm, ResNet
from vla_runtime.models.blocks.time_code import time_code

# --------------------------------------------------------------------------------------------------
# Images of Diffusion Policy: a residual network, and the places of its keypoints.


class Keypoints(nn.Module):
    """Spatial softmax (arXiv 1504.00702): the mean place of each keypoint on a feature map.

    `grid` is (places, 2): across and down of each place, from -1 to 1.
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


# --------------------------------------------------------------------------------------------------
# The U-Net of Diffusion Policy (arXiv 2303.04137) over the actions of a chunk. Its modulation is
# linear in Mish(time features, observation), so it is a sum: the time's contribution is a row of
# the time table, the observation's is computed in the prefix, and a step adds the two.

# Convolutions between levels: three actions down to every second one, and four up.
_DOWN, _UP = 3, 4


class Conv(nn.Conv1d):
    """A convolution that computes in the dtype of its own weights; its result is float32."""

    _product: Product | None = None

    def fold(self, dtype: torch.dtype) -> None:
        """Compute in a dtype from now on, on a CPU as one product; the weights must not change."""
        self.to(dtype)
        if self.weight.device.type == 'cpu':
            self._product, matrix = _packed(self.weight.flatten(1), self.bias)
            self.weight = nn.Parameter(matrix.view(self.weight.shape), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self._product is None:
            return super().forward(x.to(self.weight.dtype)).float()
        padding = int(self.padding[0])
        columns = F.pad(x, (padding, padding)).unfold(2, self.kernel_size[0], self.stride[0])
        rows = columns.permute(0, 2, 1, 3).flatten(2)
        return self._product(rows).float().transpose(1, 2)


class Grow(nn.ConvTranspose1d):
    """A transposed convolution likewise; (B, C, H) to (B, C, 2 H)."""

    _product: Product | None = None

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, _UP, stride=2, padding=1)

    def fold(self, dtype: torch.dtype) -> None:
        self.to(dtype)
        if self.weight.device.type == 'cpu':
            # Rows of the matrix: the weights of the four taps, one tap after the other.
            taps = self.weight.permute(2, 1, 0)
            self._product, matrix = _packed(taps.flatten(0, 1), None)
            weight = matrix.view(taps.shape).permute(2, 1, 0)
            self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        if self._product is None:
            return super().forward(x.to(self.weight.dtype)).float()
        assert self.bias is not None
        shares = self._product(x.transpose(1, 2)).float().unflatten(2, (_UP, -1))
        # Place p reaches the places 2 p - 1 to 2 p + 2: every place has a share of two.
        first, even, odd, last = shares.unbind(2)
        even = even + F.pad(last[:, :-1], (0, 0, 1, 0)) + self.bias
        odd = odd + F.pad(first[:, 1:], (0, 0, 0, 1)) + self.bias
        return torch.stack([even, odd], dim=2).flatten(1, 2).transpose(1, 2)


def _packed(matrix: Tensor, bias: Tensor | None) -> tuple[Product, Tensor]:
    """Return the product of a matrix (outputs, inputs), and the matrix as the product has it."""
    outputs, inputs = matrix.shape
    layer = Linear(inputs, outputs, bias=bias is not None, device='meta')
    layer.weight = nn.Parameter(matrix, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return Product([layer], FEW), layer.weight


class ConvBlock(nn.Module):
    """Convolution, group norm and Mish; (B, inputs, H) to (B, outputs, H)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, groups: int) -> None:
        super().__init__()
        self.conv = Conv(inputs, outputs, kernel, padding=kernel // 2)
        self.norm = nn.GroupNorm(groups, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.mish(self.norm(self.conv(x)))


class ResidualBlock(nn.Module):
    """Two convolutions, the first modulated, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, condition: int, dims: UNetDims) -> None:
        super().__init__()
        self.scaled = dims.scaled
        self.conv1 = ConvBlock(inputs, outputs, dims.kernel_size, dims.groups)
        self.modulation = Linear(condition, outputs * (2 if dims.scaled else 1))
        self.conv2 = ConvBlock(outputs, outputs, dims.kernel_size, dims.groups)
        self.shortcut = Conv(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """(B, inputs, H) and the modulation (B, M) to (B, outputs, H)."""
        out = self.conv1(x)
        shaped = modulation[:, :, None]
        if self.scaled:
            scale, shift = shaped.chunk(2, dim=1)
            out = scale * out + shift
        else:
            out = out + shaped
        out = self.conv2(out)
        return out + (x if self.shortcut is None else self.shortcut(x))


class UNet(nn.Module):
    """Noisy actions (`actions` numbers each) and an observation's numbers to the prediction."""

    def __init__(self, dims: UNetDims, actions: int, observation: int) -> None:
        super().__init__()
        self.dims = dims
        condition = dims.time_width + observation
        self.time1 = nn.Linear(dims.time_width, 4 * dims.time_width)
        self.time2 = nn.Linear(4 * dims.time_width, dims.time_width)

        def block(inputs: int, outputs: int) -> ResidualBlock:
            return ResidualBlock(inputs, outputs, condition, dims)

        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        widths = (actions, *dims.channels)
        last = len(dims.channels) - 1
        for level, (before, after) in enumerate(pairwise(widths)):
            self.down.append(nn.ModuleList([block(before, after), block(after, after)]))
            if level < last:
                self.shrink.append(Conv(after, after, _DOWN, stride=2, padding=1))
        top = dims.channels[-1]
        self.middle = nn.ModuleList([block(top, top), block(top, top)])
        for level in range(last, 0, -1):
            before, after = dims.channels[level], dims.channels[level - 1]
            # The skip of this level is beside what comes from below.
            self.up.append(nn.ModuleList([block(2 * before, after), block(after, after)]))
            self.grow.append(Grow(after))
        first = dims.channels[0]
        self.last = ConvBlock(first, first, dims.kernel_size, LAST_GROUPS)
        self.out = Conv(first, actions, 1)

    @property
    def blocks(self) -> list[ResidualBlock]:
        found = (self.get_submodule(name) for name in self.dims.block_names)
        return [block for block in found if isinstance(block, ResidualBlock)]

    def time_features(self, times: Tensor) -> Tensor:
        """Features (N, time_width) of training steps (N,)."""
        return self.time2(F.mish(self.time1(time_code(times, self.dims.time_width))))

    def time_modulation(self, times: Tensor) -> Tensor:
        """The time's contribution to all modulations, (N, M), of training steps (N,)."""
        seen, width = F.mish(self.time_features(times)), self.dims.time_width
        parts = [_product(seen, b.modulation.weight[:, :width]) for b in self.blocks]
        return torch.cat(parts, dim=1)

    def observed_modulation(self, observation: Tensor) -> Tensor:
        """The observation's contribution (R, observation) to all modulations, (R, M)."""
        seen, width = F.mish(observation), self.dims.time_width
        parts = [
            _product(seen, b.modulation.weight[:, width:]) + b.modulation.bias for b in self.blocks
        ]
        return torch.cat(parts, dim=1)

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """(B, H, A) and modulations (B, M) to (B, H, A)."""
        shares = list(modulation.split(self.dims.modulations, dim=1))
        x = x.transpose(1, 2)
        skips = []
        for level, blocks in enumerate(self.down):
            x = _run(blocks, x, shares)
            skips.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
        x = _run(self.middle, x, shares)
        for level, blocks in enumerate(self.up):
            x = _run(blocks, torch.cat([x, skips.pop()], dim=1), shares)
            x = self.grow[level](x)
        return self.out(self.last(x)).transpose(1, 2)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.to(weight.dtype), weight).float()


def _run(blocks: nn.Module, x: Tensor, shares: list[Tensor]) -> Tensor:
    for block in blocks:  # type: ignore[attr-defined]
        x = block(x, shares.pop(0))
    return x


# --------------------------------------------------------------------------------------------------


class Diffusion(DiffusionNetwork):
    """Diffusion Policy at inference.

    Shapes: V images, C cameras, T steps of the observation, S state of a step, H horizon, A
    actions, M numbers of all modulations.
    """

    dims: DiffusionDims

    def __init__(self, dims: DiffusionDims) -> None:
        super().__init__()
        self.dims = dims
        self.vision: nn.Module = EncodedVision(dims)
        self.encoders: nn.ModuleList | None = None
        if dims.separate_encoders:
            self.vision = FramedVision(dims.resize, dims.crop)
            self.encoders = nn.ModuleList(Encoder(dims) for _ in range(dims.own_cameras))
        self.unet = UNet(dims.unet, dims.action_dim, dims.observation_steps * dims.step_width)

    def fold_constants(self) -> None:
        """Put frozen norms into the convolutions, which run in bfloat16 if the matrices do."""
        matrices = self.unet.blocks[0].modulation.weight.dtype
        precision = torch.bfloat16 if matrices == torch.bfloat16 else torch.float32
        for module in self.modules():
            if isinstance(module, (ConvNorm, Conv, Grow)):
                module.fold(precision)

    def image_features(self, image_tokens: Tensor, image_mask: Tensor) -> Tensor:
        """Features (T, C, 2 * keypoints) of the images, oldest step first; zeros for hidden ones.

        `image_tokens` is (V, N, W), `image_mask` (V,) bool.
        """
        dims = self.dims
        steps, cameras = dims.observation_steps, dims.own_cameras
        if self.encoders is None:
            features = image_tokens[:, 0].unflatten(0, (steps, cameras))
        else:
            pixels = image_tokens.view(steps, cameras, 3, *dims.seen)
            of_cameras = [
                encoder(pixels[:, camera]) for camera, encoder in enumerate(self.encoders)
            ]
            features = torch.stack(of_cameras, dim=1)
        seen = image_mask.view(steps, cameras, 1)
        features = torch.where(seen, features, 0.0)
        # The newest step comes first among the images.
        return torch.stack([features[steps - 1 - step] for step in range(steps)])

    def observation(self, features: Tensor, state: Tensor) -> Tensor:
        """Put (R, T * step_width) together: state, images and environment, oldest step first.

        `features` is (R or 1, T, C, 2 * keypoints), `state` (R, T, S) float32.
        """
        joints = self.dims.state_dim - self.dims.environment_dim
        features = features.flatten(2).expand(state.shape[0], -1, -1)
        parts = [state[:, :, :joints], features]
        if self.dims.environment_dim:
            parts.append(state[:, :, joints:])
        return torch.cat(parts, dim=2).flatten(1)

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return `modulation` (R, M): the observation's contribution to the U-Net's."""
        features = self.image_features(image_tokens, image_mask)
        observation = self.observation(features[None], rows['state'])
        return {'modulation': self.unet.observed_modulation(observation)}

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Rows (N, M) of training steps (N,): the time's contribution."""
        return self.unet.time_modulation(times)

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
        """Return the prediction (B, H, A) at x (B or 1, H, A)."""
        modulation = past['modulation']
        return self.unet(x.expand(modulation.shape[0], -1, -1), modulation + conditioning)


NETWORKS = {'diffusion': Diffusion}
