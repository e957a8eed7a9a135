"""The prefix and expert-step networks with the exact signatures of the engines.

Static shapes, tensors in and out, nothing else: what runs in PyTorch is what is exported. The
vision engine is `siglip.VisionEncoder` as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vla_runtime.families.pi.network import FlowPolicy


class PrefixEncoder(nn.Module):
    """Image tokens and R prompt rows to the keys and values that the expert attends to."""

    def __init__(self, network: FlowPolicy) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, image_tokens: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the prefill.

        Args:
            image_tokens: (V, N, W) float32, shared by all rows; image_mask: (V,) bool.
            tokens: (R, L) int64; token_mask: (R, L) bool.

        Returns:
            past_key, past_value (layers, R, kv_heads, P, D) and prefix_mask (R, P) bool
        """
        rows = tokens.shape[0]
        # A hidden camera's tokens have weight zero, but zero times NaN is NaN: one overflow in an
        # image must not outlive the camera.
        image_tokens = torch.where(image_mask[:, None, None], image_tokens, 0.0)
        embeddings, mask = self.network.embed_prefix(
            image_tokens[None].expand(rows, -1, -1, -1),
            image_mask[None].expand(rows, -1),
            tokens,
            token_mask,
        )
        past_key, past_value = self.network.encode_prefix(embeddings, mask)
        return past_key, past_value, mask


class ExpertStep(nn.Module):
    """One denoise step: velocity of every row, guidance mix, plan term and Euler update."""

    def __init__(self, network: FlowPolicy) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        x: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        prefix_mask: Tensor,
        time_conditioning: Tensor,
        t: Tensor,
        dt: Tensor,
        row_weight: Tensor,
        plan: Tensor,
        plan_weight: Tensor,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Move x one step along the flow; mix, plan term and update are float32.

        Args:
            x: (1, H, A) float32, shared by all rows; (N, H, A) for N chunks over one prefix.
            past_key, past_value: (layers, R, kv_heads, P, D); prefix_mask: (R, P) bool.
            time_conditioning: (1, C) row of the schedule's table, or (1, H, C) where every action
                has its own flow time.
            t, dt: () float32, flow time and step (negative).
            row_weight: (R,) float32; [1] without guidance, [beta, 1 - beta] with it.
            plan: (1, H, A) float32, plan_weight: (1, H, 1) float32, zero without a plan: the
                identity-Jacobian form of real-time chunking (arXiv 2506.07339).
            state: (R, S) float32, pi0 only.

        Returns:
            x_next (N, H, A) and velocity (R * N, H, A), row by row, float32
        """
        velocity, mixed = self.mixed_velocity(
            x, past_key, past_value, prefix_mask, time_conditioning, row_weight, state
        )
        mixed = mixed - plan_weight * (plan - (x - t * mixed))
        return x + dt * mixed, velocity

    def mixed_velocity(
        self,
        x: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        prefix_mask: Tensor,
        time_conditioning: Tensor,
        row_weight: Tensor,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Every row's velocity (R * N, H, A), and their sum by weight (N, H, A)."""
        samples, rows = x.shape[0], prefix_mask.shape[0]
        if samples == 1:
            velocity = self.network.velocity(
                x, past_key, past_value, prefix_mask, time_conditioning, state
            )
            return velocity, (row_weight[:, None, None] * velocity).sum(dim=0, keepdim=True)
        velocity = self.network.velocity(
            x.repeat(rows, 1, 1), past_key, past_value, prefix_mask, time_conditioning, state
        )
        by_row = velocity.view(rows, *x.shape)
        return velocity, (row_weight[:, None, None, None] * by_row).sum(dim=0)


class JacobianExpertStep(ExpertStep):
    """The same step with the plan term through the network: the paper's own guidance.

    Where `ExpertStep` adds `w * (plan - x_0)` with `x_0 = x - t * v(x)`, this adds the product of
    that vector with the Jacobian of x_0 with respect to x (arXiv 2506.07339, equation 2; its tau is
    1 - t). One backward pass a step; needs autograd, so it is PyTorch's alone.
    """

    @torch.inference_mode(False)
    @torch.enable_grad()
    def forward(
        self,
        x: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        prefix_mask: Tensor,
        time_conditioning: Tensor,
        t: Tensor,
        dt: Tensor,
        row_weight: Tensor,
        plan: Tensor,
        plan_weight: Tensor,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `ExpertStep.forward`."""
        x = x.detach().clone().requires_grad_()
        velocity, mixed = self.mixed_velocity(
            x, past_key, past_value, prefix_mask, time_conditioning, row_weight, state
        )
        clean = x - t * mixed
        error = (plan_weight * (plan - clean)).detach()
        (correction,) = torch.autograd.grad(clean, x, error)
        x_next = x + dt * (mixed - correction)
        return x_next.detach(), velocity.detach()
