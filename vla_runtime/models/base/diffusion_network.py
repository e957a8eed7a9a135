"""Interface of the network of a `diffusion` head: a scheduler's steps, with noise of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vla_runtime.models.base.flow_network import FlowNetwork
from vla_runtime.models.blocks.flow_update import mix_rows


class DiffusionNetwork(FlowNetwork):
    """Network of a `diffusion` head.

    Unlike a flow, its times are those of `dims.scheduler`, `velocity` is what the network predicts
    (the noise, the clean actions or a mix of both), and a step takes an `update` and noise in place
    of its time and step. `family.noise_schedule` has the formula.
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
    """Return the next x (Q, H, A) float32; see `family.noise_schedule`.

    Args:
        predicted: (Q * R, H, A), request by request.
        update: (UPDATE_WIDTH,) numbers of the step.
        step_noise: (Q, H, A) standard normal, or zeros.
        row_weight: (R,) or (Q, R), as of `inference.settings.row_weights`.
        plan: (Q, H, A); plan_weight: (Q, H, 1), zero without a plan.
    """
    mixed = mix_rows(predicted, row_weight)
    of_x, of_m, divisor, most, clean_in, x_in, m_in, tie_in, noise_in = (
        update[index] for index in range(9)
    )
    shown = (of_x * x + of_m * mixed) / divisor
    clean = torch.maximum(torch.minimum(shown, most), -most)
    tie = plan_weight * (plan - clean)
    moved = clean_in * clean + x_in * x + m_in * mixed
    return moved + tie_in * tie + noise_in * step_noise
