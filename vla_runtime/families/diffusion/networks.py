"""Networks of Diffusion Policy: encoders of images, and a U-Net over the actions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vla_runtime.families.blocks.attention import repeat_rows
from vla_runtime.families.blocks.resize import FramedVision
from vla_runtime.families.blocks.resnet import ConvNorm
from vla_runtime.families.diffusion.dimensions import DiffusionDims
from vla_runtime.families.diffusion.encoder import EncodedVision, Encoder
from vla_runtime.families.diffusion.unet import Conv, Grow, UNet
from vla_runtime.families.diffusion_network import DiffusionNetwork


class Diffusion(DiffusionNetwork):
    """Diffusion Policy at inference.

    Shapes: V images, C cameras, T steps of the observation, S state of a step, H horizon, A
    actions, M numbers of all modulations.
    """

    dims: DiffusionDims

    def __init__(self, dims: DiffusionDims) -> None:
        super().__init__()
        self.dims = dims
        self.vision: nn.Module = EncodedVision(dims)
        self.encoders: nn.ModuleList | None = None
        if dims.separate_encoders:
            self.vision = FramedVision(dims.resize, dims.crop)
            self.encoders = nn.ModuleList(Encoder(dims) for _ in range(dims.own_cameras))
        self.unet = UNet(dims.unet, dims.action_dim, dims.observation_steps * dims.step_width)

    def fold_constants(self) -> None:
        """Put frozen norms into the convolutions, which run in bfloat16 if the matrices do.

        Those of the U-Net too. Not in float16: a CPU without its arithmetic is slower in it than in
        float32.
        """
        matrices = self.unet.blocks[0].modulation.weight.dtype
        precision = torch.bfloat16 if matrices == torch.bfloat16 else torch.float32
        for module in self.modules():
            if isinstance(module, (ConvNorm, Conv, Grow)):
                module.fold(precision)

    def image_features(self, image_tokens: Tensor, image_mask: Tensor) -> Tensor:
        """Features (T, C, 2 * keypoints) of the images, oldest step first; zeros for hidden ones.

        Args:
            image_tokens: (V, N, W); image_mask: (V,) bool.
        """
        dims = self.dims
        steps, cameras = dims.observation_steps, dims.own_cameras
        if self.encoders is None:
            features = image_tokens[:, 0].unflatten(0, (steps, cameras))
        else:
            pixels = image_tokens.view(steps, cameras, 3, *dims.seen)
            of_cameras = [
                encoder(pixels[:, camera]) for camera, encoder in enumerate(self.encoders)
            ]
            features = torch.stack(of_cameras, dim=1)
        seen = image_mask.view(steps, cameras, 1)
        features = torch.where(seen, features, 0.0)
        # The newest step comes first among the images.
        return torch.stack([features[steps - 1 - step] for step in range(steps)])

    def observation(self, features: Tensor, state: Tensor) -> Tensor:
        """Put (R, T * step_width) together: state, images and environment, step by step.

        Args:
            features: (R or 1, T, C, 2 * keypoints), oldest step first.
            state: (R, T, S) float32, oldest step first.
        """
        joints = self.dims.state_dim - self.dims.environment_dim
        features = features.flatten(2).expand(state.shape[0], -1, -1)
        parts = [state[:, :, :joints], features]
        if self.dims.environment_dim:
            parts.append(state[:, :, joints:])
        return torch.cat(parts, dim=2).flatten(1)

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return `modulation` (R, M): the observation's share of what modulates the U-Net."""
        features = self.image_features(image_tokens, image_mask)
        observation = self.observation(features[None], rows['state'])
        return {'modulation': self.unet.observed_modulation(observation)}

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Rows (N, M) of training steps (N,): the time's share."""
        return self.unet.time_modulation(times)

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
        """Return the prediction (B, H, A) at x (B or 1, H, A)."""
        modulation = past['modulation']
        modulation = repeat_rows(modulation, max(1, x.shape[0] // modulation.shape[0]))
        return self.unet(x.expand(modulation.shape[0], -1, -1), modulation + conditioning)


NETWORKS = {'diffusion': Diffusion}
