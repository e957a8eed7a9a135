"""DiT whose cross-attention blocks read either the text or the images: N1.6 and N1.7.

`prefix` hands over keys and values of just those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vla_runtime.families.blocks.attention import images_of_rows
from vla_runtime.families.blocks.interleaving import separated
from vla_runtime.families.groot.dimensions import AlternatingDims
from vla_runtime.families.groot.head import GrootHead, KeyValues

TEXT, IMAGES = 'text', 'images'


class AlternatingHead(GrootHead):
    """Prefix and context of such a DiT; a subclass adds vision and language model.

    Shapes as the head's; V images, N tokens an image, L text tokens, P = V*N + L.
    """

    dims: AlternatingDims

    def embed_prefix(
        self, image_tokens: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Embeddings (R, P, …) float32 and mask (R, P) bool of text with its images."""
        raise NotImplementedError

    def features(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Features of the language model, (R, P, M)."""
        raise NotImplementedError

    def context_of(self, embeddings: Tensor, mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Context (R, K, M) of text and of images, with their masks (R, K)."""
        context = self.encode_context(self.features(embeddings, mask), mask)
        places, count = self.dims.image_places, self.dims.image_tokens
        parts = zip(separated(context, places, count), separated(mask, places, count), strict=True)
        return dict(zip((TEXT, IMAGES), parts, strict=True))

    @property
    def readers(self) -> dict[str, Sequence[int]]:
        """DiT blocks that read the text and those that read the images, if there are any."""
        blocks = {TEXT: self.dims.text_blocks, IMAGES: self.dims.image_blocks}
        return {part: of_part for part, of_part in blocks.items() if of_part}

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return what the DiT's cross-attention blocks read; `rows` are `tokens`, `token_mask`.

        `text_key` and `text_value` are (blocks, R, heads, L, D), `text_seen` is (R, L) bool;
        `images_key`, `images_value` and `images_seen` have V*N for L.
        """
        tokens, token_mask = rows['tokens'], rows['token_mask']
        images = images_of_rows(image_tokens, image_mask, tokens.shape[0])
        context = self.context_of(*self.embed_prefix(*images, tokens, token_mask))
        past: dict[str, Tensor] = {}
        for part, blocks in self.readers.items():
            read, seen = context[part]
            pairs = [self.blocks[block].attention.keys_values(read) for block in blocks]
            past[f'{part}_key'] = torch.stack([key for key, _ in pairs])
            past[f'{part}_value'] = torch.stack([value for _, value in pairs])
            past[f'{part}_seen'] = seen
        return past

    def memories(self, past: Mapping[str, Tensor]) -> dict[int, KeyValues]:
        return {
            block: (
                past[f'{part}_key'][index],
                past[f'{part}_value'][index],
                past[f'{part}_seen'],
            )
            for part, blocks in self.readers.items()
            for index, block in enumerate(blocks)
        }
