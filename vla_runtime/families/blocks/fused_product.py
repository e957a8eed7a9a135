"""Matrix products of the fused blocks: several linear layers at once, and in one pass on a CPU.

oneDNN adds bias and activation while it still holds a product's numbers, and in float32 it takes a
tenth less time than the library that `F.linear` calls. PyTorch's compiler reaches it through an
operator without a public name. Where the operator is missing, or refuses a dtype of this processor,
the public ones compute the same up to rounding.

oneDNN lays a matrix out anew in every product. With few tokens that is a fifth to a third of the
time, so the expert's matrices, which every denoise step multiplies, are laid out once at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.float8 import multiply, require_equal
from vla_runtime.families.blocks.layers import Linear

# Multiplications from which on one pass is worth the call, which costs some 10 µs more.
ONE_PASS_FROM = 2**24
# The same with a matrix that is laid out already.
PACKED_FROM = 2**22


class Product:
    """One matrix product for several linear layers with the same input.

    Args:
        layers: whose outputs follow one another; all have a bias, or none has. Their weights
            become views of the merged matrix.
        packed: keep a second copy of the matrix as oneDNN lays it out, for products of few tokens.

    Attributes:
        dtype: of its results.

    Raises:
        ValueError: as `float8.require_equal`.
    """

    def __init__(self, layers: Sequence[Linear], packed: bool = False) -> None:
        self.dtype = layers[0].dtype
        self.weight = _merge(layers, 'weight')
        self.bias = _merge(layers, 'bias') if layers[0].bias is not None else None
        # In 8 bits.
        scales = [layer.weight_scale for layer in layers if layer.weight_scale is not None]
        self._scale = torch.cat(scales) if scales else None
        if self._scale is not None:
            require_equal(self.weight, self._scale, self.bias)
        self._transposed = self.weight.t()
        self._one_pass: Any = None if scales else one_pass(self.weight.device.type, self.dtype)
        self._packed = packed and self._one_pass is not None
        # As the operator takes it.
        self._matrix = _pack(self.weight) if self._packed else self.weight
        # Without bias and activation one pass saves nothing in reduced precision.
        self._worth = self._packed or self.dtype == torch.float32 or self.bias is not None

    def __call__(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        if self._scale is not None:
            return multiply(x, self.weight, self._scale, self.bias)
        x = x.to(self.weight.dtype)
        if self._worth and self._is_large(x):
            return self._one_pass(x, self._matrix, self.bias, 'none', [], '')
        return F.linear(x, self.weight, self.bias)

    def gelu(self, x: Tensor) -> Tensor:
        """As a call, through GELU in its tanh form."""
        if self._scale is not None:
            return F.gelu(self(x), approximate='tanh')
        x = x.to(self.weight.dtype)
        if self._is_large(x):
            return self._one_pass(x, self._matrix, self.bias, 'gelu', [], 'tanh')
        return F.gelu(F.linear(x, self.weight, self.bias), approximate='tanh')

    def into(self, x: Tensor, out: Tensor) -> None:
        """(N, inputs) to (N, outputs) of layers without bias, all in the dtype of the results."""
        found = self.by_way_of(out, x)
        if found is not out:
            out.copy_(found)

    def by_way_of(self, buffer: Tensor, x: Tensor) -> Tensor:
        """As `into`; return the buffer, or a new tensor where filling the buffer takes a copy."""
        if self._scale is not None or (self._worth and self._is_large(x)):
            return self(x)
        return torch.mm(x, self._transposed, out=buffer)

    def _is_large(self, x: Tensor) -> bool:
        if self._one_pass is None:
            return False
        least = PACKED_FROM if self._packed else ONE_PASS_FROM
        return x.numel() * self.weight.shape[0] >= least


@cache
def one_pass(device: str, dtype: torch.dtype) -> Any:
    """Return the operator (x, weight, bias, activation, numbers, variant) to outputs, or None.

    Args:
        device: type of the device.
        dtype: of all its tensors.
    """
    operator = getattr(torch.ops.mkldnn, '_linear_pointwise', None)
    if device != 'cpu' or operator is None:
        return None
    x, weight, bias = (
        torch.ones(*shape, dtype=dtype, device=device) for shape in ((2, 16), (16, 16), (16,))
    )
    try:
        found = operator(x, weight, bias, 'gelu', [], 'tanh')
    except RuntimeError:
        return None
    expected = F.gelu(F.linear(x, weight, bias), approximate='tanh')
    return operator if torch.allclose(found, expected, rtol=1e-2) else None


def _pack(weight: Tensor) -> Tensor:
    """Copy a matrix (outputs, inputs) into oneDNN's own layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())


def _merge(layers: Sequence[Linear], name: str) -> nn.Parameter:
    merged = torch.cat([getattr(layer, name).data for layer in layers])
    if merged.dim() == 2 and merged.dtype == torch.float32:
        # Inputs first in memory: a product with few tokens takes a fifth less time.
        merged = merged.t().contiguous().t()
    parts = merged.split([len(getattr(layer, name)) for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        setattr(layer, name, nn.Parameter(part, requires_grad=False))
    if merged.is_cuda:
        # No merged matrix fits where the single ones were. Kept, they would double the memory.
        torch.cuda.empty_cache()
    return nn.Parameter(merged, requires_grad=False)
