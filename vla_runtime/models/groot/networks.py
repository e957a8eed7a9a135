"""GR00T N1.5, N1.6 and N1.7 (arXiv 2503.14734): a language model's features, a DiT."""

from __future__ import annotations

from torch import Tensor

from vla_runtime.declarations.groot import GrootDims, GrootN16Dims, GrootN17Dims
from vla_runtime.models.base.qwen_network import QwenNetwork
from vla_runtime.models.blocks.attention import causal_attention, rotary
from vla_runtime.models.blocks.decoders import qwen3
from vla_runtime.models.blocks.interleaving import images_in_text
from vla_runtime.models.blocks.transformer import Stack
from vla_runtime.models.groot.head import GrootHead
from vla_runtime.models.groot.towers import EagleVision, EagleVision2

# --------------------------------------------------------------------------------------------------
# Eagle's language model (arXiv 2504.15271), a Qwen3 whose features follow its final norm.


class EagleFeatures(GrootHead):
    """Text, images and features of N1.5 and N1.6; shapes as in `GrootHead`."""

    language: Stack

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
        x = self.language.features(embeddings, rotation, causal_attention(mask))
        features: Tensor = self.language.norm(x)
        return features


# --------------------------------------------------------------------------------------------------
# GR00T N1.5 (arXiv 2503.14734): Eagle's features, and the action head.


class GrootN15(EagleFeatures):
    """Vision encoder, language model and head; see `EagleFeatures` for the shapes."""

    dims: GrootDims
    vision: EagleVision

    def __init__(self, dims: GrootDims) -> None:
        super().__init__(dims)
        self.vision = EagleVision(dims)
        self.language = qwen3(dims.language, dims.rms_epsilon, dims.vocabulary)
        self.build_head()


class GrootN16(EagleFeatures):
    """Vision encoder, language model and head."""

    dims: GrootN16Dims
    vision: EagleVision2

    def __init__(self, dims: GrootN16Dims) -> None:
        super().__init__(dims)
        self.vision = EagleVision2(dims)
        self.language = qwen3(dims.language, dims.rms_epsilon, dims.vocabulary)
        self.build_head()


# --------------------------------------------------------------------------------------------------
# GR00T N1.7 (NVIDIA Isaac-GR00T): Qwen3-VL's features, and the action head.


class GrootN17(QwenNetwork, GrootHead):
    """Vision encoder, language model and head; shapes as in `GrootHead`."""

    dims: GrootN17Dims

    def __init__(self, dims: GrootN17Dims) -> None:
        super().__init__(dims)
        self.build_qwen()
        self.build_head()


NETWORKS = {'groot_n15': GrootN15, 'groot_n16': GrootN16, 'groot_n17': GrootN17}
