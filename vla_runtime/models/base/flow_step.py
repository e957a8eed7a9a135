"""Prefix and denoise step as the engines run them, for every family with a `flow` head.

Static shapes, tensors in and out, nothing else: what runs in PyTorch is what is exported. The
vision engine is the network's `vision` as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vla_runtime.models.base.flow_network import FlowNetwork
from vla_runtime.models.blocks.attention import repeat_rows
from vla_runtime.models.blocks.flow_update import advance


class Prefix(nn.Module):
    """Turn image tokens and R prompt rows into what the head attends to."""

    def __init__(self, network: FlowNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, image_tokens: Tensor, image_mask: Tensor, rows: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return self.network.prefix(image_tokens, image_mask, **rows)


class DenoiseStep(nn.Module):
    """One denoise step: velocity of every row, guidance mix, plan term and Euler update."""

    def __init__(self, network: FlowNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        x: Tensor,
        past: Mapping[str, Tensor],
        time_conditioning: Tensor,
        t: Tensor,
        dt: Tensor,
        row_weight: Tensor,
        plan: Tensor,
        plan_weight: Tensor,
        rows: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Move x one step along the flow; mix, plan term and update are float32.

        Args:
            x: (1, H, A) float32, shared by the R rows of a request; (Q, H, A) for Q requests.
            past: outputs of the prefix, Q * R rows, request by request.
            time_conditioning: (1, S * C) row of the schedule's table, or (1, H, S * C) where every
                action has its own flow time.
            t, dt: () float32, flow time and step (negative).
            row_weight: (R,) float32; [1] without guidance, [beta, 1 - beta] with it; (Q, R) for
                several requests.
            plan: (Q, H, A) float32, plan_weight: (Q, H, 1) float32, zero without a plan: the
                identity-Jacobian form of real-time chunking (arXiv 2506.07339).
            rows: the family's head inputs, (Q * R, …) each.

        Returns:
            x_next (Q, H, A) and velocity (Q * R, H, A), float32
        """
        every_row = repeat_rows(x, row_weight.shape[-1]) if row_weight.ndim == 2 else x
        velocity = self.network.step_velocity(every_row, past, time_conditioning, dt, **rows)
        moved = self.advance(past, x, velocity, t, dt, row_weight, plan, plan_weight)
        return moved, velocity

    def advance(self, past: Any, *inputs: Tensor) -> Tensor:
        return self.network.advance(past, *inputs)


class JacobianDenoiseStep(DenoiseStep):
    """The same step with the plan term through the network: the paper's own guidance.

    Where `DenoiseStep` adds `w * (plan - x_0)` with `x_0 = x - t * v(x)`, this adds the product of
    that vector with the Jacobian of x_0 with respect to x (arXiv 2506.07339, equation 2; its tau is
    1 - t). It needs autograd, so only PyTorch can run it.
    """

    @torch.inference_mode(False)
    @torch.enable_grad()
    def forward(self, x: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
        x_next, velocity = super().forward(x.detach().clone().requires_grad_(), *inputs)
        return x_next.detach(), velocity.detach()

    def advance(self, past: Any, *inputs: Tensor) -> Tensor:
        return advance(*inputs, term=_jacobian_term)


def _jacobian_term(
    x: Tensor, t: Tensor, mixed: Tensor, plan: Tensor, plan_weight: Tensor
) -> Tensor:
    """As `flow_update.plan_term`, through the network's Jacobian."""
    clean = x - t * mixed
    error = (plan_weight * (plan - clean)).detach()
    # Of a sum: with the vector as an argument PyTorch imports sympy first, for two seconds.
    (correction,) = torch.autograd.grad((clean * error).sum(), x)
    return correction
