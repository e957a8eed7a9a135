"""pi0-FAST (arXiv 2501.09747): SigLIP and Gemma, with text and actions in one vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_runtime.declarations.pi0_fast import Pi0FastDims
from vla_runtime.models.base.token_network import PromptView, TokenNetwork
from vla_runtime.models.blocks.attention import images_of_rows
from vla_runtime.models.blocks.decoders import gemma
from vla_runtime.models.blocks.layers import Linear
from vla_runtime.models.blocks.siglip import VisionEncoder


class Pi0Fast(TokenNetwork):
    """Vision encoder and language model.

    Shapes: R prompt rows, V cameras, N tokens an image, L prompt tokens, T = V * N + L.
    """

    dims: Pi0FastDims
    vision: VisionEncoder

    def __init__(self, dims: Pi0FastDims) -> None:
        super().__init__()
        self.dims = dims
        self.vision = VisionEncoder(dims.vision, dims.language.width)
        self.language = gemma(dims.language, dims.vocabulary)
        # Not the text table: LeRobot's checkpoints hold both.
        self.token_head = Linear(dims.language.width, dims.vocabulary, bias=False)

    def embed_prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Concatenate image tokens (V, N, W) and embedded text (R, L), images first.

        Returns embeddings (R, T, W) float32 and mask (R, T) bool.
        """
        tokens = rows['tokens']
        images, seen = images_of_rows(image_tokens, image_mask, tokens.shape[0])
        mask = seen.repeat_interleave(images.shape[2], dim=1)
        embeddings = torch.cat([images.flatten(1, 2), self.language.embed(tokens)], dim=1)
        return embeddings, torch.cat([mask, rows['token_mask']], dim=1)

    def view(self, mask: Tensor) -> PromptView:
        """Valid tokens see all valid tokens; positions count them."""
        positions = mask.to(torch.int64).cumsum(dim=1) - 1
        images = self.dims.cameras * self.dims.vision.tokens
        text = mask[:, images:].to(torch.int64).sum(dim=[1])
        return PromptView(positions, mask[:, None], text + (images - 1))

    def answer_position(self, mask: Tensor) -> Tensor:
        """Position behind that of the last valid token."""
        return mask.to(torch.int64).sum(dim=[1])

    def token_logits(self, x: Tensor) -> Tensor:
        return self.token_head(self.language.norm(x)).float()


NETWORKS = {'pi0_fast': Pi0Fast}
