"""Evo-1 once more, in plain PyTorch: one prompt at a time, without padding or cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from plain_layers import (
    Weights,
    attention,
    causal,
    decoder_block,
    layer_norm,
    linear,
    mlp,
    rms_norm,
    squares,
)
from torch import Tensor
from torch.nn import functional as F

from vla_runtime.families.evo1.declaration import Evo1Dims


def image_tokens(w: Weights, dims: Evo1Dims, image: Tensor) -> Tensor:
    """(3, S, S) to (N, W)."""
    vision = dims.vision
    bias = w['vision.patch_embedding.bias']
    x = F.conv2d(image[None], w['vision.patch_embedding.weight'], bias, vision.patch_size)
    _, _, rows, columns = x.shape
    x = torch.cat([w['vision.class_token'][0], x[0].flatten(1).T])
    x = x + w['vision.position_embedding'][0]
    for block in range(vision.depth):
        at = f'vision.blocks.{block}'
        h = layer_norm(w, f'{at}.norm1', x, 1e-6)
        found = attention(w, f'{at}.attention', h, h, vision.width // vision.num_heads)
        x = x + w[f'{at}.scale1'] * found
        h = layer_norm(w, f'{at}.norm2', x, 1e-6)
        x = x + w[f'{at}.scale2'] * mlp(w, f'{at}.mlp', h, approximate='none')
    edge = dims.pixel_shuffle
    x = torch.stack([square.flatten() for square in squares(x[1:], rows, columns, edge)])
    x = layer_norm(w, 'vision.projector.norm', x, 1e-5)
    return mlp(w, 'vision.projector', x, approximate='none')


def projected(w: Weights, dims: Evo1Dims, at: str, x: Tensor) -> Tensor:
    weight = w[f'{at}.weight']
    return x @ (weight if dims.input_major else weight.T) + w[f'{at}.bias']


def pair(w: Weights, dims: Evo1Dims, at: str, x: Tensor) -> Tensor:
    return projected(w, dims, f'{at}.fc2', F.relu(projected(w, dims, f'{at}.fc1', x)))


def context_of(
    w: Weights,
    dims: Evo1Dims,
    images: Sequence[Tensor],
    shown: Sequence[bool],
    tokens: Sequence[int],
    state: Tensor,
) -> Tensor:
    """Context of the head, (K, W): features of visible views and of text, and the state token."""
    parts, seen, start = [], [], 0
    text = w['language.embedding.weight'][torch.tensor(tokens, dtype=torch.long)]
    for place, image, is_shown in zip(dims.image_places, images, shown, strict=True):
        found = image_tokens(w, dims, image)
        parts += [text[start:place], found]
        seen += [True] * (place - start) + [is_shown] * len(found)
        start = place
    x = torch.cat([*parts, text[start:]])
    visible = torch.tensor(seen + [True] * (len(tokens) - start))
    half = dims.language.head_dim // 2
    # Hidden images keep their positions.
    angles = torch.arange(len(x))[:, None] * dims.rope_base ** -(torch.arange(half) / half)
    # A hidden place sees itself, so that no place sees nothing.
    attention_mask = (causal(len(x)) & visible) | torch.eye(len(x), dtype=torch.bool)
    for layer in range(dims.language.depth):
        at, epsilon = f'language.blocks.{layer}', dims.rms_epsilon
        x = decoder_block(w, at, x, dims.language.head_dim, epsilon, attention_mask, angles)
    x = rms_norm(w, 'language.norm', x, dims.rms_epsilon)[visible]
    return torch.cat([x, pair(w, dims, 'state_encoder', state)[None]])


def velocity(w: Weights, dims: Evo1Dims, context: Tensor, x: Tensor, row: int) -> Tensor:
    """From noise to actions, (H, A), at noisy actions x (H, A)."""
    real = torch.arange(dims.action_dim) < dims.real_actions
    h = F.relu(projected(w, dims, 'action_encoder.fc1', x * real)) + w['action_positions'][0]
    h = F.relu(projected(w, dims, 'action_encoder.fc2', h))
    h = projected(w, dims, 'action_encoder.fc3', h)
    head_dim = dims.language.width // dims.head.num_heads
    for block in range(dims.head.depth):
        at = f'blocks.{block}'
        normed = layer_norm(w, f'{at}.norm1', h, 1e-5)
        h = h + attention(w, f'{at}.attention', normed, context, head_dim)
        normed = layer_norm(w, f'{at}.norm2', h, 1e-5) + w['time_rows'][0, row]
        h = h + mlp(w, f'{at}.mlp', normed, approximate='none')
    pooled = linear(w, 'pool', layer_norm(w, 'norm', h, 1e-5).flatten())
    return pair(w, dims, 'velocity_head', pooled).view(dims.horizon, -1) * real


def chunk(
    w: Weights,
    dims: Evo1Dims,
    images: Sequence[Tensor],
    shown: Sequence[bool],
    tokens: Sequence[int],
    state: Tensor,
    noise: Tensor,
    steps: int,
) -> Tensor:
    """Normalised actions (H, A) from noise (H, A), zero where there is no action."""
    context, x = context_of(w, dims, images, shown, tokens, state), noise
    for i in range(steps):
        x = x + velocity(w, dims, context, x, int(999 * (i / steps))) / steps
    return x
