"""Eagle's language model (arXiv 2504.15271): a Qwen3 whose features follow its final norm."""

from __future__ import annotations

from torch import Tensor

from vla_runtime.families.blocks.attention import rotary
from vla_runtime.families.blocks.interleaving import images_in_text
from vla_runtime.families.groot.head import GrootHead
from vla_runtime.families.groot.qwen3 import Qwen3, causal_attention


class EagleFeatures(GrootHead):
    """Text, images and features of N1.5 and N1.6.

    Shapes as the head's; V cameras, N tokens an image, L text tokens, P = V*N + L.
    """

    language: Qwen3

    def embed_prefix(
        self, image_tokens: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put images into the text, each at its place.

        Image tokens are (R, V, N, M) with mask (R, V) bool, tokens and their mask (R, L). Returns
        embeddings (R, P, M) float32 and mask (R, P) bool.
        """
        text = self.language.embed(tokens)
        return images_in_text(text, token_mask, image_tokens, image_mask, self.dims.image_places)

    def features(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Language model's features (R, P, M) after its final norm; causal attention.

        A hidden camera is as if it were not in the prompt. Features of hidden tokens are
        meaningless.
        """
        positions = mask.long().cumsum(dim=1) - 1
        rotation = rotary(positions, self.dims.language.head_dim, self.dims.rope_base)
        return self.language(embeddings, rotation, causal_attention(mask))
