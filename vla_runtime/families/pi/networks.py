"""Networks of pi0 and pi0.5 by name, and their fused form.

pi0 (arXiv 2410.24164): state as a token of its own, flow time mixed into the actions. pi0.5 (arXiv
2504.16054): state in the prompt, flow time through adaptive norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.action_time import mix_time, time_embedding, time_share
from vla_runtime.families.blocks.attention import attend, images_of_rows, rotary
from vla_runtime.families.blocks.fused import encode_stack, normalise
from vla_runtime.families.blocks.fused_expert import FusedExpert
from vla_runtime.families.blocks.fused_lengths import Kernel, flash
from vla_runtime.families.blocks.gemma import AdaptiveRMSNorm, Gemma, Modulation, split_modulations
from vla_runtime.families.blocks.layers import Apply, apply, by_request
from vla_runtime.families.blocks.siglip import VisionEncoder
from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.fused_flow import FusedFlow
from vla_runtime.families.pi.declaration import PiDims

# --------------------------------------------------------------------------------------------------
# Network of pi0 and pi0.5: a vision-language prefix and an action expert in one attention. The
# prefix never sees the suffix, so its keys and values are computed once per observation.


class PiNetwork(FlowNetwork):
    """Vision encoder, language model and action expert; each family adds its time and state inputs.

    Shapes: B batch, V cameras, N tokens an image, L prompt tokens, P = V*N + L, T suffix tokens,
    H horizon, A padded action dimension, W language width.
    """

    dims: PiDims
    vision: VisionEncoder

    def __init__(self, dims: PiDims, adaptive: bool) -> None:
        super().__init__()
        self.dims = dims
        self.vision = VisionEncoder(dims.vision, dims.language.width)
        self.language = Gemma(dims.language, vocabulary=dims.vocabulary)
        self.expert = Gemma(dims.expert, adaptive=adaptive)
        self.action_in = nn.Linear(dims.action_dim, dims.expert.width)
        self.action_out = nn.Linear(dims.expert.width, dims.action_dim)

    def time_conditioning(self, times: Tensor) -> Tensor:
        raise NotImplementedError

    def modulations(self, conditioning: Tensor) -> Sequence[Modulation | None]:
        """Split conditioning (..., C) into one modulation per norm (two per block, one final)."""
        raise NotImplementedError

    def embed_suffix(
        self, x: Tensor, conditioning: Tensor, state: Tensor | None, linear: Apply = apply
    ) -> Tensor:
        """Return suffix tokens (B, T, expert width) of actions (B, H, A) and pi0's state (B, S).

        The conditioning is (B or 1, C), or (B or 1, H, C) with one row for each action. `linear`
        computes the projections.
        """
        raise NotImplementedError

    def suffix_mask(self, device: torch.device) -> Tensor:
        """Return the attention mask among suffix tokens, (T, T) bool."""
        raise NotImplementedError

    def embed_prefix(
        self, image_tokens: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Concatenate image tokens (B, V, N, W) and embedded text (B, L), images first.

        Returns embeddings (B, P, W) float32 and mask (B, P) bool.
        """
        images = image_tokens.flatten(1, 2)
        mask = image_mask.repeat_interleave(image_tokens.shape[2], dim=1)
        embeddings = torch.cat([images, self.language.embed(tokens)], dim=1)
        return embeddings, torch.cat([mask, token_mask], dim=1)

    def encode_prefix(self, embeddings: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (already rotated) and values of every layer, (layers, B, kv_heads, P, D) each.

        Valid tokens see all valid tokens; entries at padded positions are meaningless.
        """
        rotation = rotary(mask.long().cumsum(dim=1) - 1, self.dims.language.head_dim)
        seen = mask[:, None]
        keys, values = [], []
        x = embeddings
        for block in self.language.layers[:-1]:
            q, k, v, gate = block.project(x, rotation)
            x = block.combine(x, attend(q, k, v, seen), gate)
            keys.append(k)
            values.append(v)
        k, v = self.language.layers[-1].project_keys_values(x, rotation)
        return torch.stack([*keys, k]), torch.stack([*values, v])

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Keys and values (layers, R, kv_heads, P, D) and `prefix_mask` (R, P) bool.

        `rows` are `tokens` (R, L) int64 and `token_mask` (R, L) bool.
        """
        tokens, token_mask = rows['tokens'], rows['token_mask']
        images = images_of_rows(image_tokens, image_mask, tokens.shape[0])
        embeddings, mask = self.embed_prefix(*images, tokens, token_mask)
        past_key, past_value = self.encode_prefix(embeddings, mask)
        return {'past_key': past_key, 'past_value': past_value, 'prefix_mask': mask}

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
        """As `FlowNetwork.velocity`; `rows` has pi0's `state` (R, S)."""
        past_key, past_value, prefix_mask = (
            past[name] for name in ('past_key', 'past_value', 'prefix_mask')
        )
        batch = prefix_mask.shape[0]
        h = self.embed_suffix(x, conditioning, rows.get('state'))
        h = h.expand(batch, -1, -1)
        tokens = h.shape[1]
        start = prefix_mask.long().sum(dim=1, keepdim=True)
        positions = start + torch.arange(tokens, device=h.device)
        rotation = rotary(positions, self.dims.expert.head_dim)
        seen = torch.cat(
            [
                prefix_mask[:, None].expand(-1, tokens, -1),
                self.suffix_mask(h.device)[None].expand(batch, -1, -1),
            ],
            dim=2,
        )
        modulations = self.modulations(conditioning)
        for layer, block in enumerate(self.expert.layers):
            q, k, v, gate = block.project(h, rotation, modulations[2 * layer])
            k = torch.cat([past_key[layer], k], dim=2)
            v = torch.cat([past_value[layer], v], dim=2)
            h = block.combine(h, attend(q, k, v, seen), gate, modulations[2 * layer + 1])
        h, _ = self.expert.norm(h, modulations[-1])
        return self.action_out(h[:, -self.dims.horizon :])


# --------------------------------------------------------------------------------------------------
# Fused form of `PiNetwork`.


@dataclass(frozen=True)
class StepConditioning:
    """One step's row of the time table, and the modulations of its norms (none in pi0)."""

    row: Tensor
    modulations: tuple[Modulation, ...]


class FusedPi(FusedFlow):
    """The same numbers as a `PiNetwork`, up to rounding; arguments as for `FusedFlow`."""

    def __init__(self, plain: PiNetwork, static_shapes: bool, kernel: Kernel = flash) -> None:
        device = plain.action_in.weight.device
        super().__init__(plain, static_shapes, plain.suffix_mask(device))
        prefix, suffix = plain.dims.prefix_length, len(self._suffix_mask)
        self._prefix_kernel = None
        if static_shapes:
            self.kernel = self._expert[0].usable(kernel, suffix, suffix + prefix, folded=True)
        if self.kernel is not None:
            self._prefix_kernel = self._language[0].usable(kernel, prefix, prefix)

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        tokens, token_mask = rows['tokens'], rows['token_mask']
        images = images_of_rows(image_tokens, image_mask, tokens.shape[0])
        x, mask = self._plain.embed_prefix(*images, tokens, token_mask)
        past_key, past_value = encode_stack(
            self._language,
            x,
            mask,
            self._used(mask),
            kernel=self._prefix_kernel,
            static_shapes=self._static_shapes,
        )
        return {'past_key': past_key, 'past_value': past_value, 'prefix_mask': mask}

    def split_conditioning(self, conditioning: Tensor) -> StepConditioning:
        """Split a row (1, C), or a row for each action (1, H, C), into modulations."""
        modulations = (one for one in self._plain.modulations(conditioning) if one is not None)
        return StepConditioning(
            conditioning,
            tuple(
                (scale.contiguous(), shift.contiguous(), gate.contiguous())
                for scale, shift, gate in modulations
            ),
        )

    def velocity(self, x: Tensor, past: Any, conditioning: Any, **rows: Tensor) -> Tensor:
        """As `PiNetwork.velocity`, over a `FusedExpert` and with a `StepConditioning`."""
        expert: FusedExpert = past
        step: StepConditioning = conditioning
        suffix = self._plain.embed_suffix(x, step.row, rows.get('state'), expert.linear)
        h = expert(suffix, step.modulations)
        last = step.modulations[-1] if step.modulations else None
        h = normalise(h[:, -self.dims.horizon :], self._final_scale, last)
        return expert.linear(self._plain.action_out, h)


# --------------------------------------------------------------------------------------------------


class Pi0(PiNetwork):
    """Suffix: a state token, which does not see the actions, then the actions."""

    def __init__(self, dims: PiDims) -> None:
        super().__init__(dims, adaptive=False)
        width = dims.expert.width
        self.state_projection = nn.Linear(dims.state_dim, width)
        self.action_time_in = nn.Linear(2 * width, width)
        self.action_time_out = nn.Linear(width, width)

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Return the time's contribution to `action_time_in`, bias included; (N,) to (N, W)."""
        return time_share(self.action_time_in, times)

    def modulations(self, conditioning: Tensor) -> Sequence[Modulation | None]:
        return [None] * (2 * self.dims.expert.depth + 1)

    def embed_suffix(
        self, x: Tensor, conditioning: Tensor, state: Tensor | None, linear: Apply = apply
    ) -> Tensor:
        if state is None:
            raise ValueError('pi0 needs the state (B, S) of its state token')
        embedded = linear(self.action_in, x)
        actions = mix_time(
            self.action_time_in, self.action_time_out, embedded, conditioning
        ).expand(state.shape[0], -1, -1)
        token = by_request(partial(linear, self.state_projection), state)
        return torch.cat([token[:, None], actions], dim=1)

    def suffix_mask(self, device: torch.device) -> Tensor:
        tokens = self.dims.horizon + 1
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
        mask[0, 1:] = False
        return mask


class Pi05(PiNetwork):
    """The flow time becomes scale, shift and gate of the expert's norms; no state token."""

    def __init__(self, dims: PiDims) -> None:
        super().__init__(dims, adaptive=True)
        width = dims.expert.width
        self.time_in = nn.Linear(width, width)
        self.time_out = nn.Linear(width, width)

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Return every norm's modulation in running order; (N,) to (N, (2 depth + 1) * 3 W)."""
        embedded = time_embedding(times, self.dims.expert.width)
        condition = F.silu(self.time_out(F.silu(self.time_in(embedded))))
        norms = [
            norm for block in self.expert.layers for norm in (block.input_norm, block.post_norm)
        ]
        adaptive = cast(list[AdaptiveRMSNorm], [*norms, self.expert.norm])
        return torch.cat([norm.modulation(condition) for norm in adaptive], dim=1)

    def modulations(self, conditioning: Tensor) -> Sequence[Modulation | None]:
        return split_modulations(conditioning, self.dims.expert.width)

    def embed_suffix(
        self, x: Tensor, conditioning: Tensor, state: Tensor | None, linear: Apply = apply
    ) -> Tensor:
        return linear(self.action_in, x)

    def suffix_mask(self, device: torch.device) -> Tensor:
        return torch.ones(self.dims.horizon, self.dims.horizon, dtype=torch.bool, device=device)


NETWORKS = {'pi05': Pi05, 'pi0': Pi0}
FUSED = {'pi05': FusedPi, 'pi0': FusedPi}
