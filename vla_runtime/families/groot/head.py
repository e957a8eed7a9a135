"""GR00T's action head (arXiv 2503.14734): self-attention over the features, and a DiT.

Keys and values of the DiT's cross-attention are constant over the denoise steps, so `prefix`
computes them. The training code masks no padding in the self-attention over the features; here it
is masked, so that every prompt is as if alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.layers import by_request
from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.groot.declaration import BUCKETS, DIT_CODE, PERIODS, SLACK, UNIT
from vla_runtime.families.groot.dimensions import HeadDims
from vla_runtime.families.groot.transformer import (
    LAST_EPSILON,
    ContextBlock,
    DitBlock,
    SlicedLinear,
    SlicedMlp,
    modulated,
)

# Keys, values and mask of the tokens that a cross-attention block reads.
KeyValues = tuple[Tensor, Tensor, Tensor]


class ActionEncoder(nn.Module):
    """Noisy actions and their flow time to action tokens, for one embodiment."""

    def __init__(self, actions: int, width: int) -> None:
        super().__init__()
        self.embed = SlicedLinear(actions, width)
        self.mix = SlicedLinear(2 * width, width)
        self.out = SlicedLinear(width, width)

    def time_share(self, code: Tensor) -> Tensor:
        """Return the time's contribution to `mix`, bias included; (N, W) codes to (N, W)."""
        return F.linear(code, self.mix.weight[code.shape[1] :].t(), self.mix.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """(B, H, A) and shares (B or 1, H or 1, W) to (B, H, W)."""
        h = self.embed(x)
        return self.out(F.silu(F.linear(h, self.mix.weight[: h.shape[-1]].t()) + time))


class GrootHead(FlowNetwork):
    """Context blocks and DiT; a subclass adds vision, language model and prefix.

    Shapes: R prompt rows, P tokens of the prefix, H horizon, A padded action dimension, S padded
    state dimension, M language width, W DiT width.
    """

    dims: HeadDims

    def __init__(self, dims: HeadDims) -> None:
        super().__init__()
        self.dims = dims
        width = dims.dit_width
        if dims.future_tokens:
            self.future_tokens = nn.Parameter(torch.empty(dims.future_tokens, width))
            nn.init.normal_(self.future_tokens, std=0.02)
        self.positions = nn.Parameter(torch.empty(dims.positions, width))
        nn.init.normal_(self.positions, std=0.02)

    def build_head(self) -> None:
        """Make the head's layers, behind those of vision and language model in the state dict."""
        dims = self.dims
        language, width = dims.language.width, dims.dit_width
        self.context_norm = nn.LayerNorm(language)
        context = dims.context
        self.context = nn.ModuleList(
            []
            if context is None
            else [ContextBlock(context, language) for _ in range(context.depth)]
        )
        self.state_encoder = SlicedMlp(dims.state_dim // dims.state_steps, dims.head_width, width)
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

    def memories(self, past: Mapping[str, Tensor]) -> dict[int, KeyValues]:
        """Keys, values (R, heads, K, D) and mask (R, K) that each cross-attention block reads."""
        raise NotImplementedError

    def encode_context(self, features: Tensor, mask: Tensor) -> Tensor:
        """Self-attention over the features, (R, P, M)."""
        x = self.context_norm(features)
        for block in self.context:
            x = block(x, mask[:, None])
        return x

    def encode_state(self, state: Tensor) -> Tensor:
        """States (B, S) of all time steps to tokens (B, time steps, W)."""
        by_step = state.view(state.shape[0], self.dims.state_steps, -1)
        return by_request(self.state_encoder, by_step)

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Return the action encoder's share of the time, then the modulation of every DiT norm.

        Times (N,) run from 1 (noise) to 0 (actions); (N, W + 2 W * (blocks + 1)) float32.
        """
        buckets = bucket(times)
        share = self.action_encoder.time_share(action_code(buckets, self.dims.dit_width))
        embedded = self.time_out(F.silu(self.time_in(dit_code(buckets))))
        norms = [*(block.modulation for block in self.blocks), self.out_modulation]
        return torch.cat([share, *(norm(F.silu(embedded)) for norm in norms)], dim=1)

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
        """As `FlowNetwork.velocity`; `rows` is `state` (R, S).

        GR00T's own velocity points from noise to actions; this is its negative.
        """
        memories = self.memories(past)
        tokens, modulations = self.embed_tokens(x, self.encode_state(rows['state']), conditioning)
        return self.decode(tokens, modulations, memories)

    def embed_tokens(
        self, x: Tensor, state: Tensor, conditioning: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Put the DiT's tokens together: state, future tokens if any, actions with their positions.

        Args:
            x: (B or 1, H, A); state: (B, time steps, W), encoded.
            conditioning: (B or 1, C), or (B or 1, H, C) with one row for each action; state and
                future tokens then have that of the last one.

        Returns:
            Tokens (B, T, W), and the modulation (B or 1, 1 or T, 2 W) of every block's norm and of
            the last one.
        """
        batch, width, horizon = state.shape[0], self.dims.dit_width, self.dims.horizon
        time = conditioning if conditioning.dim() == 3 else conditioning[:, None]
        actions = self.action_encoder(x, time[..., :width]) + self.positions[:horizon]
        parts = [state, actions.expand(batch, -1, -1)]
        if self.dims.future_tokens:
            parts.insert(1, self.future_tokens[None].expand(batch, -1, -1))
        tokens = torch.cat(parts, dim=1)
        modulation = time[..., width:]
        if conditioning.dim() == 3:
            first = modulation[:, -1:].expand(-1, tokens.shape[1] - horizon, -1)
            modulation = torch.cat([first, modulation], dim=1)
        return tokens, modulation.chunk(self.dims.dit.depth + 1, dim=-1)

    def decode(
        self, h: Tensor, modulations: tuple[Tensor, ...], memories: Mapping[int, KeyValues]
    ) -> Tensor:
        """Run the DiT over its tokens (B, T, W); velocity (B, H, A)."""
        every = torch.ones(1, 1, h.shape[1], dtype=torch.bool, device=h.device)
        for index, block in enumerate(self.blocks):
            if index in memories:
                key, value, seen = memories[index]
                h = block(h, modulations[index], (key, value), seen[:, None])
            else:
                h = block(h, modulations[index], None, every)
        horizon = self.dims.horizon
        # The last norm has shift and scale in the other order than those of the blocks.
        shift, scale = modulations[-1][:, -horizon:].chunk(2, dim=-1)
        out = self.out(modulated(h[:, -horizon:], scale, shift, LAST_EPSILON))
        return -self.action_decoder(out)

    @property
    def blocks(self) -> list[DitBlock]:
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
