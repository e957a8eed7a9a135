"""One pass for many requests: the newest one's prompt and a token of each older one (ActionFlow).

An answer of K tokens takes K ticks; a tick runs the language model once over the prompt of the
newest request and one token of each of the K - 1 older ones, so the weights are read once for all.
Every request has a slot of a ring of keys and values, slot = tick mod K.

Invariants:
- shapes are static, and nothing depends on numbers: a tick is one CUDA graph;
- a request reads its own slot and no other;
- a slot is written whole with a new prompt, so nothing of the request before remains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_runtime.family.declaration import free_places
from vla_runtime.models.base.token_network import TokenNetwork, place_of
from vla_runtime.models.blocks.attention import attend


@dataclass(frozen=True)
class Ring:
    """Keys and values of K requests, and what they have written.

    Attributes:
        keys, values: (K, kv_heads, T + F, D) of each layer; keys are rotated.
        mask: (K, T) bool, prompt tokens that are no padding.
        tokens: (K,) int64, newest token of each request.
        logits: (K, vocabulary) float32 that it is the likeliest of.
        ages: (K, K) int64 table: ticks since the request in each slot began, by the tick mod K.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor
    tokens: Tensor
    logits: Tensor
    ages: Tensor

    @classmethod
    def of(cls, network: TokenNetwork, past: Mapping[str, Tensor]) -> Ring:
        """Make an empty ring for a network whose prefix gives tensors like these, of one row."""
        _, rows, heads, places, head_dim = past['prefix_key'].shape
        assert rows == 1
        stages, device = network.dims.answer_length, past['prefix_key'].device
        shape = (stages, heads, places + free_places(network.dims), head_dim)

        def empty() -> tuple[Tensor, ...]:
            return tuple(torch.zeros_like(layer).new_zeros(shape) for layer in past['prefix_key'])

        slots = torch.arange(stages, device=device)
        return cls(
            keys=empty(),
            values=empty(),
            # The first token is seen, so that no attention is over nothing.
            mask=(torch.arange(places, device=device) == 0)[None].repeat(stages, 1),
            tokens=torch.zeros(stages, dtype=torch.int64, device=device),
            logits=torch.zeros(stages, past['logits'].shape[1], device=device),
            ages=(slots[:, None] - slots[None]) % stages,
        )

    @property
    def stages(self) -> int:
        return len(self.tokens)

    def state(self) -> tuple[Tensor, ...]:
        """Everything that a tick changes."""
        return (*self.keys, *self.values, self.mask, self.tokens, self.logits)


def tick(
    network: TokenNetwork,
    ring: Ring,
    slot: Tensor,
    newest: tuple[Tensor, Tensor] | None,
) -> None:
    """Run one pass; every request in the ring, which is changed in place, writes its next token.

    Args:
        slot: (1,) int64, tick mod K: slot of the newest request. What it held is done.
        newest: embeddings (1, T, W) and mask (1, T) of the newest request's prompt; None where none
            came: the tokens of the older ones alone are read.
    """
    prompt = 0 if newest is None else newest[0].shape[1]
    places = ring.mask.shape[1]
    ages = ring.ages.index_select(0, slot)[0]
    # Number of the token that each request reads; the newest one's slot reads nothing that counts.
    numbers = (ages - 1) % ring.stages
    free = torch.arange(ring.keys[0].shape[2] - places, device=slot.device)
    every = torch.arange(ring.stages, device=slot.device)
    if newest is not None:
        ring.mask.index_copy_(0, slot, newest[1])
    numbers = numbers.clamp(max=len(free) - 1)
    positions = (network.answer_position(ring.mask) + numbers)[None]
    seen = torch.cat([ring.mask, free[None] <= numbers[:, None]], dim=1)[:, None]
    x, last = network.language.embed(ring.tokens.clamp(min=0)[None]), None
    view = None
    if newest is not None:
        view = network.view(newest[1])
        x = torch.cat([newest[0], x], dim=1)
        positions, last = torch.cat([view.positions, positions], dim=1), view.last
    rotation = network.rotary(positions)
    for layer, block in enumerate(network.language.layers):
        q, k, v = block.project(x, rotation)
        attended = []
        if view is not None:
            own = q[:, :, :prompt], k[:, :, :prompt], v[:, :, :prompt]
            attended.append(attend(*own, view.sees))
        for cache, made in ((ring.keys[layer], k), (ring.values[layer], v)):
            if view is not None:
                empty = cache.new_zeros(1, cache.shape[1], len(free), cache.shape[3])
                cache.index_copy_(0, slot, torch.cat([made[:, :, :prompt], empty], dim=2))
            token = made[0, :, prompt:].transpose(0, 1)
            cache.permute(0, 2, 1, 3).index_put_((every, places + numbers), token)
        asking = q[0, :, prompt:].transpose(0, 1)[:, :, None]
        found = attend(asking, ring.keys[layer], ring.values[layer], seen)
        attended.append(found.transpose(0, 1))
        x = block.combine(x, torch.cat(attended, dim=1))
    rows = x[0, prompt:]
    if last is not None:
        rows = torch.cat([rows, place_of(x[:, :prompt], last)])
    logits = network.token_logits(rows)
    ring.logits.copy_(logits[: ring.stages])
    if last is not None:
        ring.logits.index_copy_(0, slot, logits[ring.stages :])
    # No token of logits that are not finite: the likeliest of those is just the first one.
    finite = ring.logits.isfinite().all(dim=-1)
    ring.tokens.copy_(torch.where(finite, ring.logits.argmax(dim=-1), -1))
