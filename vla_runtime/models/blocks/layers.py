"""Linear layers and norms that all networks share; which parameters may be in reduced precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Activation = Callable[[Tensor], Tensor]
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


def requests_together() -> int:
    """Return how many requests the rows of what runs here are of."""
    return _BATCH.requests


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


class Projection(nn.Module):
    """A linear layer in float32; its weight is (outputs, inputs) or, `input_major`, reversed."""

    def __init__(self, inputs: int, outputs: int, *, input_major: bool, bias: bool = True) -> None:
        super().__init__()
        shape = (inputs, outputs) if input_major else (outputs, inputs)
        self.input_major = input_major
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        nn.init.normal_(self.weight, std=inputs**-0.5)

    def of_inputs(self, part: slice) -> Tensor:
        """The matrix of some of the inputs, (outputs, n)."""
        return self.weight[part].transpose(0, 1) if self.input_major else self.weight[:, part]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.transpose(0, 1) if self.input_major else self.weight
        return F.linear(x, weight, self.bias)


def normalise_rms(x: Tensor, weight: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
    """x / rms(x) over the last dimension, times the weight, in float32 (arXiv 1910.07467)."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, epsilon)


def normalise(
    x: Tensor,
    scale: Tensor | None,
    modulation: tuple[Any, Tensor, Any] | None,
    epsilon: float,
    out: Tensor | None = None,
) -> Tensor:
    """RMSNorm of (B, T, W) in float32, by scale (W,) or modulation; `out` has its own dtype.

    As `normalise_rms`, in the operators that are fastest on the device, without gradients.
    """
    if norms_at_once(x):
        found = normalise_rms(x, None if modulation else scale, epsilon)
    else:
        # `vector_norm` rounds twice more, for a whole row alike.
        inverse = x.square().mean(dim=-1, keepdim=True).add_(epsilon).rsqrt_()
        found = x * inverse
        if modulation is None:
            assert scale is not None
            found.mul_(scale)
    if modulation is not None:
        return torch.addcmul(modulation[1], found, modulation[0], out=out)
    return found if out is None else out.copy_(found)


def norms_at_once(x: Tensor) -> bool:
    """Return whether `normalise_rms` is faster than its operators one by one, as on a GPU."""
    return x.is_cuda


class QueryScale(nn.Module):
    """A layer whose weights scale an attention's queries, with the scale of the scores.

    An exported graph multiplies `query_scale` into this layer's weights, not into all scores.
    """

    query_scale: float


class QueryLinear(Linear, QueryScale):
    """The query projection of an attention with scores scaled by 1/sqrt(head_dim)."""

    def __init__(self, inputs: int, outputs: int, head_dim: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.query_scale = head_dim**-0.5


def query_scales(network: nn.Module) -> dict[str, float]:
    return {
        f'{prefix}.{name}': module.query_scale
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


# Scale (one is added already) and shift of a norm, and the gate of what is behind it, (B or 1, 1 or
# T, W) each; scale and gate may be None.
Modulation = tuple[Any, Tensor, Any]


def joined(product: Any) -> Any:
    """Return what `join` made; None where PyTorch records gradients, which it does not have.

    This reads the grad mode (`torch.no_grad`, `torch.inference_mode`), so one module computes by
    its joined products without gradients, and layer by layer with them. Before `join` the product
    is None in both.
    """
    return None if torch.is_grad_enabled() else product


# --------------------------------------------------------------------------------------------------
# Norms, each with an optional modulation.


def modulate(normed: Tensor, modulation: Modulation | None) -> Tensor:
    if modulation is None:
        return normed
    scale, shift, _ = modulation
    return normed + shift if scale is None else normed * scale + shift


class RmsNorm(nn.Module):
    """RMSNorm (arXiv 1910.07467); Gemma's weight is an offset from one.

    Args:
        offset: added to the weight: 1.0 in Gemma, else 0.0.
    """

    def __init__(self, width: int, epsilon: float = 1e-6, *, offset: float = 0.0) -> None:
        super().__init__()
        self.epsilon, self.offset = epsilon, offset
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self._scale: Tensor | None = None

    def scale(self) -> Tensor:
        """Scale (W,) float32, with its offset."""
        weight = self.weight.float()
        return self.offset + weight if self.offset else weight

    def join(self) -> None:
        self._scale = self.scale().detach()

    def forward(self, x: Tensor, modulation: Modulation | None = None) -> Tensor:
        """(B, T, W) to (B, T, W) float32."""
        if (scale := joined(self._scale)) is not None:
            return modulate(normalise(x, scale, None, self.epsilon), modulation)
        return modulate(normalise_rms(x, self.scale(), self.epsilon), modulation)


class QueryNorm(RmsNorm, QueryScale):
    """RMSNorm of the queries of each head, for attention with scores scaled by 1/sqrt(D)."""

    def __init__(self, head_dim: int, epsilon: float) -> None:
        super().__init__(head_dim, epsilon)
        self.query_scale = head_dim**-0.5


class AdaptiveNorm(nn.Module):
    """RMSNorm whose scale, shift and residual gate come from the flow time, once a schedule."""

    epsilon = 1e-6

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 3 * width)
        # Gates start at zero: an untrained expert is the identity (adaLN-Zero, arXiv 2212.09748).
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        self._is_joined = False

    def join(self) -> None:
        self._is_joined = True

    def forward(self, x: Tensor, modulation: Modulation | None = None) -> Tensor:
        if joined(self._is_joined):
            return normalise(x, None, modulation, self.epsilon)
        return modulate(normalise_rms(x), modulation)


class LayerNorm(nn.LayerNorm):
    """Layer norm (arXiv 1607.06450) in float32."""

    def forward(self, x: Tensor, modulation: Modulation | None = None) -> Tensor:
        return modulate(super().forward(x), modulation)


class PlainNorm(nn.Module):
    """Layer norm without weights, in float32, for a modulation."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: Tensor, modulation: Modulation | None = None) -> Tensor:
        return modulate(F.layer_norm(x, x.shape[-1:], eps=self.epsilon), modulation)


def split_modulations(conditioning: Tensor, width: int) -> list[Modulation]:
    """Split a row of the time table into the modulations of all norms, in the order they run in.

    `conditioning` is (B or 1, norms * 3 W), scale, shift and gate of each norm, or
    (B or 1, T, norms * 3 W) where each token has its own flow time.
    """
    rows = conditioning if conditioning.dim() == 3 else conditioning[:, None]
    norms = rows.shape[-1] // (3 * width)
    # All norms' scales first, so that one is added once.
    parts = rows.reshape(*rows.shape[:2], norms, 3, width).chunk(3, dim=3)
    scale, shift, gate = (part.flatten(2) for part in parts)
    each = (part.chunk(norms, dim=-1) for part in (1.0 + scale, shift, gate))
    return list(zip(*each, strict=True))
