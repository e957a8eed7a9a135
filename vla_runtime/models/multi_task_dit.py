"""Networks of Multi-Task DiT: CLIP's images and prompt, and a transformer over the actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.declarations.multi_task_dit import (
    DitDims,
    MultiTaskDitDims,
    MultiTaskDitFlowDims,
    TextDims,
    TransformerDims,
)
from vla_runtime.family.dimensions import VisionBlockDims, VisionDims
from vla_runtime.models.base.diffusion_network import DiffusionNetwork
from vla_runtime.models.base.flow_network import FlowNetwork
from vla_runtime.models.blocks.attention import rotary
from vla_runtime.models.blocks.layers import Linear, Modulation, PlainNorm, gelu_tanh
from vla_runtime.models.blocks.products import FEW
from vla_runtime.models.blocks.resize import FramedVision, Framing
from vla_runtime.models.blocks.siglip import vision_block
from vla_runtime.models.blocks.time_code import time_code
from vla_runtime.models.blocks.transformer import Attention, Block, Mlp

# --------------------------------------------------------------------------------------------------
# CLIP's two transformers (arXiv 2103.00020): one vector of an image, and one of a prompt.

_EPSILON = 1e-5
_STEEPNESS = 1.702


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's activation: x sigmoid(1.702 x)."""
    return F.silu(_STEEPNESS * x) / _STEEPNESS


def clip_block(dims: VisionBlockDims) -> Block:
    return vision_block(dims, quick_gelu, epsilon=_EPSILON)


class Patches(nn.Module):
    """Square patches to tokens: a strided convolution without bias, as a matrix product."""

    def __init__(self, width: int, patch_size: int) -> None:
        super().__init__()
        self.weight = nn.Conv2d(3, width, kernel_size=patch_size, bias=False).weight

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) to (n, N, width), patches row by row."""
        n, channels, size, _ = pixels.shape
        patch = self.weight.shape[-1]
        side = size // patch
        patches = pixels.reshape(n, channels, side, patch, side, patch)
        patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(n, side * side, -1)
        return F.linear(patches, self.weight.flatten(1))


class ClipVision(nn.Module):
    """Normalised images to one token each: the class token, without CLIP's norm behind it."""

    def __init__(self, vision: VisionDims, framing: Framing) -> None:
        super().__init__()
        self.framing = framing
        self.patch_embedding = Patches(vision.width, vision.patch_size)
        self.class_embedding = nn.Parameter(torch.empty(vision.width))
        self.position_embedding = nn.Parameter(torch.empty(vision.tokens + 1, vision.width))
        for table in (self.class_embedding, self.position_embedding):
            nn.init.normal_(table, std=0.02)
        self.norm = nn.LayerNorm(vision.width, eps=_EPSILON)
        self.blocks = nn.ModuleList(clip_block(vision) for _ in range(vision.depth))

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, h, w) to (n, 1, width)."""
        patches = self.patch_embedding(self.framing(pixels))
        first = self.class_embedding[None, None].expand(patches.shape[0], -1, -1)
        x = self.norm(torch.cat([first, patches], dim=1) + self.position_embedding)
        for block in self.blocks:
            x = block(x)
        return x[:, :1].float()


class ClipText(nn.Module):
    """A prompt to the vector of the token that ends it."""

    def __init__(self, dims: TextDims, vocabulary: int, out_width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dims.width)
        self.position_embedding = nn.Parameter(torch.empty(dims.positions, dims.width))
        nn.init.normal_(self.position_embedding, std=0.02)
        self.blocks = nn.ModuleList(clip_block(dims) for _ in range(dims.depth))
        self.norm = nn.LayerNorm(dims.width, eps=_EPSILON)
        self.projection = nn.Linear(dims.width, out_width)

    def forward(self, tokens: Tensor, token_mask: Tensor) -> Tensor:
        """(R, L) to (R, out_width)."""
        # A token sees those before it and itself, so padding behind the end changes nothing.
        places = torch.arange(tokens.shape[1], device=tokens.device)
        seen = (places[None] <= places[:, None])[None]
        x = self.embedding(tokens).float() + self.position_embedding[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, seen)
        return self.projection(ending(self.norm(x), token_mask))


def ending(x: Tensor, token_mask: Tensor) -> Tensor:
    """The vectors (R, W) of the last tokens of (R, L, W) that are no padding (mask (R, L) bool)."""
    places = torch.arange(x.shape[1], device=x.device)[None]
    end = torch.where(token_mask, places.float(), -1.0).argmax(dim=1)
    return torch.where((places == end[:, None])[:, :, None], x, 0.0).sum(dim=[1])


# --------------------------------------------------------------------------------------------------
# The transformer of Multi-Task DiT over the actions of a chunk (arXiv 2212.09748). Its modulation
# is linear in SiLU(time features, observation), so it is a sum: the time's contribution is a row of
# the time table, the observation's is computed in the prefix, and a step adds the two.


class ActionBlock(Block):
    """A block whose inputs are scaled and shifted, and whose outputs are gated, by a modulation."""

    def __init__(self, dims: TransformerDims, observation: int) -> None:
        super().__init__(
            lambda: PlainNorm(1e-6),
            lambda: Attention(dims.width, dims.num_heads),
            lambda: Mlp(dims.width, dims.mlp_dim, gelu_tanh),
            way=FEW,
        )
        self.modulation = Linear(dims.time_width + observation, dims.modulation)

    @staticmethod
    def split(modulation: Tensor) -> tuple[Modulation, Modulation]:
        """Modulations of both norms, of (B, 1 or H, 6 W)."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation.chunk(6, dim=2)
        return (1 + scale, shift, gate), (1 + mlp_scale, mlp_shift, mlp_gate)


