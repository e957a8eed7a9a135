"""Evo-1 (arXiv 2511.04555): InternVL3, and a head that cross-attends to its last features.

Action tokens never attend to each other; they mix where one layer reads all of them at the end.
Keys and values of the head are constant over the denoise steps, so `prefix` computes them. Evo-1's
flow runs from 0 to 1; `time_conditioning` and `velocity` turn time and velocity round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.declarations.evo1 import ROWS, TOLERANCE, Evo1Dims
from vla_runtime.family.declaration import MOST_FLOW_STEPS
from vla_runtime.models.base.flow_network import FlowNetwork
from vla_runtime.models.blocks.attention import images_of_rows, rotary
from vla_runtime.models.blocks.decoders import llama
from vla_runtime.models.blocks.interleaving import images_in_text
from vla_runtime.models.blocks.layers import LayerNorm, Linear, Projection, by_request
from vla_runtime.models.blocks.products import FEW
from vla_runtime.models.blocks.siglip import PatchEmbedding, shuffle_pixels, vision_block
from vla_runtime.models.blocks.transformer import Attention, Block, Mlp

# --------------------------------------------------------------------------------------------------
# InternVL3's vision tower (arXiv 2504.10479), its patches shuffled into wider image tokens.


class Projector(nn.Module):
    """Shuffled patches to the width of the language model."""

    def __init__(self, wide: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(wide, eps=1e-5)
        self.fc1 = Linear(wide, width)
        self.fc2 = Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.norm(x))))


class InternVision(nn.Module):
    """Evo-1's vision engine: pixels to image tokens of language width."""

    def __init__(self, dims: Evo1Dims) -> None:
        super().__init__()
        vision = dims.vision
        self.edge = dims.pixel_shuffle
        self.side = vision.image_size // vision.patch_size
        self.class_token = nn.Parameter(torch.zeros(1, 1, vision.width))
        self.position_embedding = nn.Parameter(torch.zeros(1, 1 + vision.tokens, vision.width))
        self.patch_embedding = PatchEmbedding(vision)
        self.blocks = nn.ModuleList(
            vision_block(vision, F.gelu, scaled=True) for _ in range(vision.depth)
        )
        self.projector = Projector(vision.width * self.edge**2, dims.language.width)

    def features(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) to (n, 1 + patches, width), the class token first; no final norm."""
        patches = self.patch_embedding(pixels)
        x = torch.cat([self.class_token.expand(patches.shape[0], -1, -1), patches], dim=1)
        x = x + self.position_embedding
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode images (n, 3, S, S), ImageNet's mean and std, to (n, N, language width)."""
        patches = self.features(pixels)[:, 1:]
        return self.projector(shuffle_pixels(patches, self.side, self.edge)).float()


# --------------------------------------------------------------------------------------------------


class ProjectionPair(nn.Module):
    """Two projections with a ReLU between them."""

    def __init__(self, inputs: int, hidden: int, outputs: int, input_major: bool) -> None:
        super().__init__()
        self.fc1 = Projection(inputs, hidden, input_major=input_major)
        self.fc2 = Projection(hidden, outputs, input_major=input_major)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class ActionEncoder(nn.Module):
    """Noisy actions to action tokens; the places in the chunk are added after the first layer."""

    def __init__(self, dims: Evo1Dims) -> None:
        super().__init__()
        width = dims.language.width
        self.fc1 = Projection(dims.action_dim, width, input_major=dims.input_major)
        self.fc2 = Projection(width, width, input_major=dims.input_major)
        self.fc3 = Projection(width, width, input_major=dims.input_major)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """(B, H, A) and positions (1, H, W) to (B, H, W)."""
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)) + positions)))


def head_block(dims: Evo1Dims) -> Block:
    """Cross-attention to the context, then an MLP that sees the flow time: no self-attention."""
    width = dims.language.width
    return Block(
        lambda: LayerNorm(width, eps=1e-5),
        lambda: Attention(width, dims.head.num_heads, memory_width=width),
        lambda: Mlp(width, dims.head.mlp_dim, F.gelu),
        way=FEW,
    )


