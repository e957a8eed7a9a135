"""SmolVLA (arXiv 2506.01844): a SmolVLM2 prefix and an expert that reads its keys and values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.declarations.smolvla import SmolVlaDims
from vla_runtime.models.base.expert_network import ExpertNetwork, StepConditioning, stacked
from vla_runtime.models.blocks.action_time import mix_time, time_share
from vla_runtime.models.blocks.attention import images_of_rows
from vla_runtime.models.blocks.decoders import llama
from vla_runtime.models.blocks.layers import Apply, Linear, joined
from vla_runtime.models.blocks.siglip import Siglip, shuffle_pixels
from vla_runtime.models.blocks.transformer import Attention

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
        return self.projector(shuffle_pixels(patches, self.side, self.edge)).float()


# --------------------------------------------------------------------------------------------------


class SmolVla(ExpertNetwork):
    """Vision encoder, language model with a state token, action expert.

    Keys and values that a cross layer computes from the language model's are constant over the
    denoise steps, so `prefix` computes them.

    Shapes: R rows, V cameras, N tokens an image, L prompt tokens, P = V*N + L + 1, H horizon,
    A padded action dimension, S padded state dimension, W language width, E expert width,
    D head dimension.
    """

    dims: SmolVlaDims
    vision: SmolVlmVision

    def __init__(self, dims: SmolVlaDims) -> None:
        super().__init__()
        self.dims = dims
        language, width = dims.language, dims.expert.width
        self.vision = SmolVlmVision(dims)
        self.language = llama(language, dims.rms_epsilon, dims.vocabulary)
        self.expert = llama(
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
        self._folded: tuple[Tensor, Tensor] | None = None

    def embed_prefix(
        self,
        image_tokens: Tensor,
        image_mask: Tensor,
        tokens: Tensor,
        token_mask: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Concatenate images and text, both times sqrt(W), and the state token, not scaled.

        Image tokens are (R, V, N, W), tokens (R, L), the state (R, S) float32. Returns embeddings
        (R, P, W) float32 and mask (R, P) bool.
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

    @staticmethod
    def prefix_sees(mask: Tensor) -> Tensor:
        """(R, P, P) bool: images and text see what is valid among them, the state token, the last,
        itself too.
        """
        rows, length = mask.shape
        hidden = torch.zeros(rows, 1, dtype=torch.bool, device=mask.device)
        observed = torch.cat([mask[:, :-1], hidden], dim=1)
        return torch.cat([observed[:, None].expand(-1, length - 1, -1), mask[:, None]], dim=1)

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
        keys, values = self.encode_prefix(embeddings, mask)
        past = {}
        if own := self.dims.self_layers:
            past = stacked('self', [keys[one] for one in own], [values[one] for one in own])
        if self.dims.cross_layers:
            cross = [
                cross_memory(self.expert.layers[layer].attention, keys[layer], values[layer])
                for layer in self.dims.cross_layers
            ]
            past.update(stacked('cross', *zip(*cross, strict=True)))
        return {**past, 'prefix_mask': mask}

    def join(self, static_shapes: bool = False) -> None:
        super().join(static_shapes)
        # The projection of the actions, in the MLP's first layer, (E, A), but its bias.
        embed, layer = self.action_in, self.action_time_in
        weight = layer.weight[:, : layer.out_features].double()
        self._folded = (
            (weight @ embed.weight.double()).float(),
            (weight @ embed.bias.double()).float(),
        )

    def _use_kernels(self, suffix: int, prefix: int) -> None:
        # Cross layers alone: the others hide more than padding.
        if self.dims.cross_layers:
            self.kernel = self._usable(self.expert, suffix, prefix, folded=True)

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Time's contribution to `action_time_in`, with bias; (N,) to (N, E)."""
        return time_share(self.action_time_in, times)

    def split_conditioning(self, conditioning: Tensor) -> StepConditioning:
        """Return what the MLP's first layer adds, (1, 1, E), or (1, H, E) with rows for actions."""
        if (folded := joined(self._folded)) is None:
            return StepConditioning(conditioning)
        of_tokens = conditioning if conditioning.dim() == 3 else conditioning[:, None]
        return StepConditioning(of_tokens + folded[1])

    def embed_suffix(
        self, x: Tensor, step: StepConditioning, rows: Mapping[str, Tensor], linear: Apply
    ) -> Tensor:
        if (folded := joined(self._folded)) is not None:
            return self.action_time_out(F.silu(F.linear(x, folded[0]) + step.row))
        return mix_time(self.action_time_in, self.action_time_out, self.action_in(x), step.row)

    def suffix_sees(self, device: torch.device) -> Tensor:
        """Actions see each other causally."""
        steps = self.dims.horizon
        return torch.ones(steps, steps, dtype=torch.bool, device=device).tril()


def cross_memory(attention: Attention, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a cross layer's keys and values from a language layer's (R, kv_heads, P, D)."""
    key, value = (part.transpose(1, 2).flatten(2) for part in (key, value))
    return attention.heads(attention.k(key)), attention.heads(attention.v(value))


NETWORKS = {'smolvla': SmolVla}
