"""The one layer both transformers share, and how a network is put into reduced precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Linear):
    """A linear layer that computes in the dtype of its own weights.

    The residual stream, norms and time path stay in float32; only the large matrix products run
    in reduced precision. So the cast sits here and nowhere else.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


def cast_weights(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Put the large matrices of a network into `dtype`, in place.

    Cast are the attention, MLP and projector matrices and the text table. Patch and position
    embeddings, norms with their modulation, action, state and time projections stay float32
    (the split that openpi serves with; see also its `to_bfloat16_for_selected_params`).
    """
    for module in network.modules():
        if isinstance(module, (Linear, nn.Embedding)):
            module.to(dtype)
    return network
