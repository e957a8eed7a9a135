"""GR00T's action head (arXiv 2503.14734): self-attention over the features, and a DiT.

The training code masks no padding in the self-attention over the features; here it
is masked, so that every prompt is as if alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vla_runtime.declarations.groot import AlternatingDims, HeadDims
from vla_runtime.family.dit import StackDims
from vla_runtime.models.base.dit_network import EPSILON, DitNetwork, KeyValues
from vla_runtime.models.blocks.attention import images_of_rows
from vla_runtime.models.blocks.interleaving import separated
from vla_runtime.models.blocks.layers import LayerNorm, gelu_tanh
from vla_runtime.models.blocks.transformer import Attention, Block, Mlp


def context_block(dims: StackDims, width: int) -> Block:
    """Self-attention and MLP over the language model's features."""
    return Block(
        lambda: LayerNorm(width, eps=EPSILON),
        lambda: Attention(width, dims.num_heads, head_dim=dims.head_dim),
        lambda: Mlp(width, dims.mlp_dim, gelu_tanh),
    )


# Parts of the context that blocks of the DiT read, and the names of their masks.
WHOLE, TEXT, IMAGES = 'cross', 'text', 'images'
_SEEN = {WHOLE: 'prefix_mask', TEXT: 'text_seen', IMAGES: 'images_seen'}


class GrootHead(DitNetwork):
    """Context blocks and DiT; a subclass adds vision and language model.

    The cross-attention blocks of N1.5 read the whole context, those of N1.6 and N1.7 either the
    text or the images.

    Shapes: R prompt rows, V images, N tokens an image, L text tokens, P = V*N + L, H horizon, A
    padded action dimension, S padded state dimension, M language width, W DiT width.
    """

    dims: HeadDims

    def build_head(self) -> None:
        """Make the head's layers, behind those of vision and language model in the state dict."""
        dims = self.dims
        language = dims.language.width
        self.context_norm = nn.LayerNorm(language)
        context = dims.context
        self.context = nn.ModuleList(
            []
            if context is None
            else [context_block(context, language) for _ in range(context.depth)]
        )
        self.build_dit(language)

    def embed_prefix(
        self, image_tokens: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Embeddings (R, P, …) float32 and mask (R, P) bool of text (R, L) with its images.

        Image tokens are (R, V, N, …), their mask (R, V).
        """
        raise NotImplementedError

    def features(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Features of the language model, (R, P, M)."""
        raise NotImplementedError

    @property
    def readers(self) -> dict[str, Sequence[int]]:
        """DiT blocks that read a part of the context: all of it, or text and images by turns."""
        dims = self.dims
        if not isinstance(dims, AlternatingDims):
            return {WHOLE: dims.cross_blocks}
        blocks = {TEXT: dims.text_blocks, IMAGES: dims.image_blocks}
        return {part: of_part for part, of_part in blocks.items() if of_part}

    def parts_of(self, context: Tensor, mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Parts (R, K, M) of the context (R, P, M), with their masks (R, K)."""
        dims = self.dims
        if not isinstance(dims, AlternatingDims):
            return {WHOLE: (context, mask)}
        separate = [separated(x, dims.image_places, dims.image_tokens) for x in (context, mask)]
        return dict(zip((TEXT, IMAGES), zip(*separate, strict=True), strict=True))

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return what the DiT's cross-attention blocks read; `rows` are `tokens`, `token_mask`.

        For each part that blocks read, `cross` or `text` and `images`, its `_key` and `_value`,
        (blocks, R, heads, K, D), and its mask (R, K) bool.
        """
        tokens, token_mask = rows['tokens'], rows['token_mask']
        images = images_of_rows(image_tokens, image_mask, tokens.shape[0])
        embeddings, mask = self.embed_prefix(*images, tokens, token_mask)
        context = self.encode_context(self.features(embeddings, mask), mask)
        parts = self.parts_of(context, mask)
        past: dict[str, Tensor] = {}
        for part, blocks in self.readers.items():
            read, seen = parts[part]
            pairs = [self.blocks[block].attention.keys_values(read) for block in blocks]
            past[f'{part}_key'] = torch.stack([key for key, _ in pairs])
            past[f'{part}_value'] = torch.stack([value for _, value in pairs])
            past[_SEEN[part]] = seen
        return past

    def memories(self, past: Mapping[str, Tensor]) -> dict[int, KeyValues]:
        """Keys, values (R, heads, K, D) and mask (R, K) that each cross-attention block reads."""
        return {
            block: (past[f'{part}_key'][index], past[f'{part}_value'][index], past[_SEEN[part]])
            for part, blocks in self.readers.items()
            for index, block in enumerate(blocks)
        }

    def encode_context(self, features: Tensor, mask: Tensor) -> Tensor:
        """Self-attention over the features, (R, P, M)."""
        x = self.context_norm(features)
        for block in self.context:
            x = block(x, mask[:, None])
        return x