class ActionTransformer(nn.Module):
    """Noisy actions and modulations to the prediction; `observation` counts its numbers."""

    def __init__(
        self, dims: TransformerDims, horizon: int, action_dim: int, observation: int
    ) -> None:
        super().__init__()
        self.dims = dims
        self.time1 = nn.Linear(dims.time_width, 2 * dims.time_width)
        self.time2 = nn.Linear(2 * dims.time_width, dims.time_width)
        self.action_in = nn.Linear(action_dim, dims.width)
        self.position_embedding: nn.Parameter | None = None
        if dims.learned_positions:
            self.position_embedding = nn.Parameter(torch.empty(1, horizon, dims.width))
            nn.init.normal_(self.position_embedding, std=0.02)
        self.blocks = nn.ModuleList(ActionBlock(dims, observation) for _ in range(dims.depth))
        self.action_out = nn.Linear(dims.width, action_dim)

    def _modulations(self) -> list[Linear]:
        return [cast(ActionBlock, block).modulation for block in self.blocks]

    def time_features(self, times: Tensor) -> Tensor:
        """Features (N, time_width) of training steps (N,)."""
        return F.gelu(self.time2(F.gelu(self.time1(time_code(times, self.dims.time_width)))))

    def time_modulation(self, times: Tensor) -> Tensor:
        """The time's contribution to all modulations, (N, M), of training steps (N,)."""
        seen, width = F.silu(self.time_features(times)), self.dims.time_width
        parts = [_product(seen, layer.weight[:, :width]) for layer in self._modulations()]
        return torch.cat(parts, dim=1)

    def observed_modulation(self, observation: Tensor) -> Tensor:
        """The observation's contribution (R, observation) to all modulations, (R, M)."""
        seen, width = F.silu(observation), self.dims.time_width
        parts = [
            _product(seen, layer.weight[:, width:]) + layer.bias for layer in self._modulations()
        ]
        return torch.cat(parts, dim=1)

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """(B, H, A) and modulations (B, 1 or H, M) to (B, H, A)."""
        dims, positions = self.dims, None
        if dims.rotary_base is not None:
            places = torch.arange(x.shape[1], device=x.device)[None]
            positions = rotary(places, dims.width // dims.num_heads, dims.rotary_base)
        x = self.action_in(x)
        if self.position_embedding is not None:
            x = x + self.position_embedding
        shares = modulation.split([dims.modulation] * dims.depth, dim=2)
        for block, share in zip(self.blocks, shares, strict=True):
            first, second = ActionBlock.split(share)
            x = block(x, rotation=positions, first=first, second=second)
        return self.action_out(x)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.to(weight.dtype), weight).float()


# --------------------------------------------------------------------------------------------------


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

        `image_tokens` is (V, N, W), or pixels with an encoder for each camera; `image_mask` (V,)
        bool.
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
        """Put (R, T * step_width) together: state, images and prompt, oldest step first.

        `features` is (T, C * W), `state` (R, T, S) float32, `text` (R, text_width).
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
        """Return `modulation` (R, M): the observation's contribution to that of the blocks."""
        features = self.image_features(image_tokens, image_mask)
        text = self.text(rows['tokens'], rows['token_mask'])
        observation = self.observation(features, rows['state'], text)
        return {'modulation': self.transformer.observed_modulation(observation)}

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Rows (N, M) of the transformer's times (N,): the time's contribution."""
        return self.transformer.time_modulation(times)

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
        """Return the prediction (B, H, A) at x (B or 1, H, A)."""
        modulation = past['modulation']
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
        return super().time_conditioning(1.0 - times)

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
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
