"""Fused form of `SmolVla`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_runtime.families.blocks.attention import images_of_rows
from vla_runtime.families.blocks.fused import encode_stack, normalise
from vla_runtime.families.blocks.fused_lengths import Kernel, flash
from vla_runtime.families.fused_flow import FusedFlow
from vla_runtime.families.smolvla.dimensions import SmolVlaDims
from vla_runtime.families.smolvla.flow_policy import SmolVla, cross_memory, prefix_sight, stacked


class FusedSmolVla(FusedFlow):
    """The same numbers as a `SmolVla`, up to rounding.

    Args:
        plain, static_shapes: as for `FusedFlow`.
        kernel: cross layers attend by lengths instead of a mask: with static shapes, and where it
            is usable. Other layers hide more than padding.
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

    def split_conditioning(self, conditioning: Tensor) -> Tensor:
        """Return what the MLP's first layer adds, (1, 1, W), or (1, H, W) with rows for actions."""
        of_tokens = conditioning if conditioning.dim() == 3 else conditioning[:, None]
        return of_tokens + self._action_bias

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
