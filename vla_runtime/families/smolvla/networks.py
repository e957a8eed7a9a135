"""Network of this folder's family by name, and its fused form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.action_time import mix_time, time_share
from vla_runtime.families.blocks.attention import (
    Rotary,
    attend,
    images_of_rows,
    rotary,
)
from vla_runtime.families.blocks.fused import encode_stack, normalise
from vla_runtime.families.blocks.fused_lengths import Kernel, flash
from vla_runtime.families.blocks.layers import Linear
from vla_runtime.families.blocks.llama import Llama, LlamaBlock
from vla_runtime.families.blocks.siglip import Siglip
from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.fused_flow import FusedFlow
from vla_runtime.families.smolvla.dimensions import SmolVlaDims

# --------------------------------------------------------------------------------------------------
# SmolVLM2's vision tower: SigLIP, its patches shuffled into fewer and wider image tokens.

# torch.arange computes float32 numbers in pairs of vectors, whatever the processor has.
_VECTOR = 8
_PAIR = 2 * _VECTOR


def position_rows(side: int) -> list[int]:
    """Return the row of the position table for each row of patches; columns use the same.

    Transformers sorts i / side into buckets of 1 / side in float32: for some sides (19, 25, 29, …)
    a bound is off by one rounding, and a row is used twice. Policies were trained with that.
    """
    step = np.float32(1.0) / np.float32(side)
    places = np.minimum(np.arange(side, dtype=np.float32) * step, np.float32(1.0 - 1e-6))
    return [int(row) for row in np.searchsorted(_bounds(side), places, side='right')]


def _bounds(side: int) -> np.ndarray:
    """Return torch.arange(1 / side, 1, 1 / side) in float32, to the bit.

    PyTorch rounds the first number of each vector, adds the offsets of the others, and rounds
    again. Numbers after the last full pair of vectors are rounded once.
    """
    step = 1.0 / side
    count = math.ceil((1.0 - step) / step)
    exact = step + np.arange(count) * step
    whole = count - count % _PAIR
    first = exact[:whole:_VECTOR].astype(np.float32).astype(np.float64)
    exact[:whole] = (first[:, None] + np.arange(_VECTOR) * step).ravel()
    return exact.astype(np.float32)


class SmolVlmVision(Siglip):
    """SmolVLA's vision engine: pixels to image tokens of language width."""

    def __init__(self, dims: SmolVlaDims) -> None:
        super().__init__(dims.vision)
        self.edge = dims.pixel_shuffle
        self.side = dims.image_size // dims.vision.patch_size
        self._position_rows = position_rows(self.side)
        self.projector = Linear(
            dims.vision.width * dims.pixel_shuffle**2, dims.language.width, bias=False
        )

    def positions(self) -> Tensor:
        rows, table = self._position_rows, self.position_embedding
        if all(b - a == 1 for a, b in pairwise(rows)):
            return table
        grid = table.view(self.side, self.side, -1)
        for axis in (0, 1):
            grid = torch.stack([grid.select(axis, row) for row in rows], dim=axis)
        return grid.flatten(0, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode images (n, 3, S, S) in [-1, 1] to (n, N, language width) float32, unscaled."""
        return self.project(self.patches(pixels))

    def project(self, patches: Tensor) -> Tensor:
        """Shuffle patches into fewer tokens: (n, side^2, width) to (n, N, language width)."""
        n, _, width = patches.shape
        edge, few = self.edge, self.side // self.edge
        squares = patches.view(n, few, edge, few, edge, width).permute(0, 1, 3, 2, 4, 5)
        return self.projector(squares.reshape(n, few * few, edge * edge * width)).float()


# --------------------------------------------------------------------------------------------------
# SmolVLA (arXiv 2506.01844): a SmolVLM2 prefix and an expert that reads its keys and values. Those
# that a cross layer computes from them are constant over the denoise steps, so `prefix` computes
# them.


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
        """Time's contribution to `action_time_in`, with bias; (N,) to (N, expert width)."""
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

        Image tokens are (B, V, N, W), tokens (B, L), the state (B, S) float32. Returns embeddings
        (B, P, W) float32 and mask (B, P) bool.
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
        mask = past['prefix_mask']
        h = self.embed_actions(x, conditioning).expand(mask.shape[0], -1, -1)
        own, cross = self.rotations(mask)
        seen = _action_sight(mask, h.shape[1])
        of_self = {layer: index for index, layer in enumerate(self.dims.self_layers)}
        of_cross = {layer: index for index, layer in enumerate(self.dims.cross_layers)}
        for layer, block in enumerate(self.expert.layers):
            if layer in of_self:
                q, k, v = block.project(h, own)
                index = of_self[layer]
                k = torch.cat([past['self_key'][index], k], dim=2)
                v = torch.cat([past['self_value'][index], v], dim=2)
                attended = attend(q, k, v, seen)
            else:
                index = of_cross[layer]
                k, v = past['cross_key'][index], past['cross_value'][index]
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


# --------------------------------------------------------------------------------------------------
# Fused form of `SmolVla`.


class FusedSmolVla(FusedFlow):
    """The same numbers as a `SmolVla`, up to rounding; arguments as for `FusedFlow`.

    Only cross layers attend by lengths instead of a mask: other layers hide more than padding.
    """

    dims: SmolVlaDims

    def __init__(self, plain: SmolVla, static_shapes: bool, kernel: Kernel = flash) -> None:
        device, horizon = plain.action_in.weight.device, plain.dims.horizon
        causal = torch.ones(horizon, horizon, dtype=torch.bool, device=device).tril()
        cross = plain.dims.cross_layers
        super().__init__(plain, static_shapes, causal, cross)
        if static_shapes and cross:
            queries, keys = horizon, self.dims.prefix_length
            self.kernel = self._expert[cross[0]].usable(kernel, queries, keys, folded=True)
        self._fold_actions()

    def _fold_actions(self) -> None:
        """Fold the projection of the actions into the MLP's first layer, (W, A), but its bias."""
        embed, layer = self._plain.action_in, self._plain.action_time_in
        weight = layer.weight[:, : layer.out_features].double()
        self._action_weight = (weight @ embed.weight.double()).float()
        self._action_bias = (weight @ embed.bias.double()).float()

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        tokens, token_mask, state = (rows[name] for name in ('tokens', 'token_mask', 'state'))
        images = images_of_rows(image_tokens, image_mask, tokens.shape[0])
        x, mask = self._plain.embed_prefix(*images, tokens, token_mask, state)
        keys, values = encode_stack(
            self._language,
            x,
            mask,
            self._used(mask),
            prefix_sight,
            static_shapes=self._static_shapes,
        )
        layers = self._plain.expert.layers
        own = [(keys[layer], values[layer]) for layer in self.dims.self_layers]
        cross = [
            cross_memory(layers[layer], keys[layer], values[layer])
            for layer in self.dims.cross_layers
        ]
        return {**stacked('self', own), **stacked('cross', cross), 'prefix_mask': mask}

    def split_conditioning(self, conditioning: Tensor) -> Tensor:
        """Return what the MLP's first layer adds, (1, 1, W), or (1, H, W) with rows for actions."""
        of_tokens = conditioning if conditioning.dim() == 3 else conditioning[:, None]
        return of_tokens + self._action_bias

    def velocity(self, x: Tensor, past: Any, conditioning: Any, **rows: Tensor) -> Tensor:
        """As `SmolVla.velocity`; `past` is a `FusedExpert`, `conditioning` as split."""
        plain, expert = self._plain, past
        mixed = F.silu(F.linear(x, self._action_weight) + conditioning)
        h = expert(plain.action_time_out(mixed), ())
        h = normalise(h, self._final_scale, None, self.dims.rms_epsilon)
        return expert.linear(plain.action_out, h)


# --------------------------------------------------------------------------------------------------

NETWORKS = {'smolvla': SmolVla}
FUSED = {'smolvla': FusedSmolVla}
