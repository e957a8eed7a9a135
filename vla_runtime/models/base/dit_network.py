"""Flow networks whose head is a DiT in buckets of the flow time (GR00T's, arXiv 2503.14734).

Keys and values of the DiT's cross-attention are constant over the denoise steps, so `prefix`
computes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.family.dit import BUCKETS, DIT_CODE, PERIODS, SLACK, UNIT, StackDims
from vla_runtime.models.base.flow_network import FlowNetwork
from vla_runtime.models.blocks.layers import PlainNorm, Projection, by_request, gelu_tanh, modulate
from vla_runtime.models.blocks.products import FEW
from vla_runtime.models.blocks.transformer import Attention, Block, Mlp

# Epsilon of all norms of the blocks; that of the DiT's last one is smaller.
EPSILON, LAST_EPSILON = 1e-5, 1e-6


class DitBlock(Block):
    """Cross- or self-attention and MLP of the DiT, as wide as its heads together.

    Its norms have no weights; the flow time modulates the first (arXiv 2212.09748).
    `memory_width` is the context's; None: the block attends to its own tokens.
    """

    def __init__(self, dims: StackDims, memory_width: int | None) -> None:
        width = dims.heads_width
        super().__init__(
            lambda: PlainNorm(EPSILON),
            lambda: Attention(
                width, dims.num_heads, head_dim=dims.head_dim, memory_width=memory_width
            ),
            lambda: Mlp(width, dims.mlp_dim, gelu_tanh),
            way=FEW,
        )
        self.modulation = nn.Linear(width, 2 * width)


class PlainMlp(nn.Module):
    """Two layers in float32 with a ReLU between them."""

    def __init__(self, inputs: int, hidden: int, outputs: int, *, input_major: bool) -> None:
        super().__init__()
        self.fc1 = Projection(inputs, hidden, input_major=input_major)
        self.fc2 = Projection(hidden, outputs, input_major=input_major)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.fc2(F.relu(self.fc1(x))))


class ActionEncoder(nn.Module):
    """Noisy actions and their flow time to action tokens."""

    def __init__(self, actions: int, width: int, *, input_major: bool) -> None:
        super().__init__()
        self.embed = Projection(actions, width, input_major=input_major)
        self.mix = Projection(2 * width, width, input_major=input_major)
        self.out = Projection(width, width, input_major=input_major)

    def time_share(self, code: Tensor) -> Tensor:
        """Return the time's contribution to `mix`, bias included; (N, W) codes to (N, W)."""
        return F.linear(code, self.mix.of_inputs(slice(code.shape[1], None)), self.mix.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """(B, H, A) and shares (B or 1, H or 1, W) to (B, H, W)."""
        h = self.embed(x)
        mixed = F.linear(h, self.mix.of_inputs(slice(h.shape[-1]))) + time
        return cast(Tensor, self.out(F.silu(mixed)))


# Keys, values and mask of the tokens that a cross-attention block reads; None: all are there.
KeyValues = tuple[Tensor, Tensor, Tensor | None]


class DitNetwork(FlowNetwork):
    """The head; a subclass adds vision and language model, and what `prefix` returns of them.

    Shapes: R prompt rows, H horizon, A padded action dimension, S padded state dimension, M
    language width, W DiT width, K tokens that a cross-attention block reads.
    """

    dims: Any

    def __init__(self, dims: Any) -> None:
        super().__init__()
        self.dims = dims
        width = dims.dit_width
        if dims.future_tokens:
            self.future_tokens = nn.Parameter(torch.empty(dims.future_tokens, width))
            nn.init.normal_(self.future_tokens, std=0.02)
        self.positions = nn.Parameter(torch.empty(dims.positions, width))
        nn.init.normal_(self.positions, std=0.02)

    def build_dit(self, memory_width: int) -> None:
        """Make the head's layers, behind those of vision and language model in the state dict."""
        dims = self.dims
        width, hidden, major = dims.dit_width, dims.head_width, dims.input_major
        if dims.state_dim:
            states = dims.state_dim // dims.state_steps
            self.state_encoder = PlainMlp(states, hidden, width, input_major=major)
        self.action_encoder = ActionEncoder(dims.action_dim, width, input_major=major)
        self.time_in = nn.Linear(DIT_CODE, width)
        self.time_out = nn.Linear(width, width)
        self.dit = nn.ModuleList(
            DitBlock(dims.dit, memory_width if block in dims.cross_blocks else None)
            for block in range(dims.dit.depth)
        )
        self.out_modulation = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, hidden)
        self.action_decoder = PlainMlp(hidden, hidden, dims.action_dim, input_major=major)

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
        """As `FlowNetwork.velocity`; `rows` is `state` (R, S), if the network sees one.

        The training's own velocity points from noise to actions; this is its negative.
        """
        memories = self.memories(past)
        if self.dims.state_dim:
            state = self.encode_state(rows['state'])
        else:
            key = memories[0][0]
            state = torch.zeros(key.shape[0], 0, self.dims.dit_width, device=key.device)
        tokens, modulations = self.embed_tokens(x, state, conditioning)
        return self.decode(tokens, modulations, memories)

    def memories(self, past: Mapping[str, Tensor]) -> dict[int, KeyValues]:
        """Keys, values (R, heads, K, D) and mask (R, K) that each cross-attention block reads."""
        raise NotImplementedError

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
        for index, block in enumerate(self.blocks):
            scale, shift = modulations[index].chunk(2, dim=-1)
            first = (1.0 + scale, shift, None)
            if index in memories:
                key, value, seen = memories[index]
                mask = None if seen is None else seen[:, None]
                h = block(h, mask, memory=(key, value), first=first)
            else:
                h = block(h, first=first)
        horizon = self.dims.horizon
        # The last norm has shift and scale in the other order than those of the blocks.
        shift, scale = modulations[-1][:, -horizon:].chunk(2, dim=-1)
        last = modulate(
            F.layer_norm(h[:, -horizon:], h.shape[-1:], eps=LAST_EPSILON),
            (1.0 + scale, shift, None),
        )
        return -self.action_decoder(self.out(last))

    @property
    def blocks(self) -> list[DitBlock]:
        return [cast(DitBlock, block) for block in self.dit]


def bucket(times: Tensor) -> Tensor:
    """Buckets of flow times (N,), int64; as `family.dit.bucket`."""
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
