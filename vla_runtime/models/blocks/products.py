"""Matrix products of the joined blocks: several linear layers at once, and in one pass on a CPU.

oneDNN adds bias, activation and gate while it still holds a product's numbers, through an operator
of PyTorch's without a public name. Where that is missing, refuses a dtype of this processor, or is
slower there (`is_faster`), the public ones compute the same up to rounding. oneDNN lays a matrix
out anew in every product, a fifth to a third of the time with few tokens; those of vision and
language are laid out once at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.files.machine import cpu_vendor
from vla_runtime.models.blocks.epilogues import Epilogue, add, gelu, usable
from vla_runtime.models.blocks.layers import Activation, Linear, gelu_tanh, requests_together

# Multiplications from which on one pass is worth the call, which costs some 10 µs more.
ONE_PASS_FROM = 2**24
# The same with a matrix that is laid out already.
PACKED_FROM = 2**22
# The operator's names of activations, and of their variants.
_ACTIVATIONS: dict[Activation | None, tuple[str, str]] = {
    None: ('none', ''),
    gelu_tanh: ('gelu', 'tanh'),
    F.gelu: ('gelu', 'none'),
    F.silu: ('swish', ''),
    F.relu: ('relu', ''),
}


class Way(NamedTuple):
    """How products of a joined block compute.

    Attributes:
        packed: keep a second copy of the matrix as oneDNN lays it out.
        inputs_first: order of a float32 matrix in a CPU's memory. With few tokens MKL takes a fifth
            less time; with many oneDNN takes up to twice as long.
        epilogues: take the next operation along on CUDA, where that is right.
    """

    packed: bool = False
    inputs_first: bool = False
    epilogues: bool = False


# A prompt's tokens through a language model, whose second copy would be large.
MANY = Way(epilogues=True)
IMAGES = Way(packed=True, epilogues=True)
# Some tens of tokens: those of a chunk.
FEW = Way(packed=True, inputs_first=True)


class Product:
    """One matrix product for several linear layers with the same input.

    Args:
        layers: layers whose outputs follow one another; all have a bias, or none has. Their
            weights become views of the merged matrix.
        epilogue: what follows may be taken along, where `way` says so: GELU with a bias, the sum
            with a residual stream without one.
    """

    def __init__(
        self, layers: Sequence[Linear], way: Way = MANY, *, epilogue: bool = False
    ) -> None:
        self.dtype = layers[0].weight.dtype
        self.weight = _merge(layers, 'weight', way.inputs_first)
        self.bias = _merge(layers, 'bias', False) if layers[0].bias is not None else None
        self._transposed = self.weight.t()
        self._one_pass: Any = (
            one_pass(self.weight.device.type, self.dtype) if is_faster(self.dtype) else None
        )
        self._packed = way.packed and self._one_pass is not None
        # As the operator takes it.
        self._matrix = _pack(self.weight) if self._packed else self.weight
        self._epilogue: Epilogue | None = None
        if epilogue and way.epilogues:
            self._epilogue = gelu if self.bias is not None else add
        # Without bias and activation one pass saves nothing in reduced precision.
        self._worth = self._packed or self.dtype == torch.float32 or self.bias is not None

    def __call__(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        """(..., inputs) to (..., outputs), through an activation.

        Rows of several requests take the way that those of one take, whose bits another may change.
        """
        x = x.to(self.weight.dtype)
        epilogue = self._usable(x) if activation is gelu_tanh else None
        if epilogue is not None and self.bias is not None:
            found = epilogue(x.flatten(0, -2), self.weight, self.bias)
            return found.unflatten(0, x.shape[:-1])
        known = activation in _ACTIVATIONS
        if known and (self._worth or activation is not None) and self._is_large(x):
            name, variant = _ACTIVATIONS[activation]
            return self._one_pass(x, self._matrix, self.bias, name, [], variant)
        outputs = F.linear(x, self.weight, self.bias)
        return outputs if activation is None else activation(outputs)

    def add_to(self, stream: Tensor, x: Tensor) -> Tensor:
        """Add what `__call__` returns to a stream (..., outputs) float32.

        Returns the sum, which may be the stream itself.
        """
        if (epilogue := self._usable(x)) is None:
            return stream + self(x)
        operand = x.to(self.weight.dtype).flatten(0, -2)
        epilogue(operand, self.weight, stream.view(-1, stream.shape[-1]))
        return stream

    def into(self, x: Tensor, out: Tensor) -> None:
        """(N, inputs) to (N, outputs) of layers without bias, all in the dtype of the results."""
        found = self.matmul_via(out, x)
        if found is not out:
            out.copy_(found)

    def matmul_via(self, buffer: Tensor, x: Tensor) -> Tensor:
        """As `into`; return the buffer, or a new tensor where filling the buffer takes a copy."""
        if self._worth and self._is_large(x):
            return self(x)
        return torch.mm(x, self._transposed, out=buffer)

    def in_float32(self) -> Product:
        """Return this product with a copy of its matrix in float32, in PyTorch's own operators."""
        wide = copy(self)
        wide.dtype, wide._one_pass, wide._packed = torch.float32, None, False
        wide._epilogue = None
        wide.weight = nn.Parameter(self.weight.float(), requires_grad=False)
        if self.bias is not None:
            wide.bias = nn.Parameter(self.bias.float(), requires_grad=False)
        wide._matrix, wide._transposed = wide.weight, wide.weight.t()
        return wide

    def _usable(self, x: Tensor) -> Epilogue | None:
        return _usable(self._epilogue, self.weight, x)

    def _is_large(self, x: Tensor) -> bool:
        if self._one_pass is None:
            return False
        least = PACKED_FROM if self._packed else ONE_PASS_FROM
        return x.numel() * self.weight.shape[0] >= least * requests_together()


