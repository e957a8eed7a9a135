"""The prefix and expert-step networks with the exact signatures of the engines.

Static shapes, tensors in and out, nothing else: what runs in PyTorch is what is exported. The
vision engine is `siglip.VisionEncoder` as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vla_runtime.models.flow_policy import FlowPolicy


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
            x: (1, H, A) float32, shared by all rows.
            past_key, past_value: (layers, R, kv_heads, P, D); prefix_mask: (R, P) bool.
            time_conditioning: (1, C) row of the schedule's table.
            t, dt: () float32, flow time and step (negative).
            row_weight: (R,) float32; [1] without guidance, [beta, 1 - beta] with it.
            plan: (1, H, A) float32, plan_weight: (1, H, 1) float32, zero without a plan: the
                identity-Jacobian form of real-time chunking (arXiv 2506.07339).
            state: (R, S) float32, pi0 only.

        Returns:
            x_next (1, H, A) and velocity (R, H, A), float32
        """
        velocity = self.network.velocity(
            x, past_key, past_value, prefix_mask, time_conditioning, state
        )
        mixed = (row_weight[:, None, None] * velocity).sum(dim=0, keepdim=True)
        mixed = mixed - plan_weight * (plan - (x - t * mixed))
        return x + dt * mixed, velocity
