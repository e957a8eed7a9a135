"""Products that take the next operation along on CUDA: bias and GELU, or the residual stream.

cuBLAS applies them before a product's numbers leave the multiprocessor, which saves a kernel, and
in half precision one rounding. `usable` tries every shape on the device the first time that it
runs, which is before a graph is captured of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_runtime.models.blocks.layers import gelu_tanh

logger = logging.getLogger(__name__)

# Input (N, inputs), weight (outputs, inputs), and what rides along, to (N, outputs).
Epilogue = Callable[[Tensor, Tensor, Tensor], Tensor]

# How far a right one may be from float32, in errors of the plain operators: by the mean of all
# numbers, and by the worst.
MEAN_RATIO, WORST_RATIO = 1.5, 3.0
# Of the product's largest number, in float32, whose reference the plain operators are.
EXACT = 2e-5
# A residual stream's numbers in units of the product's: tens to hundreds in a language model.
_STREAM = 100.0
# What CUDA and cuBLAS say of too little memory without an error of its own.
_NO_MEMORY = ('out of memory', 'ALLOC_FAILED')


def gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Product with its bias (outputs,), through GELU in its tanh form."""
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)


def add(x: Tensor, weight: Tensor, stream: Tensor) -> Tensor:
    """Product added to a residual stream (N, outputs) float32, which is overwritten."""
    # `addmm` takes no float32 beside matrices in half.
    whole = stream[None]
    torch.ops.aten.baddbmm.dtype_out(whole, x[None], weight.t()[None], stream.dtype, out=whole)
    return stream


def plain_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As `gelu`, in two operators."""
    return gelu_tanh(F.linear(x, weight, bias))


def plain_add(x: Tensor, weight: Tensor, stream: Tensor) -> Tensor:
    """As `add`, in two operators; the stream stays."""
    return stream + F.linear(x, weight)


_PLAIN: dict[Epilogue, Epilogue] = {gelu: plain_gelu, add: plain_add}


def usable(
    epilogue: Epilogue, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> Epilogue | None:
    """Return the epilogue on a GPU that computes it right, else None; the log says why.

    `shape` is tokens, outputs and inputs.
    """
    return _tried(epilogue, device, dtype, shape) if device.type == 'cuda' else None


@cache
def _tried(
    epilogue: Epilogue, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> Epilogue | None:
    try:
        fault = fault_of(epilogue, device, dtype, shape)
    except (AttributeError, RuntimeError) as refusal:
        message = str(refusal)
        # Free memory must not decide which numbers a policy gives.
        if isinstance(refusal, torch.cuda.OutOfMemoryError) or any(
            s in message for s in _NO_MEMORY
        ):
            raise
        fault = message.partition('\n')[0][:200]
    if not fault:
        return epilogue
    logger.info(
        'Products of %d tokens, %d outputs and %d inputs leave %s to a kernel of its own on %s in '
        '%s: %s',
        *shape,
        epilogue.__name__,
        device,
        str(dtype).removeprefix('torch.'),
        fault,
    )
    return None


def fault_of(
    epilogue: Epilogue, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> str:
    """Compare with the plain operators on random numbers; return what is wrong, or ''."""
    plain, (tokens, outputs, inputs) = _PLAIN[epilogue], shape
    generator = torch.Generator(device).manual_seed(0)

    def draw(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device) * scale

    x, weight = draw(tokens, inputs).to(dtype), draw(outputs, inputs, scale=inputs**-0.5).to(dtype)
    adds = epilogue is not gelu
    beside = draw(tokens, outputs, scale=_STREAM) if adds else draw(outputs).to(dtype)
    exact = plain(x.float(), weight.float(), beside.float())
    slack = 0.0
    if dtype == torch.float32:
        product, total = (t.abs().max().item() for t in (exact - beside if adds else exact, exact))
        slack = EXACT * product + torch.finfo(dtype).eps * total
    limits = plain(x, weight, beside).float() - exact
    # A stream is overwritten: what is compared is read before.
    error = epilogue(x, weight, beside).float() - exact
    mean, mean_limit = (float(e.square().mean().sqrt()) for e in (error, limits))
    worst, worst_limit = (float(e.abs().max()) for e in (error, limits))
    if mean <= MEAN_RATIO * mean_limit + slack and worst <= WORST_RATIO * worst_limit + slack:
        return ''
    of_plain = f'the plain operators {mean_limit:.1e} and {worst_limit:.1e}'
    return f'off by {mean:.1e} on average and {worst:.1e} at most, {of_plain}'
