"""Network of a `tokens` head: a language model writes actions as tokens, one a pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vla_runtime.family.declaration import TokenDims, free_places
from vla_runtime.models.base.flow_network import FlowNetwork
from vla_runtime.models.blocks.attention import attend, rotary


class TokenPass(NamedTuple):
    """Outputs of one pass: `logits` (R, vocabulary) float32, likeliest `token` (R,) int64.

    `key` and `value`, (layers, R, kv_heads, D), are of the token that was read, for its place.
    """

    logits: Tensor
    token: Tensor
    key: Tensor
    value: Tensor


class PromptView(NamedTuple):
    """How the language model looks at the prompts.

    Attributes:
        positions: (R, T) int64 rotary positions.
        sees: (R, T or 1, T) bool, True where a token sees another.
        last: (R,) int64 place of the token behind which the answer begins.
    """

    positions: Tensor
    sees: Tensor
    last: Tensor


class TokenNetwork(FlowNetwork):
    """Network of a `tokens` head: greedy, one token a pass, all passes of the same shapes.

    `prefix` returns keys and values of the prompt and the logits of the first token. Each pass
    reads one token back and returns the logits of the next. The last token is not read back, so K
    tokens take K - 1 passes and free places.

    Shapes: R prompt rows, T places of the prompt, K tokens of an answer, F = K - 1 free places, D
    head dimension, W width of the language model.
    """

    dims: TokenDims
    language: Any

    @abstractmethod
    def embed_prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return embeddings (R, T, W) float32 and mask (R, T) bool of a prompt with its images."""

    @abstractmethod
    def view(self, mask: Tensor) -> PromptView:
        """Return how prompts with this mask (R, T) bool are looked at."""

    @abstractmethod
    def answer_position(self, mask: Tensor) -> Tensor:
        """Return the rotary position (R,) int64 of the first token of each answer."""

    @abstractmethod
    def token_logits(self, x: Tensor) -> Tensor:
        """Return logits (…, vocabulary) float32 of (…, W), behind the last layer."""

    def read_prompt(
        self, embeddings: Tensor, mask: Tensor
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Run the language model over prompts, embeddings (R, T, W) float32 and mask (R, T) bool.

        Returns rotated keys and values (R, kv_heads, T, D) of each layer, and the logits (R,
        vocabulary) float32 of the first token.
        """
        view = self.view(mask)
        rotation = self.rotary(view.positions)
        x, keys, values = embeddings, [], []
        for block in self.language.layers:
            q, k, v = block.project(x, rotation)
            x = block.combine(x, attend(q, k, v, view.sees))
            keys.append(k)
            values.append(v)
        return keys, values, self.token_logits(place_of(x, view.last))

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return `prefix_key`, `prefix_value`, `prefix_mask` and `logits`.

        The first two are (layers, R, kv_heads, T, D), the mask (R, T) bool, `logits`
        (R, vocabulary) float32. `rows` are `tokens` (R, L) int64 and `token_mask` (R, L) bool.
        """
        embeddings, mask = self.embed_prefix(image_tokens, image_mask, **rows)
        keys, values, logits = self.read_prompt(embeddings, mask)
        return {
            'prefix_key': torch.stack(keys),
            'prefix_value': torch.stack(values),
            'prefix_mask': mask,
            'logits': logits,
        }

    def answer_places(self, past: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Make empty keys and values (F, layers, R, kv_heads, D) of an answer."""
        layers, rows, heads, _, head_dim = past['prefix_key'].shape
        shape = (free_places(self.dims), layers, rows, heads, head_dim)
        key, value = (torch.zeros_like(past['prefix_key']).new_zeros(shape) for _ in range(2))
        return key, value

    def read_token(
        self,
        tokens: Tensor,
        place: Tensor,
        past: Mapping[str, Tensor],
        answer_key: Tensor,
        answer_value: Tensor,
    ) -> TokenPass:
        """Read one token of the answer back.

        Args:
            tokens: (R, 1) int64.
            place: () int64, its place in the answer, 0 to F - 1.
            past: outputs of `prefix`; `logits` is not read.
            answer_key, answer_value: (F, layers, R, kv_heads, D), filled below `place`; the rest
                does not matter.
        """
        mask = past['prefix_mask']
        places = torch.arange(answer_key.shape[0], device=place.device)
        here, before = places == place, places < place
        filled = torch.logical_or(here, before)[None].expand(mask.shape[0], -1)
        seen = torch.cat([mask, filled], dim=1)[:, None]
        rotation = self.rotary((self.answer_position(mask) + place)[:, None])
        x, keys, values = self.language.embed(tokens), [], []
        for layer, block in enumerate(self.language.layers):
            q, k, v = block.project(x, rotation)
            # Whatever stands in the other places is hidden, but zero times NaN is NaN.
            written = (
                torch.where(before[:, None], held[:, layer].permute(1, 2, 0, 3), 0.0)
                for held in (answer_key, answer_value)
            )
            own = [
                torch.where(here[:, None], new, old)
                for new, old in zip((k, v), written, strict=True)
            ]
            every_key, every_value = (
                torch.cat([past[name][layer], part], dim=2)
                for name, part in zip(('prefix_key', 'prefix_value'), own, strict=True)
            )
            x = block.combine(x, attend(q, every_key, every_value, seen))
            keys.append(k[:, :, 0])
            values.append(v[:, :, 0])
        logits = self.token_logits(x[:, 0])
        return TokenPass(logits, logits.argmax(dim=-1), torch.stack(keys), torch.stack(values))

    def answer(self, past: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the greedy answer (R, K) int64 and its logits (R, K, vocabulary)."""
        key, value = self.answer_places(past)
        every = [past['logits']]
        tokens = [every[0].argmax(dim=-1)]
        for number in range(self.dims.answer_length - 1):
            place = torch.tensor(number, device=key.device)
            found = self.read_token(tokens[-1][:, None], place, past, key, value)
            key[number], value[number] = found.key, found.value
            tokens.append(found.token)
            every.append(found.logits)
        return torch.stack(tokens, dim=1), torch.stack(every, dim=1)

    def time_conditioning(self, times: Tensor) -> Tensor:
        return torch.zeros(times.shape[0], 1, device=times.device)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        dims: Any = self.dims
        return rotary(positions, dims.language.head_dim, dims.rope_base)


def place_of(x: Tensor, places: Tensor) -> Tensor:
    """Take one place (R,) of every row of (R, T, W): (R, W)."""
    here = torch.arange(x.shape[1], device=x.device)[None] == places[:, None]
    return torch.where(here[:, :, None], x, 0.0).sum(dim=[1])


# --------------------------------------------------------------------------------------------------
# One pass of a `tokens` head as the engines run it: static shapes, tensors in and out.


class ReadToken(nn.Module):
    """Read a token of the answer back."""

    def __init__(self, network: TokenNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        tokens: Tensor,
        place: Tensor,
        past: Mapping[str, Tensor],
        answer_key: Tensor,
        answer_value: Tensor,
    ) -> TokenPass:
        return self.network.read_token(tokens, place, past, answer_key, answer_value)
