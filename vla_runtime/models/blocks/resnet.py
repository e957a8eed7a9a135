"""Residual network (arXiv 1512.03385) with frozen batch norms, or with group norms.

The stride of a bottleneck is on its 3x3 convolution, as in torchvision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.family.dimensions import ResNetDims

_EPSILON = 1e-5


class FrozenNorm(nn.Module):
    """Numbers of a batch norm whose statistics no longer change."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.running_mean = nn.Parameter(torch.zeros(channels), requires_grad=False)
        self.running_var = nn.Parameter(torch.ones(channels), requires_grad=False)

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """Factor and summand of every channel, (channels,) each."""
        scale = self.weight * torch.rsqrt(self.running_var + _EPSILON)
        return scale, self.bias - self.running_mean * scale


class ConvNorm(nn.Module):
    """A convolution without bias and its norm; with a frozen one, one convolution with bias.

    Once folded it computes in the dtype that it was folded for. `groups` are those of a group norm;
    0 for a frozen one.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, bias=False)
        self.norm = nn.GroupNorm(groups, outputs) if groups else FrozenNorm(outputs)
        self.stride, self.dilation = stride, dilation
        self.padding = dilation * (kernel // 2)
        self._folded: tuple[Tensor, Tensor] | None = None

    def fold(self, dtype: torch.dtype) -> None:
        """Keep the convolution with a frozen norm in it; the weights must not change afterwards."""
        if not isinstance(self.norm, FrozenNorm):
            return
        weight, bias = (tensor.to(dtype) for tensor in self._fold())
        if weight.device.type == 'cpu':
            weight = weight.contiguous(memory_format=torch.channels_last)
        self._folded = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) to (n, outputs, ceil(h / stride), ceil(w / stride))."""
        if isinstance(self.norm, nn.GroupNorm):
            weight = self.conv.weight
            x = F.conv2d(x, weight, None, self.stride, self.padding, self.dilation)
            return self.norm(x)
        on_device = self._folded is not None and self._folded[0].device == x.device
        weight, bias = self._folded if self._folded and on_device else self._fold()
        return F.conv2d(x.to(weight.dtype), weight, bias, self.stride, self.padding, self.dilation)

    def _fold(self) -> tuple[Tensor, Tensor]:
        assert isinstance(self.norm, FrozenNorm)
        scale, shift = self.norm.scale_and_shift()
        return self.conv.weight * scale[:, None, None, None], shift


class Block(nn.Module):
    """A residual block of two convolutions, or a bottleneck of three."""

    def __init__(
        self, dims: ResNetDims, inputs: int, channels: int, stride: int, dilation: int
    ) -> None:
        super().__init__()
        outputs = channels * dims.expansion
        inner, outer = dims.groups(channels), dims.groups(outputs)
        if dims.bottleneck:
            convolutions = [
                ConvNorm(inputs, channels, 1, groups=inner),
                ConvNorm(channels, channels, 3, stride, dilation, groups=inner),
                ConvNorm(channels, outputs, 1, groups=outer),
            ]
        else:
            convolutions = [
                ConvNorm(inputs, channels, 3, stride, groups=inner),
                ConvNorm(channels, channels, 3, groups=inner),
            ]
        self.convolutions = nn.ModuleList(convolutions)
        self.shortcut: ConvNorm | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = ConvNorm(inputs, outputs, 1, stride, groups=outer)

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.shortcut is None else self.shortcut(x)
        *first, last = self.convolutions
        for convolution in first:
            x = F.relu(convolution(x))
        return F.relu(last(x) + residual)


class ResNet(nn.Module):
    """Images to the last feature map."""

    def __init__(self, dims: ResNetDims) -> None:
        super().__init__()
        self.stem = ConvNorm(3, dims.stem, 7, stride=2, groups=dims.groups(dims.stem))
        self.stages = nn.ModuleList()
        inputs, last = dims.stem, len(dims.blocks) - 1
        for index, (channels, count) in enumerate(zip(dims.channels, dims.blocks, strict=True)):
            kept = index == 0 or (index == last and dims.dilated)
            # torchvision's first block of a dilated stage has the dilation of the stage before.
            dilations = [1] + [2 if index == last and dims.dilated else 1] * (count - 1)
            blocks = []
            for number, dilation in enumerate(dilations):
                stride = 1 if kept or number else 2
                blocks.append(Block(dims, inputs, channels, stride, dilation))
                inputs = channels * dims.expansion
            self.stages.append(nn.ModuleList(blocks))

    def stem_map(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) to the map of the stem, after its pooling."""
        return F.max_pool2d(F.relu(self.stem(pixels)), kernel_size=3, stride=2, padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) float32 to (n, channels, h', w'); see `ResNetDims.map_size`."""
        x = self.stem_map(pixels)
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleList)
            for block in stage:
                x = block(x)
        return x
