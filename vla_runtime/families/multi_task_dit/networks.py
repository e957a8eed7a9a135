"""Networks of Multi-Task DiT: CLIP's images and prompt, and a transformer over the actions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vla_runtime.families.diffusion_network import DiffusionNetwork
from vla_runtime.families.multi_task_dit.clip import ClipText, ClipVision
from vla_runtime.families.multi_task_dit.dimensions import MultiTaskDitDims
from vla_runtime.families.multi_task_dit.transformer import ActionTransformer


class MultiTaskDit(DiffusionNetwork):
    """Multi-Task DiT at inference.

    Shapes: V images, C cameras, T steps of the observation, S state of a step, H horizon, A
    actions, M numbers of all modulations.
    """

    dims: MultiTaskDitDims

    def __init__(self, dims: MultiTaskDitDims) -> None:
        super().__init__()
        self.dims = dims
        self.vision = ClipVision(dims)
        self.text = ClipText(dims.text, dims.vocabulary, dims.text_width)
        self.transformer = ActionTransformer(
            dims.transformer,
            dims.horizon,
            dims.action_dim,
            dims.observation_steps * dims.step_width,
        )

    def image_features(self, image_tokens: Tensor, image_mask: Tensor) -> Tensor:
        """Features (T, C * W) of the images, oldest step first; zeros for hidden ones.

        Args:
            image_tokens: (V, 1, W); image_mask: (V,) bool.
        """
        steps = self.dims.observation_steps
        features = torch.where(image_mask[:, None], image_tokens[:, 0], 0.0)
        by_step = features.view(steps, -1)
        # The newest step comes first among the images.
        return torch.stack([by_step[steps - 1 - step] for step in range(steps)])

    def observation(self, features: Tensor, state: Tensor, text: Tensor) -> Tensor:
        """Put (R, T * step_width) together: state, images and prompt, step by step.

        Args:
            features: (T, C * W), oldest step first.
            state: (R, T, S) float32, oldest step first.
            text: (R, text_width).
        """
        rows, steps, _ = state.shape
        parts = [
            state,
            features[None].expand(rows, -1, -1),
            text[:, None].expand(-1, steps, -1),
        ]
        return torch.cat(parts, dim=2).flatten(1)

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return `modulation` (R, M): the observation's share of what modulates the blocks."""
        features = self.image_features(image_tokens, image_mask)
        text = self.text(rows['tokens'], rows['token_mask'])
        observation = self.observation(features, rows['state'], text)
        return {'modulation': self.transformer.observed_modulation(observation)}

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Rows (N, M) of training steps (N,): the time's share."""
        return self.transformer.time_modulation(times)

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
        """Return the prediction (B, H, A) at x (B or 1, H, A)."""
        modulation = past['modulation']
        shared = max(1, x.shape[0] // modulation.shape[0])
        if shared > 1:
            modulation = modulation.repeat_interleave(shared, dim=0)
        x = x.expand(modulation.shape[0], -1, -1)
        return self.transformer(x, (modulation + conditioning)[:, None])


NETWORKS = {'multi_task_dit': MultiTaskDit}
