"""Fused form of `SmolVla`: the same numbers, with the work that steps share done once.

Everything that depends on the prefix alone (places of keys and values, masks or lengths, positions)
is laid out once per prefix, everything that depends on the flow time alone once per schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_runtime.families.blocks.attention import images_of_rows, repeat_rows
from vla_runtime.families.blocks.fused import (
    FusedBlock,
    FusedVision,
    encode_stack,
    norm_scale,
    normalise,
    rows_of_samples,
    used_tokens,
)
from vla_runtime.families.blocks.fused_expert import FusedExpert, Past
from vla_runtime.families.blocks.fused_lengths import Kernel, flash
from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.smolvla.dimensions import SmolVlaDims
from vla_runtime.families.smolvla.flow_policy import SmolVla, cross_memory, prefix_sight, stacked


class FusedSmolVla(FlowNetwork):
    """The same numbers as a `SmolVla`, up to rounding.

    Args:
        plain: plain network with its weights, which become shared.
        static_shapes: compute all tokens, as a captured graph must. Otherwise those that are valid
            in no row are left out.
        kernel: cross layers attend by lengths instead of a mask: with static shapes, and where it
            is usable. Other layers hide more than padding.

    Attributes:
        kernel: the kernel in use; None where nothing attends by lengths.
    """

    dims: SmolVlaDims
    expert_type = FusedExpert

    def __init__(self, plain: SmolVla, static_shapes: bool, kernel: Kernel = flash) -> None:
        super().__init__()
        self.family, self.dims = plain.family, plain.dims
        self._plain, self._static_shapes = plain, static_shapes
        self.vision = FusedVision(plain.vision)
        cross = self.dims.cross_layers
        self._language = [FusedBlock(block, epilogues=True) for block in plain.language.layers]
        self._expert = [
            FusedBlock(block, layer in cross, packed=True)
            for layer, block in enumerate(plain.expert.layers)
        ]
        self._final_scale = norm_scale(plain.expert.norm)
        self.kernel = None
        if static_shapes and cross:
            queries, keys = self.dims.horizon, self.dims.prefix_length
            self.kernel = self._expert[cross[0]].usable(kernel, queries, keys, folded=True)
        self._fold_actions()

    def _fold_actions(self) -> None:
        """Fold the projection of the actions into the MLP's first layer, (W, A) float32.

        No activation lies between the two. The bias, (W,), is every step's: the conditioning takes
        it.
        """
        embed, layer = self._plain.action_in, self._plain.action_time_in
        weight = layer.weight[:, : layer.out_features].double()
        self._action_weight = (weight @ embed.weight.double()).float()
        self._action_bias = (weight @ embed.bias.double()).float()

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """As `SmolVla.prefix`."""
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

    def time_conditioning(self, times: Tensor) -> Tensor:
        """As `SmolVla.time_conditioning`."""
        return self._plain.time_conditioning(times)

    def split_conditioning(self, conditioning: Tensor) -> Tensor:
        """Return what the MLP's first layer adds, (1, 1, W), or (1, H, W) with rows for actions."""
        of_tokens = conditioning if conditioning.dim() == 3 else conditioning[:, None]
        return of_tokens + self._action_bias

    def prepare_prefix(
        self, past: Mapping[str, Tensor], samples: int, into: FusedExpert | None = None
    ) -> FusedExpert:
        """Return the expert over this prefix."""
        mask = past['prefix_mask']
        used = self._used(mask)
        own, cross = (_of_kind(past, kind, used, samples) for kind in ('self', 'cross'))
        if into is None:
            horizon = self.dims.horizon
            causal = torch.ones(horizon, horizon, dtype=torch.bool, device=mask.device).tril()
            into = self.expert_type(self._expert, causal, self.kernel, self._static_shapes)
        into.load(repeat_rows(mask if used is None else mask[:, used], samples), own, cross)
        return into

    def _used(self, mask: Tensor) -> Tensor | None:
        return None if self._static_shapes else used_tokens(mask)

    def advance(self, past: Any, *inputs: Tensor) -> Tensor:
        """As `FlowNetwork.advance`."""
        return past.advance(*inputs)

    def velocity(self, x: Tensor, past: Any, conditioning: Any, **rows: Tensor) -> Tensor:
        """As `SmolVla.velocity`.

        Args:
            x: (B or 1, H, A).
            past: the `FusedExpert` over the prefix.
            conditioning: result of `split_conditioning`.
            **rows: none.
        """
        plain, expert = self._plain, past
        mixed = F.silu(F.linear(x, self._action_weight) + conditioning)
        h = expert(plain.action_time_out(mixed), ())
        h = normalise(h, self._final_scale, None, self.dims.rms_epsilon)
        return expert.linear(plain.action_out, h)


def _of_kind(
    past: Mapping[str, Tensor], kind: str, used: Tensor | None, samples: int
) -> Past | None:
    """Keys and values of the layers of a kind, the tokens in use, a row for each sample."""
    if f'{kind}_key' not in past:
        return None
    return rows_of_samples(past[f'{kind}_key'], past[f'{kind}_value'], used, samples)
