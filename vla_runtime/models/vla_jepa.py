"""VLA-JEPA (arXiv 2602.10098): Qwen3-VL's features at some tokens of the prompt, and a DiT."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vla_runtime.declarations.vla_jepa import VlaJepaDims
from vla_runtime.models.base.dit_network import DitNetwork, KeyValues
from vla_runtime.models.base.qwen_network import QwenNetwork
from vla_runtime.models.blocks.attention import images_of_rows
from vla_runtime.models.blocks.interleaving import separated


class VlaJepa(QwenNetwork, DitNetwork):
    """Vision encoder, language model and head; shapes as in `DitNetwork`.

    V images of N tokens, L text tokens, n tokens of the prompt that the head reads.
    """

    dims: VlaJepaDims

    def __init__(self, dims: VlaJepaDims) -> None:
        super().__init__(dims)
        self.build_qwen()
        self.build_dit(dims.language.width)

    def places(self, token_mask: Tensor) -> Tensor:
        """Places (R, n) int64 in the text (R, L) of the tokens that the head reads, in a row."""
        dims = self.dims
        length = token_mask.long().sum(dim=1, keepdim=True)
        place = torch.arange(dims.future_tokens, device=token_mask.device)
        places = length - dims.tokens_behind - dims.future_tokens + place
        # A prompt without them is none of the policy's; that it breaks nothing is enough.
        return torch.where(places > 0, places, 0)

    def read(self, features: Tensor, token_mask: Tensor) -> Tensor:
        """Take the features (R, n, M) that the head reads out of all, (R, P, M)."""
        dims = self.dims
        text, _ = separated(features, dims.image_places, dims.image_tokens)
        places = self.places(token_mask)[:, :, None].expand(-1, -1, text.shape[2])
        return text.gather(1, places)

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return `cross_key` and `cross_value`, (cross blocks, R, heads, n, D)."""
        tokens, token_mask = rows['tokens'], rows['token_mask']
        images = images_of_rows(image_tokens, image_mask, tokens.shape[0])
        embeddings, mask = self.embed_prefix(*images, tokens, token_mask)
        context = self.read(self.features(embeddings, mask), token_mask)
        pairs = [
            self.blocks[block].attention.keys_values(context) for block in self.dims.cross_blocks
        ]
        keys, values = zip(*pairs, strict=True)
        return {'cross_key': torch.stack(keys), 'cross_value': torch.stack(values)}

    def memories(self, past: Mapping[str, Tensor]) -> dict[int, KeyValues]:
        keys, values = past['cross_key'], past['cross_value']
        return {
            block: (keys[index], values[index], None)
            for index, block in enumerate(self.dims.cross_blocks)
        }


NETWORKS = {'vla_jepa': VlaJepa}
