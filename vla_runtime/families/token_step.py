"""One pass of a `tokens` head as the engines run it: static shapes, tensors in and out."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from vla_runtime.families.token_network import TokenNetwork, TokenPass


class ReadToken(nn.Module):
    """Read a token of the answer back."""

    def __init__(self, network: TokenNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        tokens: Tensor,
        place: Tensor,
        past: Mapping[str, Tensor],
        answer_key: Tensor,
        answer_value: Tensor,
    ) -> TokenPass:
        """As `TokenNetwork.read_token`."""
        return self.network.read_token(tokens, place, past, answer_key, answer_value)
