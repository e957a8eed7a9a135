"""Eagle's language model (arXiv 2504.15271): a Qwen3 whose features follow its final norm."""

from __future__ import annotations

from torch import Tensor

from vla_runtime.families.blocks.attention import rotary
from vla_runtime.families.blocks.interleaving import images_in_text
from vla_runtime.families.groot.head import GrootHead
from vla_runtime.families.groot.qwen3 import Qwen3, causal_attention


class EagleFeatures(GrootHead):
    """Text, images and features of N1.5 and N1.6; shapes as in `AlternatingHead`."""

    language: Qwen3

    def embed_prefix(
        self, image_tokens: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put images (R, V, N, M) into the text (R, L): (R, P, M) float32 and mask (R, P) bool."""
        text = self.language.embed(tokens)
        return images_in_text(text, token_mask, image_tokens, image_mask, self.dims.image_places)

    def features(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Features (R, P, M) behind the final norm; a hidden camera is as if not in the prompt."""
        positions = mask.long().cumsum(dim=1) - 1
        rotation = rotary(positions, self.dims.language.head_dim, self.dims.rope_base)
        return self.language(embeddings, rotation, causal_attention(mask))
