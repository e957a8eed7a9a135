"""OpenVLA (arXiv 2406.09246): two vision towers, Llama 2, and an action token a dimension."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vla_runtime.families.blocks.attention import attend, images_of_rows, rotary
from vla_runtime.families.blocks.interleaving import images_in_text
from vla_runtime.families.blocks.layers import Linear
from vla_runtime.families.blocks.llama import Llama
from vla_runtime.families.openvla.dimensions import OpenVlaDims
from vla_runtime.families.openvla.towers import OpenVlaVision
from vla_runtime.families.token_network import TokenCache, TokenNetwork


class OpenVla(TokenNetwork):
    """Vision towers, language model, bins.

    Shapes: R prompt rows, N image tokens, L prompt tokens, T = N + L what the prompt takes, K
    tokens of an answer, P = T + K - 1 places, W language width, D head dimension.
    """

    dims: OpenVlaDims
    vision: OpenVlaVision

    def __init__(self, dims: OpenVlaDims) -> None:
        super().__init__()
        self.dims = dims
        self.vision = OpenVlaVision(dims)
        self.language = Llama(dims.language, dims.rms_epsilon, vocabulary=dims.vocabulary)
        self.token_head = Linear(dims.language.width, dims.vocabulary, bias=False)

    @property
    def answer_length(self) -> int:
        """K, a token for each action."""
        return self.dims.action_dim

    def embed_prefix(
        self, image_tokens: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put the image behind the prompt's first token.

        Args:
            image_tokens: (V, N, W); image_mask: (V,) bool.
            tokens: (R, L) int64; token_mask: (R, L) bool, its padding at the end.

        Returns:
            embeddings (R, T, W) float32 and mask (R, T) bool
        """
        images, seen = images_of_rows(image_tokens, image_mask, tokens.shape[0])
        text, places = self.language.embed(tokens), (1,) * self.dims.cameras
        return images_in_text(text, token_mask, images, seen, places)

    def read_prompt(
        self, embeddings: Tensor, mask: Tensor
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Run the language model over a prompt.

        Attention is causal and blind to padding. Positions count every place.

        Args:
            embeddings: (R, T, W) float32; mask: (R, T) bool, padding at the end.

        Returns:
            rotated keys and values (R, kv_heads, T, D) of each layer, and the logits
            (R, vocabulary) float32 behind the last token
        """
        length = embeddings.shape[1]
        places = torch.arange(length, device=embeddings.device)
        rotation = rotary(places[None], self.dims.language.head_dim, self.dims.rope_base)
        causal = torch.ones(1, length, length, dtype=torch.bool, device=mask.device).tril()
        seen = torch.logical_and(mask[:, None], causal)
        x, keys, values = embeddings, [], []
        for block in self.language.layers:
            q, k, v = block.project(x, rotation)
            x = block.combine(x, attend(q, k, v, seen))
            keys.append(k)
            values.append(v)
        last = places[None] == self._prompt_end(mask)[:, None] - 1
        return keys, values, self._logits(torch.where(last[:, :, None], x, 0.0).sum(dim=[1]))

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return `prefix_key`, `prefix_value`, `prefix_mask` and `logits`.

        The first two are (layers, R, kv_heads, P, D), zero in the free places; the mask is (R, P)
        bool, `logits` (R, vocabulary) float32. `rows` are `tokens` (R, L) int64 and `token_mask`
        (R, L) bool.
        """
        embeddings, mask = self.embed_prefix(
            image_tokens, image_mask, rows['tokens'], rows['token_mask']
        )
        keys, values, logits = self.read_prompt(embeddings, mask)
        free = self.dims.free_places
        hidden = torch.zeros(mask.shape[0], free, dtype=torch.bool, device=mask.device)
        return {
            'prefix_key': _with_free_places(torch.stack(keys), free),
            'prefix_value': _with_free_places(torch.stack(values), free),
            'prefix_mask': torch.cat([mask, hidden], dim=1),
            'logits': logits,
        }

    def first_cache(self, past: Mapping[str, Tensor]) -> tuple[Tensor, TokenCache]:
        """As `TokenNetwork.first_cache`."""
        layers = range(self.dims.language.depth)
        keys, values = (
            tuple(past[name][layer] for layer in layers) for name in ('prefix_key', 'prefix_value')
        )
        return past['logits'], TokenCache(keys, values, past['prefix_mask'])

    def read_token(
        self, token: Tensor, number: int, cache: TokenCache
    ) -> tuple[Tensor, TokenCache]:
        """As `TokenNetwork.read_token`."""
        dims = self.dims
        places = torch.arange(dims.prefix_length, device=token.device)
        here = places == dims.prefix_length - dims.free_places + number
        seen = torch.logical_or(cache.seen, here[None])
        position = self._prompt_end(cache.seen[:, : dims.prefix_length - dims.free_places]) + number
        rotation = rotary(position[:, None], dims.language.head_dim, dims.rope_base)
        x, keys, values = self.language.embed(token[:, None]), [], []
        for layer, block in enumerate(self.language.layers):
            q, k, v = block.project(x, rotation)
            keys.append(torch.where(here[:, None], k, cache.keys[layer]))
            values.append(torch.where(here[:, None], v, cache.values[layer]))
            x = block.combine(x, attend(q, keys[-1], values[-1], seen[:, None]))
        return self._logits(x[:, 0]), TokenCache(tuple(keys), tuple(values), seen)

    def decode(self, tokens: Tensor) -> Tensor:
        """Centres of the bins: (R, K) to (R, 1, A) float32.

        The last token of the vocabulary in use is the first bin. Tokens that are no bin's count as
        the nearest one's.
        """
        dims = self.dims
        last = dims.action_bins - 2
        bins = tokens.float() * -1.0 + (dims.used_vocabulary - 1)
        bins = torch.where(bins > 0, bins, 0.0)
        bins = torch.where(bins < last, bins, float(last))
        width = 2.0 / (dims.action_bins - 1)
        return (bins * width + (0.5 * width - 1.0))[:, None]

    def _prompt_end(self, mask: Tensor) -> Tensor:
        """Place behind the last token of each prompt, (R,) int64, of a mask (R, T)."""
        images = self.dims.cameras * self.dims.image_tokens
        text = torch.cat([mask[:, :1], mask[:, 1 + images :]], dim=1)
        return text.to(torch.int64).sum(dim=[1]) + images

    def _logits(self, x: Tensor) -> Tensor:
        """Logits (R, vocabulary) float32 of (R, W), behind the last layer."""
        return self.token_head(self.language.norm(x)).float()


def _with_free_places(tensor: Tensor, count: int) -> Tensor:
    """(layers, R, kv_heads, T, D) to (layers, R, kv_heads, T + count, D), zeros behind."""
    layers, rows, heads, _, head_dim = tensor.shape
    free = torch.zeros(
        layers, rows, heads, count, head_dim, dtype=tensor.dtype, device=tensor.device
    )
    return torch.cat([tensor, free], dim=3)


NETWORKS = {'openvla': OpenVla}
