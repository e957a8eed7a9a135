"""Small layers around an expert's own and the flow's update, one Triton kernel each.

In PyTorch's operators these are some twenty kernels, a tenth of a denoise step on an H200.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vla_runtime.models.triton import step_kernels as kernels

# Numbers of a matrix from which on cuBLAS is left to it. Measured were 2^15.
_LARGE = 2**17
# Weights that a program multiplies at once, and how many of one output.
_TILE, _INPUTS = 8192, 1024
# Numbers of a chunk in a program of the update.
_BLOCK = 256


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Make a tensor's device the current one: Triton launches there, wherever the tensors are."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Compute a float32 layer, (..., inputs) to (..., outputs); large ones by PyTorch."""
    weight, bias = layer.weight, layer.bias
    exact = weight.dtype == torch.float32 and bias is not None
    if not exact or weight.numel() > _LARGE or not weight.is_contiguous():
        return layer(x)
    outputs, inputs = weight.shape
    x = x.contiguous()
    result = x.new_empty(*x.shape[:-1], outputs)
    inner = min(_INPUTS, power_of_2(inputs))
    of_program = min(power_of_2(outputs), _TILE // inner)
    with device_of(x):
        kernels.linear_kernel[(x.numel() // inputs, tiles(outputs, of_program))](
            x, weight, bias, result, inputs, outputs, OUTPUTS=of_program, INPUTS=inner
        )
    return result


def advance(
    x: Tensor,
    velocity: Tensor,
    t: Tensor,
    dt: Tensor,
    row_weight: Tensor,
    plan: Tensor,
    plan_weight: Tensor,
) -> Tensor:
    x, velocity = x.contiguous(), velocity.contiguous()
    result = torch.empty_like(x)
    with device_of(x):
        kernels.advance_kernel[(tiles(x.numel(), _BLOCK),)](
            x,
            velocity,
            t,
            dt,
            row_weight,
            plan,
            plan_weight,
            result,
            x.numel(),
            row_weight.shape[-1],
            x[0].numel(),
            x.shape[-1],
            BLOCK=_BLOCK,
        )
    return result


def tiles(size: int, tile: int) -> int:
    """Return the number of tiles that cover a size."""
    return -(-size // tile)


def power_of_2(size: int, least: int = 1) -> int:
    """Return the power of 2 from `size` on, `least` or more, which a tile's side must be."""
    return max(least, 1 << (size - 1).bit_length())
