"""pi0.5 (arXiv 2504.16054): state in the prompt, flow time through adaptive norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.action_time import time_embedding
from vla_runtime.families.blocks.gemma import AdaptiveRMSNorm, Modulation, split_modulations
from vla_runtime.families.blocks.layers import Apply, apply
from vla_runtime.families.pi.dimensions import PiDims
from vla_runtime.families.pi.flow_policy import PiNetwork


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
