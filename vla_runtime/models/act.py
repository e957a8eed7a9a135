"""Networks of ACT: a residual network, a transformer encoder and a decoder of actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.declarations.act import ActDims, Activation, StackDims
from vla_runtime.models.base.flow_network import SinglePassNetwork
from vla_runtime.models.blocks.attention import attend, images_of_rows
from vla_runtime.models.blocks.layers import joined
from vla_runtime.models.blocks.products import FEW, IMAGES, Product
from vla_runtime.models.blocks.resnet import ConvNorm, ResNet
from vla_runtime.models.blocks.transformer import Attention, KeysValues, Mlp


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


class PlacedAttention(Attention):
    """Attention of tokens to each other, whose queries and keys carry positions, values do not."""

    def __init__(self, dims: StackDims) -> None:
        super().__init__(dims.width, dims.num_heads)
        self._shift: Tensor | None = None

    def join_at(self, positions: Tensor) -> None:
        """Join for tokens at these positions (T, W): what they add to each product is constant."""
        self.join(IMAGES)
        self._shift = torch.cat(
            [
                F.linear(positions.to(self.q.weight.dtype), layer.weight)
                for layer in (self.q, self.k)
            ],
            dim=-1,
        )

    def at(self, x: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Attend from tokens (B, T, W) at positions (T, W) where `seen` (B or 1, 1, T)."""
        if (shift := joined(self._shift)) is None:
            placed = x + positions
            q, key, value = self.q(placed), self.k(placed), self.v(x)
        else:
            placed, value = cast(Product, self.qkv_product)(x).split(
                [shift.shape[1], x.shape[2]], dim=-1
            )
            q, key = (placed + shift).chunk(2, dim=-1)
        return self.output(attend(self.heads(q), self.heads(key), self.heads(value), seen))


class Layer(nn.Module):
    """Steps of a residual stream with norms before or after each."""

    def __init__(self, dims: ActDims) -> None:
        super().__init__()
        self.pre_norm = dims.pre_norm

    def step(self, x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return x + layer(norm(x))
        stepped: Tensor = norm(x + layer(x))
        return stepped


def mlp(dims: StackDims, activation: Activation) -> Mlp:
    # The exact GELU, not its tanh form.
    return Mlp(dims.width, dims.mlp_dim, F.relu if activation == 'relu' else F.gelu)


class EncoderLayer(Layer):
    """Self-attention and MLP."""

    def __init__(self, dims: ActDims) -> None:
        super().__init__(dims)
        self.attention = PlacedAttention(dims.encoder)
        self.norm1 = nn.LayerNorm(dims.width)
        self.mlp = mlp(dims.encoder, dims.activation)
        self.norm2 = nn.LayerNorm(dims.width)

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        x = self.step(x, self.norm1, lambda h: self.attention.at(h, positions, seen))
        return self.step(x, self.norm2, self.mlp)


class DecoderLayer(Layer):
    """Self-attention, attention to the encoder's tokens, and MLP."""

    def __init__(self, dims: ActDims) -> None:
        super().__init__(dims)
        self.self_attention = PlacedAttention(dims.decoder)
        self.norm1 = nn.LayerNorm(dims.width)
        self.cross_attention = Attention(
            dims.width, dims.decoder.num_heads, memory_width=dims.width
        )
        self.norm2 = nn.LayerNorm(dims.width)
        self.mlp = mlp(dims.decoder, dims.activation)
        self.norm3 = nn.LayerNorm(dims.width)

    def keys_values(self, memory: Tensor, positions: Tensor) -> KeysValues:
        """Keys and values of the encoder's tokens (B, T, W), (B, heads, T, D) each."""
        attention = self.cross_attention
        return attention.heads(attention.k(memory + positions)), attention.heads(
            attention.v(memory)
        )

    def attend_to_itself(self, x: Tensor, positions: Tensor) -> Tensor:
        """(B, H, W) to (B, H, W)."""
        every = torch.ones(1, 1, x.shape[1], dtype=torch.bool, device=x.device)
        return self.step(x, self.norm1, lambda h: self.self_attention.at(h, positions, every))

    def attend_to_memory(
        self, x: Tensor, positions: Tensor, memory: KeysValues, seen: Tensor
    ) -> Tensor:
        """(B, H, W) to (B, H, W); `memory` is as of `keys_values`."""
        attention = self.cross_attention

        def cross(h: Tensor) -> Tensor:
            return attention.output(attend(attention.queries(h + positions), *memory, seen))

        x = self.step(x, self.norm2, cross)
        return self.step(x, self.norm3, self.mlp)


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
        # What the decoder's first layer makes of itself, which no input changes; of `join`.
        self._start: Tensor | None = None

    def join_layers(self) -> None:
        positions = self.positions()
        for encoder in self.encoder:
            assert isinstance(encoder, EncoderLayer)
            encoder.attention.join_at(positions)
            encoder.mlp.join(IMAGES)
        for layer in self._layers:
            layer.self_attention.join_at(self.action_positions)
            layer.cross_attention.join(FEW)
            layer.mlp.join(FEW)
        self._start = self._first_state()

    def _first_state(self) -> Tensor:
        """(1, H, W) behind the self-attention of the decoder's first layer."""
        x = torch.zeros_like(self.action_positions, dtype=torch.float32)[None]
        return self._layers[0].attend_to_itself(x, self.action_positions)

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
        past = [layer.keys_values(memory, positions) for layer in self._layers]
        keys, values = zip(*past, strict=True)
        return {
            'cross_key': torch.stack(keys),
            'cross_value': torch.stack(values),
            'prefix_mask': mask,
        }

    def decode(self, past: Mapping[str, Tensor]) -> Tensor:
        """Run the decoder over the outputs of `prefix`; (R, H, W), before the last norm."""
        mask = past['prefix_mask']
        start = joined(self._start)
        x = self._first_state() if start is None else start
        x = x.expand(mask.shape[0], -1, -1)
        for index, layer in enumerate(self._layers):
            if index:
                x = layer.attend_to_itself(x, self.action_positions)
            memory = past['cross_key'][index], past['cross_value'][index]
            x = layer.attend_to_memory(x, self.action_positions, memory, mask[:, None])
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
