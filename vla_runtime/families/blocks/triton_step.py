"""Steps around an expert's layers, each in one Triton kernel: small layers, and the flow's update.

In PyTorch's operators these are two dozen kernels, a tenth of a denoise step on a large GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vla_runtime.families.blocks import triton_step_kernels as kernels

# Numbers of a matrix from which on cuBLAS is faster.
_LARGE = 2**17
# Weights that a program multiplies at once, and how many of one output.
_TILE, _INPUTS = 8192, 1024
# Numbers of a chunk in a program of the update.
_BLOCK = 256


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """(..., inputs) to (..., outputs) through a layer in float32."""
    weight, bias = layer.weight, layer.bias
    if weight.numel() > _LARGE or weight.dtype != torch.float32 or bias is None:
        return layer(x)
    outputs, inputs = weight.shape
    x, weight = x.contiguous(), weight.contiguous()
    result = x.new_empty(*x.shape[:-1], outputs)
    inner = min(_INPUTS, _power(inputs))
    of_program = min(_power(outputs), _TILE // inner)
    kernels.linear_kernel[(x.numel() // inputs, -(-outputs // of_program))](
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
    """Move x one step along the flow; arguments and result as of `flow_update.advance`."""
    x, velocity = x.contiguous(), velocity.contiguous()
    result = torch.empty_like(x)
    kernels.advance_kernel[(-(-x.numel() // _BLOCK),)](
        x,
        velocity,
        t,
        dt,
        row_weight,
        plan,
        plan_weight,
        result,
        x.numel(),
        len(row_weight),
        plan.numel(),
        plan.shape[-1],
        BLOCK=_BLOCK,
    )
    return result


def _power(size: int) -> int:
    """The power of 2 from `size` on, which a tile's side must be."""
    return 1 << (size - 1).bit_length()
