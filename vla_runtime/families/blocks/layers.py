"""Layers that all transformers share, and the parameters that may run in reduced precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.dimensions import DecoderDims

# Computes a float32 layer of some tokens, as `apply`.
Apply = Callable[[nn.Linear, Tensor], Tensor]


def apply(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return (..., outputs) of (..., inputs) in the layer's own operators."""
    return layer(x)


class _Batch(local):
    requests = 1


_BATCH = _Batch()


@contextmanager
def batch_of(requests: int) -> Iterator[None]:
    """Say how many requests the rows of what runs here are of, request by request."""
    _BATCH.requests = requests
    try:
        yield
    finally:
        _BATCH.requests = 1


def by_request(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a layer of one token a row (B, ...) to each request's rows apart.

    A CPU multiplies one token in another way than several, which changes the last bits.
    """
    if _BATCH.requests == 1:
        return layer(x)
    return torch.cat([layer(part) for part in x.chunk(_BATCH.requests)])


class Linear(nn.Linear):
    """A linear layer that computes in the dtype of its own weights, to which it casts its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


def normalise_rms(x: Tensor, weight: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
    """x / rms(x) over the last dimension, times the weight, in float32 (arXiv 1910.07467)."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, epsilon)


class QueryScale(nn.Module):
    """A layer whose weights scale an attention's queries, with the scale of the scores.

    An exported graph multiplies `scale` into this layer's weights, instead of into all scores.
    """

    scale: float


class QueryLinear(Linear, QueryScale):
    """The query projection of an attention with scores scaled by 1/sqrt(head_dim)."""

    def __init__(self, inputs: int, outputs: int, head_dim: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.scale = head_dim**-0.5


def query_scales(network: nn.Module) -> dict[str, float]:
    return {
        f'{prefix}.{name}': module.scale
        for prefix, module in network.named_modules()
        if isinstance(module, QueryScale)
        for name, _ in module.named_parameters(recurse=False)
    }


def matrix_names(network: nn.Module) -> set[str]:
    """Names of the parameters that may run in reduced precision.

    These are the attention, MLP and projector matrices and the text table; all others stay float32
    (the split that openpi serves with; see its `to_bfloat16_for_selected_params`).
    """
    return {
        f'{prefix}.{name}'
        for prefix, module in network.named_modules()
        if isinstance(module, (Linear, nn.Embedding))
        for name, _ in module.named_parameters(recurse=False)
    }


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form (arXiv 1606.08415)."""
    return F.gelu(x, approximate='tanh')


class GatedMlp(nn.Module):
    """An MLP of a decoder, its hidden numbers gated through an activation (arXiv 2002.05202)."""

    def __init__(self, dims: DecoderDims, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = Linear(dims.width, dims.mlp_dim, bias=False)
        self.up = Linear(dims.width, dims.mlp_dim, bias=False)
        self.down = Linear(dims.mlp_dim, dims.width, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class MultiHeadAttention(nn.Module):
    """Projections of an attention whose heads share the width W; the forward pass is the user's."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = QueryLinear(width, width, width // num_heads)
        self.k = Linear(width, width)
        self.v = Linear(width, width)
        self.out = Linear(width, width)

    def heads(self, projected: Tensor) -> Tensor:
        """(B, T, W) to (B, heads, T, D)."""
        batch, tokens, _ = projected.shape
        return projected.view(batch, tokens, self.num_heads, -1).transpose(1, 2)
