"""Networks of GR00T, by family; that of N1.6 has Eagle's features, and N1.7's action head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vla_runtime.families.blocks.attention import (
    Rotary,
    images_of_rows,
    rotary_frequencies,
    rotary_of_angles,
)
from vla_runtime.families.blocks.interleaving import images_in_text, interleaved, separated
from vla_runtime.families.groot.alternation import AlternatingHead
from vla_runtime.families.groot.dimensions import GrootDims
from vla_runtime.families.groot.eagle import EagleFeatures
from vla_runtime.families.groot.head import KeyValues
from vla_runtime.families.groot.n16_dimensions import GrootN16Dims
from vla_runtime.families.groot.n17_dimensions import GrootN17Dims
from vla_runtime.families.groot.qwen3 import Qwen3, causal_attention
from vla_runtime.families.groot.qwen3_vl import QwenVision
from vla_runtime.families.groot.siglip2 import EagleVision2
from vla_runtime.families.groot.vision import EagleVision

# --------------------------------------------------------------------------------------------------
# GR00T N1.5 (arXiv 2503.14734): Eagle's features, and the action head.


class GrootN15(EagleFeatures):
    """Vision encoder, language model and head; see `EagleFeatures` for the shapes."""

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

    def memories(self, past: Mapping[str, Tensor]) -> dict[int, KeyValues]:
        return {
            block: (past['cross_key'][index], past['cross_value'][index], past['prefix_mask'])
            for index, block in enumerate(self.dims.cross_blocks)
        }


# --------------------------------------------------------------------------------------------------
# GR00T N1.7 (NVIDIA Isaac-GR00T): Qwen3-VL's features, and the action head.


class GrootN17(AlternatingHead):
    """Vision encoder, language model and head; shapes as in `AlternatingHead`."""

    dims: GrootN17Dims
    vision: QwenVision

    def __init__(self, dims: GrootN17Dims) -> None:
        super().__init__(dims)
        self.vision = QwenVision(dims)
        self.language = Qwen3(dims.language, dims.rms_epsilon, dims.vocabulary, final_norm=False)
        self.build_head()

    def embed_prefix(
        self, image_tokens: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put images (R, V, N, (1 + D) * M) into the text (R, L), with zeros around what is added.

        Returns embeddings (R, P, (1 + D) * M) float32 and mask (R, P) bool.
        """
        text = self.language.embed(tokens)
        nothing = image_tokens.shape[-1] - text.shape[-1]
        if nothing:
            zeros = torch.zeros(*text.shape[:2], nothing, device=text.device)
            text = torch.cat([text, zeros], dim=-1)
        return images_in_text(text, token_mask, image_tokens, image_mask, self.dims.image_places)

    def starts(self, mask: Tensor) -> Tensor:
        """Return each text token's position, (R, P) int64, or that of its image's first token.

        The next token continues behind an image's longer side; a hidden image takes no positions.
        """
        places, count = self.dims.image_places, self.dims.image_tokens
        longer = max(self.dims.grid)
        text, images = separated(mask, places, count)
        shown = images.view(mask.shape[0], len(places), count)[:, :, :1]
        # As many positions as an image takes, in place of its tokens.
        taken = interleaved(text, shown.expand(-1, -1, longer), places)
        before = taken.long().cumsum(dim=1) - taken.long()
        text, images = separated(before, places, longer)
        first = images.view(mask.shape[0], len(places), longer)[:, :, :1]
        return interleaved(text, first.expand(-1, -1, count), places)

    def offsets(self, device: torch.device) -> Tensor:
        """Offsets (P, 3) int64 of time, row and column of each token from its start."""
        dims = self.dims
        _, columns = dims.grid
        place = torch.arange(dims.image_tokens, device=device)
        grid = torch.stack([torch.zeros_like(place), place // columns, place % columns], dim=-1)
        text = torch.zeros(1, dims.prompt_length, 3, dtype=torch.int64, device=device)
        images = grid[None, None].expand(1, dims.cameras, -1, -1)
        return interleaved(text, images, dims.image_places)[0]

    def axes(self, device: torch.device) -> Tensor:
        """Time (0), row (1) or column (2) by which each pair of a head's numbers turns, in turn."""
        _, rows, columns = self.dims.rope_sections
        pair = torch.arange(self.dims.language.head_dim // 2, device=device)
        is_row = torch.logical_and(pair % 3 == 1, pair < 3 * rows)
        is_column = torch.logical_and(pair % 3 == 2, pair < 3 * columns)
        return is_row.long() + 2 * is_column.long()

    def rotary_positions(self, starts: Tensor) -> Rotary:
        dims = self.dims
        offsets = self.offsets(starts.device)[:, self.axes(starts.device)]
        places = starts[:, None, :, None] + offsets
        frequencies = rotary_frequencies(dims.language.head_dim, dims.rope_base, starts.device)
        return rotary_of_angles(places.float() * frequencies)

    def features(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Language model's features (R, P, M) before its final norm; causal attention."""
        x, *added = embeddings.chunk(1 + len(self.dims.vision.deepstack), dim=-1)
        rotation = self.rotary_positions(self.starts(mask))
        return self.language(x, rotation, causal_attention(mask), added)


# --------------------------------------------------------------------------------------------------


class GrootN16(EagleFeatures, AlternatingHead):
    """Vision encoder, language model and head."""

    dims: GrootN16Dims
    vision: EagleVision2

    def __init__(self, dims: GrootN16Dims) -> None:
        super().__init__(dims)
        self.vision = EagleVision2(dims)
        self.language = Qwen3(dims.language, dims.rms_epsilon, dims.vocabulary)
        self.build_head()


NETWORKS = {'groot_n15': GrootN15, 'groot_n16': GrootN16, 'groot_n17': GrootN17}
