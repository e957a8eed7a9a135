"""GR00T N1.5 (arXiv 2503.14734): Eagle's features, self-attention over them, and a DiT.

Keys and values that the DiT's cross-attention blocks compute from the features are constant over
the denoise steps, so `prefix` computes them. The features never see state or actions, so the split
is exact. `joint_velocity` runs everything together to validate it; it is not called at run time.

The training code masks no padding in its head, so a batch of prompts of different lengths differs
there from each prompt alone. Padding is masked here: every prompt is as if alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.attention import images_of_rows, repeat_rows, rotary
from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.groot.dimensions import GrootDims
from vla_runtime.families.groot.qwen3 import Qwen3
from vla_runtime.families.groot.time_table import (
    BUCKETS,
    DIT_CODE,
    PERIODS,
    SLACK,
    UNIT,
)
from vla_runtime.families.groot.transformer import (
    LAST_EPSILON,
    ContextBlock,
    DitBlock,
    SlicedLinear,
    SlicedMlp,
    modulated,
)
from vla_runtime.families.groot.vision import EagleVision


class ActionEncoder(nn.Module):
    """Noisy actions and their flow time to action tokens, for one embodiment."""

    def __init__(self, actions: int, width: int) -> None:
        super().__init__()
        self.embed = SlicedLinear(actions, width)
        self.mix = SlicedLinear(2 * width, width)
        self.out = SlicedLinear(width, width)

    def time_share(self, code: Tensor) -> Tensor:
        """Return the time's share of `mix`, bias included; (N, W) codes to (N, W)."""
        return F.linear(code, self.mix.weight[code.shape[1] :].t(), self.mix.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """(B, H, A) and shares (B or 1, H or 1, W) to (B, H, W)."""
        h = self.embed(x)
        return self.out(F.silu(F.linear(h, self.mix.weight[: h.shape[-1]].t()) + time))


class GrootN15(FlowNetwork):
    """Vision encoder, language model, context blocks and DiT.

    Shapes: R prompt rows, V cameras, N tokens an image, L text tokens, P = V*N + L, H horizon,
    A padded action dimension, S padded state dimension, M language width, W DiT width.
    """

    dims: GrootDims
    vision: EagleVision

    def __init__(self, dims: GrootDims) -> None:
        super().__init__()
        self.dims = dims
        language, width = dims.language.width, dims.dit_width
        self.future_tokens = nn.Parameter(torch.empty(dims.future_tokens, width))
        self.positions = nn.Parameter(torch.empty(dims.positions, width))
        for table in (self.future_tokens, self.positions):
            nn.init.normal_(table, std=0.02)
        self.vision = EagleVision(dims)
        self.language = Qwen3(dims.language, dims.rms_epsilon, dims.vocabulary)
        self.context_norm = nn.LayerNorm(language)
        self.context = nn.ModuleList(
            ContextBlock(dims.context, language) for _ in range(dims.context.depth)
        )
        self.state_encoder = SlicedMlp(dims.state_dim, dims.head_width, width)
        self.action_encoder = ActionEncoder(dims.action_dim, width)
        self.time_in = nn.Linear(DIT_CODE, width)
        self.time_out = nn.Linear(width, width)
        self.dit = nn.ModuleList(
            DitBlock(dims.dit, language if block in dims.cross_blocks else None)
            for block in range(dims.dit.depth)
        )
        self.out_modulation = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, dims.head_width)
        self.action_decoder = SlicedMlp(dims.head_width, dims.head_width, dims.action_dim)

    def embed_prefix(
        self, image_tokens: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put images into the text, each at its place.

        Args:
            image_tokens: (R, V, N, M); image_mask: (R, V) bool.
            tokens: (R, L) int; token_mask: (R, L) bool.

        Returns:
            embeddings (R, P, M) float32 and mask (R, P) bool
        """
        text, count = self.language.embed(tokens), image_tokens.shape[2]
        embeddings, masks, start = [], [], 0
        for camera, place in enumerate(self.dims.image_places):
            if place > start:
                embeddings.append(text[:, start:place])
                masks.append(token_mask[:, start:place])
            embeddings.append(image_tokens[:, camera])
            masks.append(image_mask[:, camera : camera + 1].expand(-1, count))
            start = place
        if start < tokens.shape[1]:
            embeddings.append(text[:, start:])
            masks.append(token_mask[:, start:])
        return torch.cat(embeddings, dim=1), torch.cat(masks, dim=1)

    def features(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Language model's features (R, P, M) after its final norm; causal attention.

        Positions count what is there: a hidden camera is as if it were not in the prompt. Features
        of hidden tokens are meaningless and must stay masked.
        """
        positions = mask.long().cumsum(dim=1) - 1
        rotation = rotary(positions, self.dims.language.head_dim, self.dims.rope_base)
        length = mask.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
        own = torch.eye(length, dtype=torch.bool, device=mask.device)
        # A hidden token sees itself, so that no token sees nothing.
        seen = torch.logical_or(torch.logical_and(mask[:, None], causal), own)
        return self.language(embeddings, rotation, seen)

    def encode_context(self, features: Tensor, mask: Tensor) -> Tensor:
        """Self-attention over the features, (R, P, M)."""
        x = self.context_norm(features)
        for block in self.context:
            x = block(x, mask[:, None])
        return x

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return what the DiT's cross-attention blocks read; `rows` are `tokens`, `token_mask`.

        `cross_key` and `cross_value` are (blocks, R, heads, P, D); `prefix_mask` is (R, P) bool.
        """
        tokens, token_mask = rows['tokens'], rows['token_mask']
        images = images_of_rows(image_tokens, image_mask, tokens.shape[0])
        embeddings, mask = self.embed_prefix(*images, tokens, token_mask)
        context = self.encode_context(self.features(embeddings, mask), mask)
        blocks = [self._blocks[index] for index in self.dims.cross_blocks]
        keys, values = zip(*(block.attention.keys_values(context) for block in blocks), strict=True)
        return {
            'cross_key': torch.stack(keys),
            'cross_value': torch.stack(values),
            'prefix_mask': mask,
        }

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Return the action encoder's share of the time, then the modulation of every DiT norm.

        Args:
            times: (N,) flow times from 1 (noise) to 0 (actions).

        Returns:
            (N, W + 2 W * (blocks + 1)) float32
        """
        buckets = bucket(times)
        share = self.action_encoder.time_share(action_code(buckets, self.dims.dit_width))
        embedded = self.time_out(F.silu(self.time_in(dit_code(buckets))))
        norms = [*(block.modulation for block in self._blocks), self.out_modulation]
        return torch.cat([share, *(norm(F.silu(embedded)) for norm in norms)], dim=1)

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
        """As `FlowNetwork.velocity`; `rows` is `state` (R, S).

        GR00T's own velocity points from noise to actions; this is its negative.
        """
        mask = past['prefix_mask']
        shared = max(1, x.shape[0] // mask.shape[0])
        seen = repeat_rows(mask, shared)[:, None]
        state = self.state_encoder(repeat_rows(rows['state'], shared))[:, None]
        h, modulations = self.embed_tokens(x, state, conditioning)
        every = torch.ones(1, 1, h.shape[1], dtype=torch.bool, device=h.device)
        memory = {
            block: (
                repeat_rows(past['cross_key'][index], shared),
                repeat_rows(past['cross_value'][index], shared),
            )
            for index, block in enumerate(self.dims.cross_blocks)
        }
        for index, block in enumerate(self._blocks):
            own = memory.get(index)
            h = block(h, modulations[index], own, every if own is None else seen)
        return self.decode(h, modulations[-1])

    def embed_tokens(
        self, x: Tensor, state: Tensor, conditioning: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Put the DiT's tokens together: state, future tokens, actions with their positions.

        Args:
            x: (B or 1, H, A); state: (B, 1, W), encoded.
            conditioning: (B or 1, C), or (B or 1, H, C) with one row for each action; state and
                future tokens then have that of the last one.

        Returns:
            tokens (B, T, W), and the modulation (B or 1, 1 or T, 2 W) of every block's norm and of
            the last one
        """
        batch, width, horizon = state.shape[0], self.dims.dit_width, self.dims.horizon
        time = conditioning if conditioning.dim() == 3 else conditioning[:, None]
        actions = self.action_encoder(x, time[..., :width]) + self.positions[:horizon]
        future = self.future_tokens[None].expand(batch, -1, -1)
        tokens = torch.cat([state, future, actions.expand(batch, -1, -1)], dim=1)
        modulation = time[..., width:]
        if conditioning.dim() == 3:
            first = modulation[:, -1:].expand(-1, tokens.shape[1] - horizon, -1)
            modulation = torch.cat([first, modulation], dim=1)
        return tokens, modulation.chunk(self.dims.dit.depth + 1, dim=-1)

    def decode(self, h: Tensor, modulation: Tensor) -> Tensor:
        """Velocity of the DiT's tokens (B, T, W), (B, H, A)."""
        horizon = self.dims.horizon
        # The last norm has shift and scale in the other order than those of the blocks.
        shift, scale = modulation[:, -horizon:].chunk(2, dim=-1)
        out = self.out(modulated(h[:, -horizon:], scale, shift, LAST_EPSILON))
        return -self.action_decoder(out)

    def joint_velocity(
        self, embeddings: Tensor, mask: Tensor, x: Tensor, conditioning: Tensor, state: Tensor
    ) -> Tensor:
        """Return the velocity from one forward over everything, without any cache.

        Args:
            embeddings, mask: as `embed_prefix` returns them, (B, P, M) and (B, P).
            x, conditioning, state: as for `velocity`, batch B.
        """
        context = self.encode_context(self.features(embeddings, mask), mask)
        h, modulations = self.embed_tokens(x, self.state_encoder(state)[:, None], conditioning)
        every = torch.ones(1, 1, h.shape[1], dtype=torch.bool, device=h.device)
        for index, block in enumerate(self._blocks):
            if index in self.dims.cross_blocks:
                memory = block.attention.keys_values(context)
                h = block(h, modulations[index], memory, mask[:, None])
            else:
                h = block(h, modulations[index], None, every)
        return self.decode(h, modulations[-1])

    @property
    def _blocks(self) -> list[DitBlock]:
        return [cast(DitBlock, block) for block in self.dit]


def bucket(times: Tensor) -> Tensor:
    """Buckets of flow times (N,), int64; see `time_table.bucket`."""
    passed = UNIT - (times.double() * UNIT).round().long()
    return (passed * BUCKETS + SLACK) // UNIT


def dit_code(buckets: Tensor) -> Tensor:
    """Code of buckets for the DiT, (N,) to (N, 256): cosines, then sines."""
    angle = _angles(buckets, DIT_CODE // 2, DIT_CODE // 2 - 1)
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def action_code(buckets: Tensor, width: int) -> Tensor:
    """Code of buckets for the action encoder, (N,) to (N, width): sines, then cosines."""
    angle = _angles(buckets, width // 2, width // 2)
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def _angles(buckets: Tensor, half: int, divisor: int) -> Tensor:
    """Angles (N, half) float32: bucket * 10000^(-i / divisor)."""
    places = torch.arange(half, dtype=torch.float32, device=buckets.device)
    exponent = places * -torch.tensor(PERIODS, device=buckets.device).log() / divisor
    return buckets.float()[:, None] * exponent.exp()


NETWORKS = {'groot_n15': GrootN15}
