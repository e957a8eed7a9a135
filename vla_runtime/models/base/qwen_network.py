"""Networks whose features are those of Qwen3-VL's language model (arXiv 2511.21631).

Shapes: R prompt rows, V images, N tokens an image, L text tokens, P = V*N + L, M width, D deepstack
blocks.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from vla_runtime.family.dimensions import DecoderDims
from vla_runtime.family.frame_vision import FrameVisionDims
from vla_runtime.models.base.flow_network import FlowNetwork
from vla_runtime.models.blocks.attention import (
    Rotary,
    causal_attention,
    rotary_frequencies,
    rotary_of_angles,
)
from vla_runtime.models.blocks.decoders import qwen3
from vla_runtime.models.blocks.interleaving import images_in_text, interleaved, separated
from vla_runtime.models.blocks.qwen3_vl import QwenVision
from vla_runtime.models.blocks.transformer import Stack


class QwenDims(Protocol):
    """Sizes of a policy that stands on Qwen3-VL."""

    @property
    def rms_epsilon(self) -> float: ...

    @property
    def rope_base(self) -> float: ...

    @property
    def rope_sections(self) -> tuple[int, int, int]: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def cameras(self) -> int: ...

    @property
    def prompt_length(self) -> int: ...

    @property
    def image_places(self) -> tuple[int, ...]: ...

    @property
    def vision(self) -> FrameVisionDims: ...

    @property
    def language(self) -> DecoderDims: ...

    @property
    def grid(self) -> tuple[int, int]: ...

    @property
    def image_tokens(self) -> int: ...


class QwenNetwork(FlowNetwork):
    """What a network that stands on Qwen3-VL has of it."""

    dims: Any
    vision: QwenVision
    language: Stack

    def build_qwen(self) -> None:
        """Make tower and language model, whose features are those before its final norm."""
        dims: QwenDims = self.dims
        self.vision = QwenVision(dims.vision, dims.language.width)
        self.language = qwen3(dims.language, dims.rms_epsilon, dims.vocabulary, final_norm=False)

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
        return self.language.features(x, rotation, causal_attention(mask), added)
