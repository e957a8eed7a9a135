"""Networks of pi0 and pi0.5 by name, and their fused form.

pi0 (arXiv 2410.24164): state as a token of its own, flow time mixed into the actions. pi0.5 (arXiv
2504.16054): state in the prompt, flow time through adaptive norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.action_time import mix_time, time_embedding, time_share
from vla_runtime.families.blocks.gemma import AdaptiveRMSNorm, Modulation, split_modulations
from vla_runtime.families.blocks.layers import Apply, apply
from vla_runtime.families.pi.dimensions import PiDims
from vla_runtime.families.pi.flow_policy import PiNetwork
from vla_runtime.families.pi.fused import FusedPi


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
