"""SmolVLA (arXiv 2506.01844): a SmolVLM2 prefix and an expert that reads its keys and values.

Every layer of the language model attends to itself. A self layer of the expert attends to the
prefix's keys and values and its own. A cross layer attends to keys and values that it computes from
the prefix's: they are constant over the denoise steps, so `prefix` computes them. The prefix never
sees the actions, so the split is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vla_runtime.families.blocks.action_time import mix_time, time_share
from vla_runtime.families.blocks.attention import (
    Rotary,
    attend,
    images_of_rows,
    repeat_rows,
    rotary,
)
from vla_runtime.families.blocks.llama import Llama, LlamaBlock
from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.smolvla.dimensions import SmolVlaDims
from vla_runtime.families.smolvla.vision import SmolVlmVision


class SmolVla(FlowNetwork):
    """Vision encoder, language model with a state token, action expert.

    Shapes: B batch, V cameras, N tokens an image, L prompt tokens, P = V*N + L + 1, H horizon,
    A padded action dimension, S padded state dimension, W language width, D head dimension.
    """

    dims: SmolVlaDims
    vision: SmolVlmVision

    def __init__(self, dims: SmolVlaDims) -> None:
        super().__init__()
        self.dims = dims
        language, width = dims.language, dims.expert.width
        self.vision = SmolVlmVision(dims)
        self.language = Llama(language, dims.rms_epsilon, vocabulary=dims.vocabulary)
        self.expert = Llama(
            dims.expert,
            dims.rms_epsilon,
            cross=dims.cross_layers,
            memory_width=language.num_kv_heads * language.head_dim,
        )
        self.action_in = nn.Linear(dims.action_dim, width)
        self.action_out = nn.Linear(width, dims.action_dim)
        self.state_projection = nn.Linear(dims.state_dim, language.width)
        self.action_time_in = nn.Linear(2 * width, width)
        self.action_time_out = nn.Linear(width, width)

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Return the time's share of `action_time_in`, bias included; (N,) to (N, expert width)."""
        return time_share(self.action_time_in, times)

    def embed_prefix(
        self,
        image_tokens: Tensor,
        image_mask: Tensor,
        tokens: Tensor,
        token_mask: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Concatenate images and text, both times sqrt(W), and the state token, not scaled.

        Args:
            image_tokens: (B, V, N, W); image_mask: (B, V) bool.
            tokens: (B, L) int; token_mask: (B, L) bool.
            state: (B, S) float32.

        Returns:
            embeddings (B, P, W) float32 and mask (B, P) bool
        """
        images = image_tokens.flatten(1, 2)
        scale = images.shape[-1] ** 0.5
        projected = self.state_projection(state)[:, None]
        embeddings = torch.cat(
            [images * scale, self.language.embed(tokens) * scale, projected], dim=1
        )
        seen = image_mask.repeat_interleave(image_tokens.shape[2], dim=1)
        valid = torch.ones(tokens.shape[0], 1, dtype=torch.bool, device=tokens.device)
        return embeddings, torch.cat([seen, token_mask, valid], dim=1)

    def encode_prefix(self, embeddings: Tensor, mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys (already rotated) and values of every layer, (B, kv_heads, P, D) each.

        Image and text tokens see all valid ones among them; the state token sees itself too.
        Entries at padded positions are meaningless and must stay masked.
        """
        rotation = rotary(mask.long().cumsum(dim=1) - 1, self.dims.language.head_dim)
        seen = prefix_sight(mask)
        past = []
        x = embeddings
        for block in self.language.layers[:-1]:
            q, k, v = block.project(x, rotation)
            x = block.combine(x, attend(q, k, v, seen))
            past.append((k, v))
        return [*past, self.language.layers[-1].project_keys_values(x, rotation)]

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return what the expert's layers read, and `prefix_mask` (R, P) bool.

        `self_key` and `self_value` are the language model's, one for each self layer. `cross_key`
        and `cross_value` are those that the cross layers compute from the language model's. All
        are (layers, R, kv_heads, P, D); a kind without layers is left out. `rows` are `tokens`
        (R, L) int64, `token_mask` (R, L) bool and `state` (R, S).
        """
        tokens, token_mask, state = (rows[name] for name in ('tokens', 'token_mask', 'state'))
        images = images_of_rows(image_tokens, image_mask, tokens.shape[0])
        embeddings, mask = self.embed_prefix(*images, tokens, token_mask, state)
        past = self.encode_prefix(embeddings, mask)
        layers = self.expert.layers
        own = [past[layer] for layer in self.dims.self_layers]
        cross = [cross_memory(layers[layer], *past[layer]) for layer in self.dims.cross_layers]
        return {**stacked('self', own), **stacked('cross', cross), 'prefix_mask': mask}

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
        """As `FlowNetwork.velocity`; it takes no `rows`."""
        mask = past['prefix_mask']
        shared = max(1, x.shape[0] // mask.shape[0])
        mask = repeat_rows(mask, shared)
        h = self.embed_actions(x, conditioning).expand(mask.shape[0], -1, -1)
        own, cross = self.rotations(mask)
        seen = _action_sight(mask, h.shape[1])
        of_self = {layer: index for index, layer in enumerate(self.dims.self_layers)}
        of_cross = {layer: index for index, layer in enumerate(self.dims.cross_layers)}
        for layer, block in enumerate(self.expert.layers):
            if layer in of_self:
                q, k, v = block.project(h, own)
                index = of_self[layer]
                k = torch.cat([repeat_rows(past['self_key'][index], shared), k], dim=2)
                v = torch.cat([repeat_rows(past['self_value'][index], shared), v], dim=2)
                attended = attend(q, k, v, seen)
            else:
                index = of_cross[layer]
                k = repeat_rows(past['cross_key'][index], shared)
                v = repeat_rows(past['cross_value'][index], shared)
                attended = attend(block.project_queries(h, cross), k, v, mask[:, None])
            h = block.combine(h, attended)
        return self.action_out(self.expert.norm(h))

    def embed_actions(self, x: Tensor, conditioning: Tensor) -> Tensor:
        """Embed noisy actions (B, H, A) as action tokens (B, H, expert width)."""
        return mix_time(self.action_time_in, self.action_time_out, self.action_in(x), conditioning)

    def rotations(self, mask: Tensor) -> tuple[Rotary, Rotary]:
        """Rotary of action tokens: from the prefix on for self layers, from 0 for cross layers."""
        steps = torch.arange(self.dims.horizon, device=mask.device)
        start = mask.long().sum(dim=1, keepdim=True)
        head_dim = self.dims.expert.head_dim
        return rotary(start + steps, head_dim), rotary(steps[None], head_dim)


def prefix_sight(mask: Tensor) -> Tensor:
    """Return the prefix's attention mask, (B, P, P) bool; the state token is the last."""
    rows, length = mask.shape
    hidden = torch.zeros(rows, 1, dtype=torch.bool, device=mask.device)
    observed = torch.cat([mask[:, :-1], hidden], dim=1)
    return torch.cat([observed[:, None].expand(-1, length - 1, -1), mask[:, None]], dim=1)


def _action_sight(mask: Tensor, steps: int) -> Tensor:
    """Return the actions' mask, (B, H, P + H) bool: valid prefix, and actions causally."""
    causal = torch.ones(steps, steps, dtype=torch.bool, device=mask.device).tril()
    rows = mask.shape[0]
    return torch.cat(
        [mask[:, None].expand(-1, steps, -1), causal[None].expand(rows, -1, -1)], dim=2
    )


def cross_memory(block: LlamaBlock, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a cross layer's keys and values from a language layer's (B, kv_heads, P, D)."""
    attention = block.attention
    key, value = (part.transpose(1, 2).flatten(2) for part in (key, value))
    return attention.heads(attention.k(key)), attention.heads(attention.v(value))


def stacked(kind: str, layers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the keys and values of a kind of expert layers by name; nothing without layers."""
    if not layers:
        return {}
    keys, values = zip(*layers, strict=True)
    return {f'{kind}_key': torch.stack(keys), f'{kind}_value': torch.stack(values)}
