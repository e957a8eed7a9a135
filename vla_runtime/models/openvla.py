"""OpenVLA (arXiv 2406.09246) and OpenVLA-OFT (arXiv 2502.19645): two vision towers and Llama 2.

OpenVLA writes an action token a dimension; OFT decodes a chunk in one pass, for an action head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.declarations.openvla import (
    BackboneDims,
    Channels,
    OpenVlaDims,
    OpenVlaOftDims,
)
from vla_runtime.family.dimensions import VisionDims
from vla_runtime.models.base.parallel_network import ParallelNetwork
from vla_runtime.models.base.token_network import PromptView, TokenNetwork
from vla_runtime.models.blocks.attention import images_of_rows
from vla_runtime.models.blocks.decoders import llama
from vla_runtime.models.blocks.interleaving import images_in_text
from vla_runtime.models.blocks.layers import Linear
from vla_runtime.models.blocks.siglip import PatchEmbedding, vision_block

# --------------------------------------------------------------------------------------------------
# OpenVLA's two vision towers, DINOv2 (arXiv 2304.07193) and SigLIP as timm has them: features of
# the block before the last, without the final norm, exact GELU. And their projector.


class Tower(nn.Module):
    """A vision transformer: pixels to one vector per patch.

    With `registers`, tokens, there is a class token, and branches are scaled (DINOv2); None: a
    tower without any of these (SigLIP).
    """

    def __init__(self, dims: VisionDims, registers: int | None = None) -> None:
        super().__init__()
        self.patch_embedding = PatchEmbedding(dims)
        self.position_embedding = nn.Parameter(torch.empty(1, dims.tokens, dims.width))
        nn.init.normal_(self.position_embedding, std=0.02)
        self.class_token: nn.Parameter | None = None
        self.registers: nn.Parameter | None = None
        if registers is not None:
            self.class_token = nn.Parameter(torch.zeros(1, 1, dims.width))
            self.registers = nn.Parameter(torch.zeros(1, registers, dims.width))
        self.blocks = nn.ModuleList(
            vision_block(dims, F.gelu, scaled=registers is not None) for _ in range(dims.depth)
        )

    def embed(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) to (n, tokens, width): class token, registers, patches with positions."""
        patches = self.patch_embedding(pixels) + self.position_embedding
        if self.class_token is None or self.registers is None:
            return patches
        first = [part.expand(len(patches), -1, -1) for part in (self.class_token, self.registers)]
        return torch.cat([*first, patches], dim=1)

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) float32, normalised as the tower was trained, to (n, N, width)."""
        x = self.embed(pixels)
        for block in self.blocks:
            x = block(x)
        beside = 0 if self.registers is None else 1 + self.registers.shape[1]
        return x[:, beside:]


class Projector(nn.Module):
    """Features of both towers to the width of the language model."""

    def __init__(self, inputs: int, hidden: int, width: int) -> None:
        super().__init__()
        self.fc1 = Linear(inputs, hidden)
        self.fc2 = Linear(hidden, width)
        self.fc3 = Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x))))).float()


class OpenVlaVision(nn.Module):
    """OpenVLA's vision engine: pixels to image tokens of language width."""

    def __init__(self, dims: BackboneDims) -> None:
        super().__init__()
        self.dims = dims
        self.dino = Tower(dims.dino, dims.dino_registers)
        self.siglip = Tower(dims.siglip)
        self.projector = Projector(
            dims.dino.width + dims.siglip.width, dims.projector_dim, dims.language.width
        )

    def features(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) float32 in [-1, 1] to the features of both towers, DINOv2's first."""
        dims = self.dims
        dino = self.dino(_normalised(pixels, dims.dino_mean, dims.dino_std))
        siglip = self.siglip(_normalised(pixels, dims.siglip_mean, dims.siglip_std))
        return torch.cat([dino, siglip], dim=-1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode images (n, 3, S, S) float32 in [-1, 1] to (n, N, language width) float32."""
        return self.projector(self.features(pixels))


def _normalised(pixels: Tensor, mean: Channels, std: Channels) -> Tensor:
    """Pixels in [-1, 1] to a tower's scale, whose mean and deviation are of [0, 1]."""
    channels = [
        (pixels[:, channel : channel + 1] * 0.5 + (0.5 - mean[channel])) / std[channel]
        for channel in range(3)
    ]
    return torch.cat(channels, dim=1)


# --------------------------------------------------------------------------------------------------


class OpenVla(TokenNetwork):
    """Vision towers and language model.

    Shapes: R prompt rows, N image tokens, L prompt tokens, T = N + L places of the prompt.
    """

    dims: OpenVlaDims
    vision: OpenVlaVision

    def __init__(self, dims: OpenVlaDims) -> None:
        super().__init__()
        self.dims = dims
        self.vision = OpenVlaVision(dims)
        self.language = llama(dims.language, dims.rms_epsilon, dims.vocabulary)
        self.token_head = Linear(dims.language.width, dims.vocabulary, bias=False)

    def embed_prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put image tokens (V, N, W) behind the first token of the prompt (R, L).

        Padding is at the end. Returns embeddings (R, T, W) float32 and mask (R, T) bool.
        """
        tokens = rows['tokens']
        images, seen = images_of_rows(image_tokens, image_mask, tokens.shape[0])
        text, places = self.language.embed(tokens), (1,) * self.dims.cameras
        return images_in_text(text, rows['token_mask'], images, seen, places)

    def view(self, mask: Tensor) -> PromptView:
        """Causal and blind to padding; positions count every place."""
        length = mask.shape[1]
        places = torch.arange(length, device=mask.device)
        causal = torch.ones(1, length, length, dtype=torch.bool, device=mask.device).tril()
        seen = torch.logical_and(mask[:, None], causal)
        return PromptView(places[None], seen, self.answer_position(mask) - 1)

    def answer_position(self, mask: Tensor) -> Tensor:
        """Place behind the last token of each prompt."""
        images = self.dims.cameras * self.dims.image_tokens
        text = torch.cat([mask[:, :1], mask[:, 1 + images :]], dim=1)
        return text.to(torch.int64).sum(dim=[1]) + images

    def token_logits(self, x: Tensor) -> Tensor:
        return self.token_head(self.language.norm(x)).float()


class OpenVlaOft(ParallelNetwork):
    """Vision towers, language model, action head; shapes as of `ParallelNetwork`."""

    dims: OpenVlaOftDims
    vision: OpenVlaVision

    def __init__(self, dims: OpenVlaOftDims) -> None:
        language = llama(dims.language, dims.rms_epsilon, dims.vocabulary)
        super().__init__(dims, OpenVlaVision(dims), language)

    def embed_prompt(
        self, text: Tensor, token_mask: Tensor, images: Tensor, seen: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put images, then the state, behind the prompt's first token."""
        there = torch.ones(text.shape[0], 1, dtype=torch.bool, device=text.device)
        text = torch.cat([text[:, :1], state[:, None], text[:, 1:]], dim=1)
        mask = torch.cat([token_mask[:, :1], there, token_mask[:, 1:]], dim=1)
        return images_in_text(text, mask, images, seen, (1,) * self.dims.cameras)


NETWORKS = {'openvla': OpenVla, 'openvla_oft': OpenVlaOft}
