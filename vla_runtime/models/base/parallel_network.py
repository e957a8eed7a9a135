"""Networks whose language model decodes a chunk in one pass: OpenVLA-OFT's way (arXiv 2502.19645).

Every number of a chunk has a place behind the prompt, empty, and all places see each other. The
action head reads the features one place before each: those of the prompt's last token first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.family.declaration import LanguageDims
from vla_runtime.family.dimensions import DecoderDims
from vla_runtime.models.base.flow_network import SinglePassNetwork
from vla_runtime.models.blocks.attention import images_of_rows, rotary
from vla_runtime.models.blocks.layers import Linear


class ParallelDims(LanguageDims, Protocol):
    """Dimensions of such a network."""

    @property
    def language(self) -> DecoderDims:
        """The language model."""

    @property
    def rope_base(self) -> float:
        """Base of its rotary positions."""

    @property
    def action_places(self) -> int:
        """K, places behind the prompt whose features the action head reads."""

    @property
    def stop_token(self) -> int:
        """Token behind the places of the actions."""

    @property
    def head_width(self) -> int:
        """Hidden numbers of the action head."""

    @property
    def head_blocks(self) -> int:
        """Residual blocks of the action head."""


class StateProjection(nn.Module):
    """A state to a token, in float32."""

    def __init__(self, state_dim: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, state: Tensor) -> Tensor:
        """(R, S) to (R, W)."""
        return self.fc2(F.gelu(self.fc1(state)))


class HeadBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.linear(self.norm(x)).float())


class ActionHead(nn.Module):
    """Features of an action's places to the action: an MLP that was trained with L1."""

    def __init__(self, dims: ParallelDims) -> None:
        super().__init__()
        inputs = dims.action_dim * dims.language.width
        self.norm1 = nn.LayerNorm(inputs)
        self.fc1 = Linear(inputs, dims.head_width)
        self.blocks = nn.ModuleList(HeadBlock(dims.head_width) for _ in range(dims.head_blocks))
        self.norm2 = nn.LayerNorm(dims.head_width)
        self.fc2 = nn.Linear(dims.head_width, dims.action_dim)

    def forward(self, features: Tensor) -> Tensor:
        """(R, H, A * W) to (R, H, A), float32."""
        x = F.relu(self.fc1(self.norm1(features)).float())
        for block in self.blocks:
            x = block(x)
        return self.fc2(self.norm2(x))


class ParallelNetwork(SinglePassNetwork):
    """Vision, language model, action head.

    Shapes: R prompt rows, V cameras, N image tokens, L text tokens, T tokens of the whole prompt, H
    horizon, A actions, K = H * A places of actions, P = T + K + 1, W language width.

    Blocks of `language` take the residual stream, which places are seen, and the rotary positions.
    """

    dims: ParallelDims

    def __init__(self, dims: ParallelDims, vision: nn.Module, language: nn.Module) -> None:
        super().__init__()
        self.dims = dims
        self.vision = vision
        self.language: Any = language
        self.state_projection = StateProjection(dims.state_dim, dims.language.width)
        self.head = ActionHead(dims)

    @abstractmethod
    def embed_prompt(
        self, text: Tensor, token_mask: Tensor, images: Tensor, seen: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put images and state into the text: embeddings (R, T, W) float32 and mask (R, T) bool.

        Args:
            text: (R, L, W) float32; token_mask: (R, L) bool, padding at the end.
            images: (R, V, N, W) float32; seen: (R, V) bool.
            state: (R, W) float32, the token of the state.
        """

    def embed_prefix(
        self,
        image_tokens: Tensor,
        image_mask: Tensor,
        tokens: Tensor,
        token_mask: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Embed a prompt and the empty places of the actions: (R, P, W) float32, mask (R, P) bool.

        Image tokens are (V, N, W), tokens (R, L), their padding at the end, the state (R, S)
        normalised.
        """
        dims, rows = self.dims, tokens.shape[0]
        images, seen = images_of_rows(image_tokens, image_mask, rows)
        text, own = self.language.embed(tokens), self.state_projection(state)
        prompt, mask = self.embed_prompt(text, token_mask, images, seen, own)
        empty = torch.zeros(rows, dims.action_places, prompt.shape[2], device=prompt.device)
        stop = torch.full((rows, 1), dims.stop_token, dtype=torch.int64, device=prompt.device)
        there = torch.ones(rows, dims.action_places + 1, dtype=torch.bool, device=mask.device)
        return (
            torch.cat([prompt, empty, self.language.embed(stop)], dim=1),
            torch.cat([mask, there], dim=1),
        )

    def read(self, embeddings: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Run the language model; everything that is there sees everything that is there.

        Embeddings (R, P, W) float32 and mask (R, P) bool to features (R, P, W) float32 before the
        final norm, and positions (R, P) int64, which count what is there.
        """
        positions = mask.to(torch.int64).cumsum(dim=1) - 1
        rotation = rotary(positions, self.dims.language.head_dim, self.dims.rope_base)
        x = embeddings
        for block in self.language.blocks:
            x = block(x, mask[:, None], rotation)
        return x, positions

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return `action_features` (R, H, A * W) float32.

        `rows` are `tokens` (R, L) int64, `token_mask` (R, L) bool and `state` (R, S) float32.
        """
        dims = self.dims
        embeddings, mask = self.embed_prefix(
            image_tokens, image_mask, rows['tokens'], rows['token_mask'], rows['state']
        )
        x, positions = self.read(embeddings, mask)
        first = dims.prefix_length - dims.action_places - 1
        # The prompt's last token, wherever its padding begins.
        before = positions[:, first : first + 1] - 1
        last = torch.logical_and(positions[:, :first] == before, mask[:, :first])
        ending = torch.where(last[:, :, None], x[:, :first], 0.0).sum(dim=[1])
        read = torch.cat([ending[:, None], x[:, first : first + dims.action_places - 1]], dim=1)
        features = self.language.norm(read)
        return {'action_features': features.reshape(mask.shape[0], dims.horizon, -1)}

    def actions(self, past: Mapping[str, Tensor], **rows: Tensor) -> Tensor:
        return self.head(past['action_features'])
