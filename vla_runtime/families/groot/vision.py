"""Eagle's vision tower (arXiv 2504.15271): SigLIP, and a connector to the language model."""

from __future__ import annotations

from torch import Tensor, nn

from vla_runtime.families.blocks.layers import Linear
from vla_runtime.families.blocks.siglip import Siglip
from vla_runtime.families.groot.dimensions import GrootDims


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

    def shuffled(self, x: Tensor) -> Tensor:
        """Join squares of patches row by row: (n, patches, width) to (n, N, edge^2 * width)."""
        if self.edge == 1:
            return x
        n, _, width = x.shape
        edge, few = self.edge, self.side // self.edge
        squares = x.view(n, few, edge, few, edge, width).permute(0, 1, 3, 2, 4, 5)
        return squares.reshape(n, few * few, edge * edge * width)

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) float32 in [-1, 1] to (n, N, language width) float32."""
        return self.connector(self.shuffled(self.patches(pixels))).float()
