"""The sizes of a residual network. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Channels of a bottleneck's output for each of its inner ones (arXiv 1512.03385, table 1).
_EXPANSION = 4
_STEM_SHRINKS = 2
# Channels of a group of a group norm, at least.
_GROUP = 16


@dataclass(frozen=True)
class ResNetDims:
    """A residual network up to its last feature map (arXiv 1512.03385), as torchvision builds it.

    Attributes:
        stem: channels after the first convolution.
        channels: inner channels of the blocks of each of the four stages.
        blocks: blocks of each stage.
        bottleneck: blocks of three convolutions (ResNet 50 and more), not of two.
        dilated: the last stage keeps the size of its input, its later blocks dilated by two.
        norm: `batch`, with frozen statistics, or `group` (arXiv 1803.08494), a group for every 16
            channels.
    """

    stem: int
    channels: tuple[int, int, int, int]
    blocks: tuple[int, int, int, int]
    bottleneck: bool = False
    dilated: bool = False
    norm: Literal['batch', 'group'] = 'batch'

    def __post_init__(self) -> None:
        if self.dilated and not self.bottleneck:
            raise ValueError('dilated is for bottleneck blocks; others have no dilated form')
        for n in (self.stem, *self.channels) if self.norm == 'group' else ():
            if n < _GROUP or n % self.groups(n):
                raise ValueError(
                    f'norm group: {n} channels do not part into the {n // _GROUP} groups of a norm '
                    f'(one for every {_GROUP})'
                )

    @property
    def expansion(self) -> int:
        """Channels of a block's output for each of its inner ones."""
        return _EXPANSION if self.bottleneck else 1

    def groups(self, channels: int) -> int:
        """Return the groups of a norm of so many channels; 0 for frozen statistics."""
        return channels // _GROUP if self.norm == 'group' else 0

    @property
    def width(self) -> int:
        """Channels of the feature map."""
        return self.channels[-1] * self.expansion

    @property
    def depth(self) -> int:
        """Layers, as in the name: 18 for ResNet-18."""
        return sum(self.blocks) * (3 if self.bottleneck else 2) + 2

    def map_size(self, image: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the feature map of an image of this height and width."""
        halvings = _STEM_SHRINKS + len(self.blocks) - (2 if self.dilated else 1)
        for _ in range(halvings):
            image = ((image[0] + 1) // 2, (image[1] + 1) // 2)
        return image
