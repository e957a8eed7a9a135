"""Networks of ACT: a residual network, a transformer encoder and a decoder of actions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.act.declaration import ActDims, Activation, StackDims
from vla_runtime.families.blocks.attention import attend, images_of_rows
from vla_runtime.families.blocks.layers import Linear, MultiHeadAttention
from vla_runtime.families.blocks.resnet import ConvNorm, ResNet
from vla_runtime.families.flow_network import SinglePassNetwork


class ActVision(nn.Module):
    """A camera's image to a token for each place of its feature map."""

    def __init__(self, dims: ActDims) -> None:
        super().__init__()
        self.backbone = ResNet(dims.backbone)
        # A convolution of one pixel, as checkpoints hold it.
        self.projection = nn.Conv2d(dims.backbone.width, dims.width, kernel_size=1)

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, height, width) float32, normalised, to (n, N, W) float32, places row by row."""
        places = self.backbone(pixels).flatten(2).transpose(1, 2).float()
        return F.linear(places, self.projection.weight.flatten(1), self.projection.bias)


class Attention(MultiHeadAttention):
    """Multi-head attention; queries and keys carry positions, values do not."""

    def __init__(self, dims: StackDims) -> None:
        super().__init__(dims.width, dims.num_heads)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens (B, T, W) at `positions` (T, W), (B, heads, T, D) each."""
        return self.heads(self.k(x + positions)), self.heads(self.v(x))

    def forward(self, queries: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        """Attend from queries with their positions (B, T, W) where `seen` (B or 1, 1, K)."""
        q = self.heads(self.q(queries))
        return self.out(attend(q, key, value, seen))


class Mlp(nn.Module):
    def __init__(self, dims: StackDims, activation: Activation) -> None:
        super().__init__()
        self.fc1 = Linear(dims.width, dims.mlp_dim)
        self.fc2 = Linear(dims.mlp_dim, dims.width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        # The exact GELU, not its tanh form.
        return self.fc2(F.relu(hidden) if self.activation == 'relu' else F.gelu(hidden))


class EncoderLayer(nn.Module):
    """Self-attention and MLP, each with a residual and a norm before or after it."""

    def __init__(self, dims: ActDims) -> None:
        super().__init__()
        self.pre_norm = dims.pre_norm
        self.attention = Attention(dims.encoder)
        self.norm1 = nn.LayerNorm(dims.width)
        self.mlp = Mlp(dims.encoder, dims.activation)
        self.norm2 = nn.LayerNorm(dims.width)

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        read = self.norm1(x) if self.pre_norm else x
        key, value = self.attention.keys_values(read, positions)
        x = x + self.attention(read + positions, key, value, seen)
        if self.pre_norm:
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x)
        return self.norm2(x + self.mlp(x))


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder's tokens, and MLP."""

    def __init__(self, dims: ActDims) -> None:
        super().__init__()
        self.pre_norm = dims.pre_norm
        self.self_attention = Attention(dims.decoder)
        self.norm1 = nn.LayerNorm(dims.width)
        self.cross_attention = Attention(dims.decoder)
        self.norm2 = nn.LayerNorm(dims.width)
        self.mlp = Mlp(dims.decoder, dims.activation)
        self.norm3 = nn.LayerNorm(dims.width)

    def forward(
        self, x: Tensor, positions: Tensor, key: Tensor, value: Tensor, seen: Tensor
    ) -> Tensor:
        """(B, H, W) to (B, H, W); key and value are those of `cross_attention`."""
        read = self.norm1(x) if self.pre_norm else x
        own = self.self_attention.keys_values(read, positions)
        every = torch.ones(1, 1, x.shape[1], dtype=torch.bool, device=x.device)
        x = x + self.self_attention(read + positions, *own, every)
        x = x if self.pre_norm else self.norm1(x)
        read = self.norm2(x) if self.pre_norm else x
        x = x + self.cross_attention(read + positions, key, value, seen)
        if self.pre_norm:
            return x + self.mlp(self.norm3(x))
        x = self.norm2(x)
        return self.norm3(x + self.mlp(x))


class Act(SinglePassNetwork):
    """ACT at inference: its latent is zero, so its token is the bias of the latent's projection.

    Shapes: V cameras, N tokens of the largest map, T tokens of the encoder (`prefix_length`), H
    horizon, A action dimension, S state dimension, W width, D head dimension.
    """

    dims: ActDims
    vision: ActVision

    def __init__(self, dims: ActDims) -> None:
        super().__init__()
        self.dims = dims
        self.vision = ActVision(dims)
        self.latent = nn.Parameter(torch.zeros(dims.width))
        self.state_projection = nn.Linear(dims.state_dim - dims.environment_dim, dims.width)
        self.environment_projection: nn.Linear | None = None
        if dims.environment_dim:
            self.environment_projection = nn.Linear(dims.environment_dim, dims.width)
        self.vector_positions = nn.Parameter(torch.zeros(dims.vector_tokens, dims.width))
        self.encoder = nn.ModuleList(EncoderLayer(dims) for _ in range(dims.encoder.depth))
        self.encoder_norm = nn.LayerNorm(dims.width) if dims.pre_norm else None
        self.action_positions = nn.Parameter(torch.zeros(dims.horizon, dims.width))
        self.decoder = nn.ModuleList(DecoderLayer(dims) for _ in range(dims.decoder.depth))
        self.decoder_norm = nn.LayerNorm(dims.width)
        self.action_head = nn.Linear(dims.width, dims.action_dim)

    def fold_constants(self) -> None:
        """Put the frozen norms into the convolutions, which run in bfloat16 if the matrices do."""
        matrices = self._layers[0].mlp.fc1.weight.dtype
        precision = torch.bfloat16 if matrices == torch.bfloat16 else torch.float32
        for module in self.modules():
            if isinstance(module, ConvNorm):
                module.fold(precision)

    def positions(self) -> Tensor:
        """Positions of the encoder's tokens, (T, W)."""
        device = self.vector_positions.device
        maps = [
            map_positions(height, width, self.dims.width, device)
            for height, width in self.dims.map_sizes
        ]
        return torch.cat([self.vector_positions, *maps])

    def embed(
        self, image_tokens: Tensor, image_mask: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put the encoder's tokens (R, T, W) together: latent, state, environment, cameras.

        Their mask (R, T) bool is False for those of a hidden camera. Image tokens are (V, N, W).
        """
        rows, joints = state.shape[0], state.shape[1] - self.dims.environment_dim
        vectors = [self.latent.expand(rows, -1), self.state_projection(state[:, :joints])]
        if self.environment_projection is not None:
            vectors.append(self.environment_projection(state[:, joints:]))
        images, seen = images_of_rows(image_tokens, image_mask, rows)
        counts = [height * width for height, width in self.dims.map_sizes]
        tokens = [images[:, camera, :count] for camera, count in enumerate(counts)]
        masks = [seen[:, camera : camera + 1].expand(-1, n) for camera, n in enumerate(counts)]
        always = torch.ones(rows, len(vectors), dtype=torch.bool, device=state.device)
        return (
            torch.cat([torch.stack(vectors, dim=1), *tokens], dim=1),
            torch.cat([always, *masks], dim=1),
        )

    def encode(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Run the encoder: (R, T, W) and mask (R, T) to (R, T, W)."""
        positions, x = self.positions(), tokens
        for layer in self.encoder:
            x = layer(x, positions, mask[:, None])
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return what the decoder reads; `rows` is `state` (R, S).

        `cross_key` and `cross_value` are those of the decoder's layers, (layers, R, heads, T, D);
        `prefix_mask` is (R, T) bool.
        """
        tokens, mask = self.embed(image_tokens, image_mask, rows['state'])
        memory, positions = self.encode(tokens, mask), self.positions()
        past = [layer.cross_attention.keys_values(memory, positions) for layer in self._layers]
        keys, values = zip(*past, strict=True)
        return {
            'cross_key': torch.stack(keys),
            'cross_value': torch.stack(values),
            'prefix_mask': mask,
        }

    def decode(self, past: Mapping[str, Tensor]) -> Tensor:
        """Run the decoder over the outputs of `prefix`; (R, H, W), before the last norm."""
        mask = past['prefix_mask']
        x = torch.zeros(mask.shape[0], *self.action_positions.shape, device=mask.device)
        for index, layer in enumerate(self._layers):
            key, value = past['cross_key'][index], past['cross_value'][index]
            x = layer(x, self.action_positions, key, value, mask[:, None])
        return x

    def actions(self, past: Mapping[str, Tensor], **rows: Tensor) -> Tensor:
        return self.action_head(self.decoder_norm(self.decode(past)))

    @property
    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.decoder if isinstance(layer, DecoderLayer)]


NETWORKS = {'act': Act}


# Largest wavelength over the smallest, and what keeps the last place just below a full turn.
_TEMPERATURE = 10000.0
_EPSILON = 1e-6


def map_positions(height: int, width: int, channels: int, device: torch.device) -> Tensor:
    """Sine code of a map's rows, then columns (DETR, arXiv 2005.12872, appendix A.4).

    Place i of n is the angle 2 pi (i + 1) / n. Numbers 2j and 2j + 1 of a code are the sine and
    the cosine of that angle over 10000^(2j / (channels / 2)).

    `channels`, W, is a multiple of 4. Returns (height * width, W) float32, row by row.
    """
    half = channels // 2
    rows, columns = (_code(count, half, device) for count in (height, width))
    both = [
        rows[:, None].expand(height, width, half),
        columns[None].expand(height, width, half),
    ]
    return torch.cat(both, dim=-1).reshape(height * width, channels)


def _code(count: int, numbers: int, device: torch.device) -> Tensor:
    """Sine code of the places 0 to count - 1 of an axis, (count, numbers)."""
    places = torch.arange(1, count + 1, dtype=torch.float32, device=device)
    angles = places / (count + _EPSILON) * (2 * math.pi)
    exponents = torch.arange(0, numbers, 2, dtype=torch.float32, device=device) / numbers
    angles = angles[:, None] / _TEMPERATURE**exponents
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
