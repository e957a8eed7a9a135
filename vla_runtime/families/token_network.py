"""Interface of the network of a `tokens` head: actions written as tokens, one a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vla_runtime.families.flow_network import SinglePassNetwork


class TokenCache(NamedTuple):
    """Keys and values of the language model, P places each, and the places in use.

    Attributes:
        keys, values: (R, kv_heads, P, D) of each layer; keys are rotated.
        seen: (R, P) bool, True where a place is in use.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    seen: Tensor


class TokenNetwork(SinglePassNetwork):
    """Network of a `tokens` head: greedy, and always as many tokens.

    `prefix` returns keys and values with free places behind the prompt, and the logits of the first
    token. Each pass reads one token back, fills its place and returns the logits of the next. The
    last token is not read back, so K tokens take K - 1 passes and free places. All passes have the
    same shapes.

    Engines run the whole answer as the one pass of a `single` head.
    """

    @property
    def answer_length(self) -> int:
        """K, tokens of an answer."""
        raise NotImplementedError

    def first_cache(self, past: Mapping[str, Tensor]) -> tuple[Tensor, TokenCache]:
        """Return logits (R, vocabulary) and cache from the outputs of `prefix`."""
        raise NotImplementedError

    def read_token(
        self, token: Tensor, number: int, cache: TokenCache
    ) -> tuple[Tensor, TokenCache]:
        """Read a token of the answer back.

        Args:
            token: (R,) int64, number `number` of the answer, from 0.
            number: 0 to K - 2.
            cache: cache with the places of the tokens before it filled.

        Returns:
            logits (R, vocabulary) float32 of the next token, and the cache with its place filled
        """
        raise NotImplementedError

    def decode(self, tokens: Tensor) -> Tensor:
        """Normalised actions (R, H, A) float32 of an answer (R, K) int64."""
        raise NotImplementedError

    def answer(self, past: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the greedy answer (R, K) int64 and its logits (R, K, vocabulary)."""
        logits, cache = self.first_cache(past)
        tokens, every = [logits.argmax(dim=-1)], [logits]
        for number in range(self.answer_length - 1):
            logits, cache = self.read_token(tokens[-1], number, cache)
            tokens.append(logits.argmax(dim=-1))
            every.append(logits)
        return torch.stack(tokens, dim=1), torch.stack(every, dim=1)

    def actions(self, past: Mapping[str, Tensor], **rows: Tensor) -> Tensor:
        """As `SinglePassNetwork.actions`."""
        return self.decode(self.answer(past)[0])
