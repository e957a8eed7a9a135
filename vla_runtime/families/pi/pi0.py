"""pi0 (arXiv 2410.24164): state as a token of its own, flow time mixed into the actions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vla_runtime.families.blocks.action_time import mix_time, time_share
from vla_runtime.families.blocks.gemma import Modulation
from vla_runtime.families.blocks.layers import Apply, apply
from vla_runtime.families.pi.dimensions import PiDims
from vla_runtime.families.pi.flow_policy import PiNetwork


class Pi0(PiNetwork):
    """Suffix: a state token, which does not see the actions, then the actions."""

    def __init__(self, dims: PiDims) -> None:
        super().__init__(dims, adaptive=False)
        width = dims.expert.width
        self.state_projection = nn.Linear(dims.state_dim, width)
        self.action_time_in = nn.Linear(2 * width, width)
        self.action_time_out = nn.Linear(width, width)

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Return the time's share of `action_time_in`, bias included; (N,) to (N, W)."""
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
        return torch.cat([linear(self.state_projection, state)[:, None], actions], dim=1)

    def suffix_mask(self, device: torch.device) -> Tensor:
        tokens = self.dims.horizon + 1
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
        mask[0, 1:] = False
        return mask
