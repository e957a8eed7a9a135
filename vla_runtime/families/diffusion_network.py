"""Interface of the network of a `diffusion` head: a scheduler's steps, with noise of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vla_runtime.families.flow_network import FlowNetwork


class DiffusionNetwork(FlowNetwork):
    """Network of a `diffusion` head.

    Unlike a flow, its times are training steps, `velocity` is the network's prediction (of what,
    `dims.scheduler.prediction` says), and a step takes an `update` and noise in place of its time
    and step. `family.noise_schedule` has the formula.
    """

    def advance(self, past: Any, *inputs: Tensor) -> Tensor:
        return advance(*inputs)


def advance(
    x: Tensor,
    predicted: Tensor,
    update: Tensor,
    step_noise: Tensor,
    row_weight: Tensor,
    plan: Tensor,
    plan_weight: Tensor,
) -> Tensor:
    """Return the next x (N, H, A) float32; see `family.noise_schedule`.

    Args:
        predicted: (R * N, H, A), row by row.
        update: (UPDATE_WIDTH,) numbers of the step.
        step_noise: (N, H, A) standard normal, or zeros.
        row_weight: (R,), as of `inference.guidance`.
        plan: (1, H, A); plan_weight: (1, H, 1), zero without a plan.
    """
    if x.shape[0] == 1:
        mixed = (row_weight[:, None, None] * predicted).sum(dim=[0], keepdim=True)
    else:
        by_row = predicted.view(row_weight.shape[0], *x.shape)
        mixed = (row_weight[:, None, None, None] * by_row).sum(dim=[0])
    of_x, of_m, divisor, most, clean_in, x_in, m_in, tie_in, noise_in = (
        update[index] for index in range(9)
    )
    shown = (of_x * x + of_m * mixed) / divisor
    clean = torch.maximum(torch.minimum(shown, most), -most)
    tie = plan_weight * (plan - clean)
    moved = clean_in * clean + x_in * x + m_in * mixed
    return moved + tie_in * tie + noise_in * step_noise