class GatedProduct:
    """Hidden numbers of a gated MLP: the gate's outputs through its activation, times the others.

    Large products take two passes of oneDNN, or on CUDA two products, of which the gate's takes its
    GELU along. Others are a single product, because every call costs. `weight` is
    (2 * hidden, inputs), the gate's before the others.
    """

    def __init__(self, gate: Linear, up: Linear, activation: Activation, way: Way = MANY) -> None:
        self._merged = Product([gate, up], way._replace(packed=False))
        self.activation = activation
        self.weight = self._merged.weight
        self._one_pass = self._merged._one_pass
        self._least = PACKED_FROM if way.packed else ONE_PASS_FROM
        self._gate, self._up = self.weight.chunk(2)
        self._epilogue: Epilogue | None = None
        if way.epilogues and self.activation is gelu_tanh:
            self._epilogue = gelu
            self._no_bias = self.weight.new_zeros(len(self._gate))
        if way.packed and self._one_pass is not None:
            self._gate, self._up = map(_pack, (self._gate, self._up))

    def in_float32(self) -> GatedProduct:
        wide = copy(self)
        wide._merged, wide._one_pass, wide._epilogue = self._merged.in_float32(), None, None
        wide.weight = wide._merged.weight
        wide._gate, wide._up = wide.weight.chunk(2)
        return wide

    def __call__(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., hidden), a new tensor."""
        if (epilogue := _usable(self._epilogue, self._gate, x)) is not None:
            # The two halves of a single product are read with gaps, in a kernel each.
            operand = x.to(self._merged.dtype).flatten(0, -2)
            gate = epilogue(operand, self._gate, self._no_bias)
            return gate.mul_(F.linear(operand, self._up)).unflatten(0, x.shape[:-1])
        least = self._least * requests_together()
        if self._one_pass is None or x.numel() * self.weight.shape[0] < least:
            gate, up = self._merged(x).chunk(2, dim=-1)
            return self.activation(gate).mul_(up)
        x = x.to(self._merged.dtype)
        name, variant = _ACTIVATIONS[self.activation]
        gate = self._one_pass(x, self._gate, None, name, [], variant)
        return self._one_pass.binary(x, gate, self._up, None, 'mul')


def _usable(wanted: Epilogue | None, matrix: Tensor, x: Tensor) -> Epilogue | None:
    """Return an epilogue that is wanted if it is right for as many tokens as (..., inputs)."""
    if wanted is None:
        return None
    shape = x.shape[:-1].numel(), *matrix.shape
    return usable(wanted, matrix.device, matrix.dtype, shape)


def is_faster(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies faster than `F.linear` on this processor.

    In float32 `F.linear` calls MKL, which uses AVX-512 on Intel's processors alone: on AMD's with
    it oneDNN is twice as fast; MKL is faster on Intel's with it and on AMD's without. PyTorch for
    Arm has no MKL. No measurement at load decides: it would change the last bits of a policy's
    chunks.
    """
    if dtype != torch.float32 or not torch.backends.mkl.is_available():
        return True
    return 'AVX512' in torch.backends.cpu.get_cpu_capability() and cpu_vendor() != 'GenuineIntel'


@cache
def one_pass(device: str, dtype: torch.dtype) -> Any:
    """Return the operator (x, weight, bias, activation, numbers, variant) to outputs, or None.

    Its `binary` (x, factor, weight, bias, 'mul') multiplies the outputs.
    """
    operator = getattr(torch.ops.mkldnn, '_linear_pointwise', None)
    if device != 'cpu' or operator is None:
        return None
    x, weight, bias = (
        torch.ones(*shape, dtype=dtype, device=device) for shape in ((2, 16), (16, 16), (16,))
    )
    try:
        found = [
            operator(x, weight, bias, name, [], variant) for name, variant in _ACTIVATIONS.values()
        ]
        found.append(operator.binary(x, x + 1, weight, bias, 'mul'))
    except RuntimeError:
        return None
    outputs = F.linear(x, weight, bias)
    activated = [of(outputs) for of in (gelu_tanh, F.gelu, F.silu, F.relu)]
    expected = [outputs, *activated, outputs * (x + 1)]
    same = all(torch.allclose(*pair, rtol=1e-2) for pair in zip(found, expected, strict=True))
    return operator if same else None


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())


def _merge(layers: Sequence[Linear], name: str, inputs_first: bool) -> nn.Parameter:
    merged = torch.cat([getattr(layer, name).data for layer in layers])
    if inputs_first and merged.dtype == torch.float32 and merged.device.type == 'cpu':
        merged = merged.t().contiguous().t()
    parts = merged.split([len(getattr(layer, name)) for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        setattr(layer, name, nn.Parameter(part, requires_grad=False))
    if merged.is_cuda:
        # No merged matrix fits where the single ones were. Kept, they would double the memory.
        torch.cuda.empty_cache()
    return nn.Parameter(merged, requires_grad=False)
