"""OpenVLA (arXiv 2406.09246) and OpenVLA-OFT (arXiv 2502.19645): two vision towers and Llama 2.

OpenVLA writes an action token a dimension; OFT decodes a chunk in one pass, for an action head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vla_runtime.families.blocks.attention import images_of_rows
from vla_runtime.families.blocks.interleaving import images_in_text
from vla_runtime.families.blocks.layers import Linear
from vla_runtime.families.blocks.llama import Llama
from vla_runtime.families.openvla.dimensions import OpenVlaDims, OpenVlaOftDims
from vla_runtime.families.openvla.towers import OpenVlaVision
from vla_runtime.families.parallel_network import ParallelNetwork
from vla_runtime.families.token_network import PromptView, TokenNetwork


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
        self.language = Llama(dims.language, dims.rms_epsilon, vocabulary=dims.vocabulary)
        self.token_head = Linear(dims.language.width, dims.vocabulary, bias=False)

    def embed_prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put the image behind the prompt's first token.

        Args:
            image_tokens: (V, N, W); image_mask: (V,) bool.
            **rows: `tokens` (R, L) int64; `token_mask` (R, L) bool, its padding at the end.

        Returns:
            embeddings (R, T, W) float32 and mask (R, T) bool
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
        """As `TokenNetwork.token_logits`."""
        return self.token_head(self.language.norm(x)).float()


class OpenVlaOft(ParallelNetwork):
    """Vision towers, language model, action head; shapes as of `ParallelNetwork`."""

    dims: OpenVlaOftDims
    vision: OpenVlaVision

    def __init__(self, dims: OpenVlaOftDims) -> None:
        language = Llama(dims.language, dims.rms_epsilon, vocabulary=dims.vocabulary)
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
