"""Networks of Multi-Task DiT: CLIP's images and prompt, and a transformer over the actions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vla_runtime.families.blocks.attention import repeat_rows
from vla_runtime.families.blocks.resize import FramedVision, Framing
from vla_runtime.families.diffusion_network import DiffusionNetwork
from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.multi_task_dit.clip import ClipText, ClipVision
from vla_runtime.families.multi_task_dit.dimensions import (
    DitDims,
    MultiTaskDitDims,
    MultiTaskDitFlowDims,
)
from vla_runtime.families.multi_task_dit.transformer import ActionTransformer


class Dit(FlowNetwork):
    """Multi-Task DiT at inference, whatever it was trained to denoise.

    Shapes: V images, C cameras, T steps of the observation, S state of a step, H horizon, A
    actions, M numbers of all modulations.
    """

    dims: DitDims

    def __init__(self, dims: DitDims) -> None:
        super().__init__()
        self.dims = dims
        self.vision: nn.Module = ClipVision(dims.vision, Framing(dims.resize, dims.crop))
        self.encoders: nn.ModuleList | None = None
        if dims.separate_encoders:
            self.vision = FramedVision(dims.resize, dims.crop)
            self.encoders = nn.ModuleList(
                ClipVision(dims.vision, Framing(None, None)) for _ in range(dims.own_cameras)
            )
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
            image_tokens: (V, N, W), or the pixels of images with an encoder for each camera;
                image_mask: (V,) bool.
        """
        steps, cameras = self.dims.observation_steps, self.dims.own_cameras
        if self.encoders is None:
            features = image_tokens[:, 0]
        else:
            pixels = image_tokens.view(steps, cameras, 3, *self.dims.seen)
            of_cameras = [
                encoder(pixels[:, camera]) for camera, encoder in enumerate(self.encoders)
            ]
            features = torch.cat(of_cameras, dim=1).flatten(0, 1)
        features = torch.where(image_mask[:, None], features, 0.0)
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
        """Rows (N, M) of the transformer's times (N,): the time's share."""
        return self.transformer.time_modulation(times)

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
        """Return the prediction (B, H, A) at x (B or 1, H, A)."""
        modulation = past['modulation']
        modulation = repeat_rows(modulation, max(1, x.shape[0] // modulation.shape[0]))
        x = x.expand(modulation.shape[0], -1, -1)
        by_action = conditioning if conditioning.ndim == 3 else conditioning[:, None]
        return self.transformer(x, modulation[:, None] + by_action)


class MultiTaskDit(Dit, DiffusionNetwork):
    """The policy that was trained to take noise away."""

    dims: MultiTaskDitDims


class MultiTaskDitFlow(Dit):
    """The policy that was trained on a flow, which runs from 0 (noise) to 1 (actions)."""

    dims: MultiTaskDitFlowDims

    def time_conditioning(self, times: Tensor) -> Tensor:
        """As `FlowNetwork.time_conditioning`."""
        return super().time_conditioning(1.0 - times)

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
        """As `FlowNetwork.velocity`."""
        return -super().velocity(x, past, conditioning, **rows)

    def step_velocity(
        self,
        x: Tensor,
        past: Mapping[str, Tensor],
        conditioning: Tensor,
        dt: Tensor,
        **rows: Tensor,
    ) -> Tensor:
        """As `FlowNetwork.step_velocity`; with `rk4` the mean of the classical Runge-Kutta step."""
        if self.dims.integrator == 'euler':
            return self.velocity(x, past, conditioning, **rows)
        start, middle, end = conditioning.chunk(3, dim=-1)
        first = self.velocity(x, past, start, **rows)
        second = self.velocity(x + dt / 2 * first, past, middle, **rows)
        third = self.velocity(x + dt / 2 * second, past, middle, **rows)
        fourth = self.velocity(x + dt * third, past, end, **rows)
        return (first + 2 * (second + third) + fourth) / 6


NETWORKS = {'multi_task_dit': MultiTaskDit, 'multi_task_dit_flow': MultiTaskDitFlow}