class Evo1(FlowNetwork):
    """Vision tower, truncated language model, cross-attention head.

    Shapes: B batch, R prompt rows, V cameras, N tokens an image, L text tokens, T what the language
    model reads (images, text), P = T + 1 with the state token, H horizon, A padded action
    dimension, S padded state dimension, W language width, D head dimension.
    """

    dims: Evo1Dims
    vision: InternVision

    def __init__(self, dims: Evo1Dims) -> None:
        super().__init__()
        self.dims = dims
        head, width, major = dims.head, dims.language.width, dims.input_major
        self.action_positions = nn.Parameter(torch.zeros(1, dims.horizon, width))
        self.time_rows = nn.Parameter(torch.zeros(1, ROWS, width))
        self.vision = InternVision(dims)
        self.language = llama(dims.language, dims.rms_epsilon, dims.vocabulary, bias=True)
        self.state_encoder = ProjectionPair(dims.state_dim, head.state_hidden, width, major)
        self.action_encoder = ActionEncoder(dims)
        self.blocks = nn.ModuleList(head_block(dims) for _ in range(head.depth))
        self.norm = nn.LayerNorm(width, eps=1e-5)
        self.pool = Linear(dims.horizon * width, width)
        self.velocity_head = ProjectionPair(
            width, head.velocity_hidden, dims.horizon * dims.action_dim, major
        )

    @property
    def layers(self) -> list[Block]:
        return [cast(Block, block) for block in self.blocks]

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Return the table's rows of flow times; (N,) to (N, W)."""
        return F.embedding(time_rows(times), self.time_rows[0])

    def embed_prefix(
        self, image_tokens: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put images (R, V, N, W) into the text (R, L), each at its place, unseen if hidden.

        Returns embeddings (R, T, W) float32 and mask (R, T) bool.
        """
        text = self.language.embed(tokens)
        return images_in_text(text, token_mask, image_tokens, image_mask, self.dims.image_places)

    def encode_prefix(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Features (R, T, W) float32 of the language model, behind its final norm; causal.

        Positions count every place, hidden ones too, whose features are meaningless.
        """
        length = embeddings.shape[1]
        places = torch.arange(length, device=embeddings.device)
        rotation = rotary(places[None], self.dims.language.head_dim, self.dims.rope_base)
        causal = torch.ones(1, length, length, dtype=torch.bool, device=mask.device).tril()
        seen = torch.logical_and(mask[:, None], causal)
        features: Tensor = self.language.norm(self.language.features(embeddings, rotation, seen))
        return features

    def context(self, features: Tensor, state: Tensor) -> Tensor:
        """Append the state token: (R, T, W) and (R, S) to (R, P, W)."""
        return torch.cat([features, self.state_encoder(state)[:, None]], dim=1)

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return `cross_key`, `cross_value` (layers, R, heads, P, D) and `prefix_mask` (R, P).

        `rows` are `tokens` (R, L) int64, `token_mask` (R, L) bool and `state` (R, S).
        """
        tokens, token_mask, state = (rows[name] for name in ('tokens', 'token_mask', 'state'))
        images = images_of_rows(image_tokens, image_mask, tokens.shape[0])
        embeddings, mask = self.embed_prefix(*images, tokens, token_mask)
        context = self.context(self.encode_prefix(embeddings, mask), state)
        memories = [block.attention.keys_values(context) for block in self.layers]
        keys, values = zip(*memories, strict=True)
        valid = torch.ones(tokens.shape[0], 1, dtype=torch.bool, device=mask.device)
        return {
            'cross_key': torch.stack(keys),
            'cross_value': torch.stack(values),
            'prefix_mask': torch.cat([mask, valid], dim=1),
        }

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
        """As `FlowNetwork.velocity`; zero in padded action dimensions."""
        dims = self.dims
        mask = past['prefix_mask']
        batch = mask.shape[0]
        real = torch.arange(dims.action_dim, device=x.device) < dims.real_actions
        h = self.action_encoder(torch.where(real, x, 0.0), self.action_positions)
        h = h.expand(batch, -1, -1)
        time = conditioning if conditioning.dim() == 3 else conditioning[:, None]
        for layer, block in enumerate(self.layers):
            memory = past['cross_key'][layer], past['cross_value'][layer]
            # The flow time is added behind the second norm.
            h = block(h, mask[:, None], memory=memory, second=(None, time, None))
        pooled = by_request(self.pool, self.norm(h).reshape(batch, -1)).float()
        velocity = by_request(self.velocity_head, pooled).view(batch, dims.horizon, dims.action_dim)
        # Evo-1's velocity points from noise to actions.
        return torch.where(real, -velocity, 0.0)


def time_rows(times: Tensor) -> Tensor:
    """Row of the time table for each flow time, (N,) to (N,) int64.

    As `declarations.evo1.time_rows`.
    """
    passed = 1.0 - times.to(torch.float64)[:, None]
    steps = torch.arange(1, MOST_FLOW_STEPS + 1, dtype=torch.float64, device=times.device)
    fractions = torch.round(passed * steps) / steps
    near = (fractions - passed).abs() <= TOLERANCE
    nearest = fractions.gather(1, near.to(torch.uint8).argmax(dim=1, keepdim=True))
    exact = torch.where(near.any(dim=1, keepdim=True), nearest, passed)[:, 0]
    return (exact * (ROWS - 1)).long().clamp(0, ROWS - 1)


NETWORKS = {'evo1': Evo1}
