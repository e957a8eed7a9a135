"""GR00T N1.5 (arXiv 2503.14734): Eagle's features, and the action head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vla_runtime.families.blocks.attention import images_of_rows
from vla_runtime.families.groot.dimensions import GrootDims
from vla_runtime.families.groot.eagle import EagleFeatures
from vla_runtime.families.groot.head import Memory
from vla_runtime.families.groot.qwen3 import Qwen3
from vla_runtime.families.groot.vision import EagleVision


class GrootN15(EagleFeatures):
    """Vision encoder, language model and head.

    Shapes as the head's; V cameras, N tokens an image, L text tokens, P = V*N + L.
    """

    dims: GrootDims
    vision: EagleVision

    def __init__(self, dims: GrootDims) -> None:
        super().__init__(dims)
        self.vision = EagleVision(dims)
        self.language = Qwen3(dims.language, dims.rms_epsilon, dims.vocabulary)
        self.build_head()

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return what the DiT's cross-attention blocks read; `rows` are `tokens`, `token_mask`.

        `cross_key` and `cross_value` are (blocks, R, heads, P, D); `prefix_mask` is (R, P) bool.
        """
        tokens, token_mask = rows['tokens'], rows['token_mask']
        images = images_of_rows(image_tokens, image_mask, tokens.shape[0])
        embeddings, mask = self.embed_prefix(*images, tokens, token_mask)
        context = self.encode_context(self.features(embeddings, mask), mask)
        blocks = [self.blocks[index] for index in self.dims.cross_blocks]
        keys, values = zip(*(block.attention.keys_values(context) for block in blocks), strict=True)
        return {
            'cross_key': torch.stack(keys),
            'cross_value': torch.stack(values),
            'prefix_mask': mask,
        }

    def memories(self, past: Mapping[str, Tensor]) -> dict[int, Memory]:
        """As `GrootHead.memories`: every cross-attention block reads the whole prefix."""
        return {
            block: (past['cross_key'][index], past['cross_value'][index], past['prefix_mask'])
            for index, block in enumerate(self.dims.cross_blocks)
        }
