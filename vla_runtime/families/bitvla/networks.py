"""BitVLA (arXiv 2506.07530): SigLIP, BitNet b1.58 and an action head, in one pass.

Every number of a chunk has a place behind the prompt, empty, and all places see each other. The
action head reads the features one place before each: those of the prompt's last token first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.bitvla.dimensions import BitVlaDims
from vla_runtime.families.bitvla.vision import BitVlaVision
from vla_runtime.families.blocks.attention import (
    Rotary,
    SplitHeads,
    attend,
    images_of_rows,
    rotary,
    rotate,
)
from vla_runtime.families.blocks.dimensions import DecoderDims
from vla_runtime.families.blocks.interleaving import images_in_text
from vla_runtime.families.blocks.layers import Linear
from vla_runtime.families.blocks.llama import RMSNorm
from vla_runtime.families.blocks.ternary import TernaryLinear, TernaryQuery, apply_together
from vla_runtime.families.flow_network import SinglePassNetwork


class TernaryAttention(SplitHeads):
    """Grouped-query attention whose joined heads pass a norm before the last projection."""

    def __init__(self, dims: DecoderDims, epsilon: float) -> None:
        super().__init__()
        self.head_dim = dims.head_dim
        queries, keys = (count * dims.head_dim for count in (dims.num_heads, dims.num_kv_heads))
        self.q = TernaryQuery(dims.width, queries, dims.head_dim, bias=False)
        self.k = TernaryLinear(dims.width, keys, bias=False)
        self.v = TernaryLinear(dims.width, keys, bias=False)
        self.norm = RMSNorm(queries, epsilon)
        self.out = TernaryLinear(queries, dims.width, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, seen: Tensor) -> Tensor:
        """(R, P, W) to the same; `seen` is (R, 1, P) bool."""
        q, k, v = (self.heads(part) for part in apply_together((self.q, self.k, self.v), x))
        return self.out(self.norm(attend(rotate(q, rotary), rotate(k, rotary), v, seen)))


class TernaryMlp(nn.Module):
    """An MLP gated by a squared ReLU, its hidden numbers normalised."""

    def __init__(self, dims: DecoderDims, epsilon: float) -> None:
        super().__init__()
        self.gate = TernaryLinear(dims.width, dims.mlp_dim, bias=False)
        self.up = TernaryLinear(dims.width, dims.mlp_dim, bias=False)
        self.norm = RMSNorm(dims.mlp_dim, epsilon)
        self.down = TernaryLinear(dims.mlp_dim, dims.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = apply_together((self.gate, self.up), x)
        return self.down(self.norm(F.relu(gate).square() * up))


class BitNetBlock(nn.Module):
    """One block of BitNet b1.58; the residual stream is float32."""

    def __init__(self, dims: DecoderDims, epsilon: float) -> None:
        super().__init__()
        self.input_norm = RMSNorm(dims.width, epsilon)
        self.attention = TernaryAttention(dims, epsilon)
        self.post_norm = RMSNorm(dims.width, epsilon)
        self.mlp = TernaryMlp(dims, epsilon)

    def forward(self, x: Tensor, rotary: Rotary, seen: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x), rotary, seen)
        return x + self.mlp(self.post_norm(x))


class BitNet(nn.Module):
    """A stack of blocks with its text table and its final norm."""

    def __init__(self, dims: DecoderDims, epsilon: float, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dims.width)
        self.blocks = nn.ModuleList(BitNetBlock(dims, epsilon) for _ in range(dims.depth))
        self.norm = RMSNorm(dims.width, epsilon)

    def embed(self, tokens: Tensor) -> Tensor:
        """(R, L) token ids to (R, L, W) float32."""
        return self.embedding(tokens).float()


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
    """Features of an action's places to the action: the L1 head of OFT (arXiv 2502.19645)."""

    def __init__(self, dims: BitVlaDims) -> None:
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


class BitVla(SinglePassNetwork):
    """Vision, BitNet, action head.

    Shapes: R prompt rows, V cameras, N image tokens, L text tokens, T = V * N + L, H horizon, A
    actions, K = H * A places of actions, P = T + K + 1, W language width.
    """

    dims: BitVlaDims
    vision: BitVlaVision

    def __init__(self, dims: BitVlaDims) -> None:
        super().__init__()
        self.dims = dims
        self.vision = BitVlaVision(dims)
        self.language = BitNet(dims.language, dims.rms_epsilon, dims.vocabulary)
        self.state_projection = StateProjection(dims.state_dim, dims.language.width)
        self.head = ActionHead(dims)

    def embed_prefix(
        self,
        image_tokens: Tensor,
        image_mask: Tensor,
        tokens: Tensor,
        token_mask: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Put images and state into the text, and the empty places of the actions behind it.

        Args:
            image_tokens: (V, N, W); image_mask: (V,) bool.
            tokens: (R, L) int64; token_mask: (R, L) bool, padding at the end.
            state: (R, S) float32, normalised.

        Returns:
            embeddings (R, P, W) float32 and mask (R, P) bool
        """
        dims, rows = self.dims, tokens.shape[0]
        text, place = self.language.embed(tokens), dims.state_place
        own = self.state_projection(state)[:, None]
        text = torch.cat([text[:, :place], own, text[:, place + 1 :]], dim=1)
        images, seen = images_of_rows(image_tokens, image_mask, rows)
        prompt, mask = images_in_text(text, token_mask, images, seen, dims.image_places)
        empty = torch.zeros(rows, dims.action_places, prompt.shape[2], device=prompt.device)
        stop = torch.full((rows, 1), dims.stop_token, dtype=torch.int64, device=prompt.device)
        there = torch.ones(rows, dims.action_places + 1, dtype=torch.bool, device=mask.device)
        return (
            torch.cat([prompt, empty, self.language.embed(stop)], dim=1),
            torch.cat([mask, there], dim=1),
        )

    def read(self, embeddings: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Run the language model; everything that is there sees everything that is there.

        Args:
            embeddings: (R, P, W) float32; mask: (R, P) bool.

        Returns:
            features (R, P, W) float32 before the final norm, and positions (R, P) int64, which
            count what is there
        """
        language = self.dims.language
        positions = mask.to(torch.int64).cumsum(dim=1) - 1
        rotation = rotary(positions, language.head_dim, self.dims.rope_base)
        x = embeddings
        for block in self.language.blocks:
            x = block(x, rotation, mask[:, None])
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
        """As `SinglePassNetwork.actions`."""
        return self.head(past['action_features'])


NETWORKS = {'bitvla': BitVla}
