"""Every GR00T once more, in plain PyTorch: one prompt at a time, without padding or cache.

Patches stand row by row, positions are counted token by token, and PyTorch interpolates the table
of patch positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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

from vla_runtime.families.groot.dimensions import GrootDims
from vla_runtime.families.groot.n16_dimensions import GrootN16Dims
from vla_runtime.families.groot.n17_dimensions import GrootN17Dims

Dims = GrootDims | GrootN16Dims | GrootN17Dims

# Row and column of a token inside its image; None for text.
Place = tuple[int, int] | None


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        tokens: tokens of the prompt's text.
        images: (3, height, width) of each camera; None for a hidden one.
    """

    tokens: Sequence[int]
    images: Sequence[Tensor | None]


def sliced(w: Weights, at: str, x: Tensor) -> Tensor:
    """A linear layer whose weight is (inputs, outputs)."""
    return x @ w[f'{at}.weight'] + w[f'{at}.bias']


def vision_block(w: Weights, at: str, x: Tensor, head_dim: int, angles: Tensor | None) -> Tensor:
    h = layer_norm(w, f'{at}.norm1', x, 1e-6)
    x = x + attention(w, f'{at}.attention', h, h, head_dim, angles=angles)
    return x + mlp(w, f'{at}.mlp', layer_norm(w, f'{at}.norm2', x, 1e-6))


def eagle(w: Weights, dims: GrootDims, image: Tensor) -> list[Tensor]:
    """Image tokens of N1.5, alone in a list."""
    vision = dims.vision
    bias = w['vision.patch_embedding.bias']
    x = F.conv2d(image[None], w['vision.patch_embedding.weight'], bias, vision.patch_size)
    _, _, rows, columns = x.shape
    x = x[0].flatten(1).T + w['vision.position_embedding']
    for block in range(vision.depth):
        x = vision_block(w, f'vision.blocks.{block}', x, vision.width // vision.num_heads, None)
    x = layer_norm(w, 'vision.norm', x, 1e-6)
    x = torch.stack([s.flatten() for s in squares(x, rows, columns, dims.pixel_shuffle)])
    if dims.connector_layers == 1:
        return [linear(w, 'vision.connector.0', x)]
    x = layer_norm(w, 'vision.connector.0', x, 1e-5)
    return [linear(w, 'vision.connector.3', F.gelu(linear(w, 'vision.connector.1', x)))]


def eagle_2(w: Weights, dims: GrootN16Dims, image: Tensor) -> list[Tensor]:
    """Image tokens of N1.6, alone in a list: patch by patch, window by window."""
    vision, patch = dims.vision, dims.vision.patch_size
    rows, columns = (edge // patch for edge in image.shape[1:])
    table = w['vision.position_embedding'].T.reshape(1, -1, vision.positions, vision.positions)
    table = F.interpolate(
        table, (rows, columns), mode='bilinear', align_corners=False, antialias=True
    )[0]
    patches, angles, windows = [], [], {}
    edge = vision.window or max(rows, columns)
    frequency = (vision.rope_base or 1.0) ** -(
        torch.arange(0, vision.head_dim, 4) / vision.head_dim
    )
    for row in range(rows):
        for column in range(columns):
            pixels = image[:, row * patch :, column * patch :][:, :patch, :patch]
            embedded = linear(w, 'vision.patch_embedding', pixels.permute(1, 2, 0).flatten())
            windows.setdefault((row // edge, column // edge), []).append(len(patches))
            patches.append(embedded + table[:, row, column])
            if vision.rope_base is not None:
                turns = torch.stack([column * frequency, row * frequency], dim=1).flatten()
                angles.append(turns)
    x = torch.stack(patches)
    turn = torch.exp(1j * torch.stack(angles)) if angles else None
    for number in range(1, vision.depth + 1):
        whole = vision.window is None or number in vision.full_attention
        groups = [list(range(len(x)))] if whole else list(windows.values())
        at = f'vision.blocks.{number - 1}'
        h = layer_norm(w, f'{at}.norm1', x, 1e-6)
        attended = torch.zeros_like(x)
        for group in groups:
            at_group = None if turn is None else turn[group]
            attended[group] = window_attention(
                w, f'{at}.attention', h[group], vision.head_dim, at_group
            )
        x = x + attended
        x = x + mlp(w, f'{at}.mlp', layer_norm(w, f'{at}.norm2', x, 1e-6))
    x = layer_norm(w, 'vision.norm', x, 1e-6)
    x = F.pixel_unshuffle(x.T.reshape(1, -1, rows, columns), vision.merge)[0].flatten(1).T
    x = layer_norm(w, 'vision.connector.0', x, 1e-5)
    return [linear(w, 'vision.connector.3', F.gelu(linear(w, 'vision.connector.1', x)))]


def window_attention(w: Weights, at: str, x: Tensor, head_dim: int, turn: Tensor | None) -> Tensor:
    """Attend among the patches x (T, W); `turn` (T, D / 2) turns pairs of numbers side by side."""
    q, k, v = (linear(w, f'{at}.{name}', x).split(head_dim, dim=-1) for name in 'qkv')
    heads = []
    for query, key, value in zip(q, k, v, strict=True):
        if turn is not None:
            query, key = (
                torch.view_as_real(torch.view_as_complex(part.reshape(len(x), -1, 2)) * turn)
                .flatten(1)
                .float()
                for part in (query, key)
            )
        heads.append((query @ key.T / math.sqrt(head_dim)).softmax(-1) @ value)
    return linear(w, f'{at}.out', torch.cat(heads, dim=-1))


def qwen(w: Weights, dims: GrootN17Dims, image: Tensor) -> list[Tensor]:
    """Image tokens of N1.7, then what is added to them behind the language model's layers."""
    vision = dims.vision
    frames = torch.stack([image, image], dim=1)[None]
    patch = vision.patch_size
    x = F.conv3d(
        frames,
        w['vision.patch_embedding.weight'],
        w['vision.patch_embedding.bias'],
        (2, patch, patch),
    )[0, :, 0]
    _, rows, columns = x.shape
    table = w['vision.position_embedding'].T.reshape(1, -1, vision.positions, vision.positions)
    x = x + F.interpolate(table, (rows, columns), mode='bilinear', align_corners=True)[0]
    x = x.flatten(1).T
    quarter = vision.head_dim // 4
    frequency = 10000.0 ** -(torch.arange(quarter) / quarter)
    angles = torch.stack(
        [
            torch.cat([row * frequency, column * frequency])
            for row in range(rows)
            for column in range(columns)
        ]
    )
    found: dict[int, Tensor] = {}
    for block in range(vision.depth):
        x = vision_block(w, f'vision.blocks.{block}', x, vision.head_dim, angles)
        found[block + 1] = x

    def merged(at: str, x: Tensor, *, joined: bool) -> Tensor:
        if not joined:
            x = layer_norm(w, f'{at}.norm', x, 1e-6)
        x = torch.stack([s.flatten() for s in squares(x, rows, columns, vision.merge)])
        if joined:
            x = layer_norm(w, f'{at}.norm', x, 1e-6)
        return mlp(w, at, x, approximate='none')

    return [merged('vision.merger', x, joined=False)] + [
        merged(f'vision.deepstack.{number}', found[block], joined=True)
        for number, block in enumerate(vision.deepstack)
    ]


def sequence(w: Weights, dims: Dims, prompt: Prompt) -> tuple[list[Tensor], list[Place]]:
    """Embeddings (P, M), then what is added to them layer by layer; the place of each token."""
    encode = {GrootDims: eagle, GrootN16Dims: eagle_2, GrootN17Dims: qwen}[type(dims)]
    images = [None if image is None else encode(w, dims, image) for image in prompt.images]
    extra = len(dims.vision.deepstack) if isinstance(dims, GrootN17Dims) else 0
    columns = 1 if isinstance(dims, GrootDims) else dims.grid[1]
    parts: list[list[Tensor]] = [[] for _ in range(1 + extra)]
    places: list[Place] = []
    for number in range(len(prompt.tokens) + 1):
        for image, before in zip(images, dims.image_places, strict=True):
            if before != number or image is None:
                continue
            for part, tokens in zip(parts, image, strict=True):
                part.extend(tokens)
            places += [divmod(index, columns) for index in range(len(image[0]))]
        if number < len(prompt.tokens):
            embedding = w['language.embedding.weight'][prompt.tokens[number]]
            parts[0].append(embedding)
            for part in parts[1:]:
                part.append(torch.zeros_like(embedding))
            places.append(None)
    return [torch.stack(part) for part in parts], places


def language_angles(dims: Dims, places: Sequence[Place]) -> Tensor:
    """Angles (P, D / 2) of every token."""
    half = dims.language.head_dim // 2
    frequency = dims.rope_base ** -(torch.arange(half) / half)
    if not isinstance(dims, GrootN17Dims):
        return torch.arange(len(places))[:, None] * frequency
    sections, angles, position, start = dims.rope_sections, [], 0, 0
    for place in places:
        if place == (0, 0):
            start = position
            position += max(dims.grid)
        if place is None:
            triple = (position,) * 3
            position += 1
        else:
            triple = (start, start + place[0], start + place[1])
        angles.append(
            [
                triple[i % 3 if i % 3 and i < 3 * sections[i % 3] else 0] * float(frequency[i])
                for i in range(half)
            ]
        )
    return torch.tensor(angles)


def features(w: Weights, dims: Dims, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Context of the head, (P, M), and a mask of its image tokens, (P,) bool."""
    (x, *added), places = sequence(w, dims, prompt)
    angles, eps = language_angles(dims, places), dims.rms_epsilon
    for layer in range(dims.language.depth):
        at, seen = f'language.blocks.{layer}', causal(len(x))
        x = decoder_block(w, at, x, dims.language.head_dim, eps, seen, angles, normed=eps)
        if layer < len(added) and layer < dims.language.depth - 1:
            x = x + added[layer]
    if not isinstance(dims, GrootN17Dims):
        x = rms_norm(w, 'language.norm', x, eps)
    x = layer_norm(w, 'context_norm', x, 1e-5)
    for block in range(dims.context.depth if dims.context else 0):
        assert dims.context is not None
        at = f'context.{block}'
        h = layer_norm(w, f'{at}.norm1', x, 1e-5)
        x = x + attention(w, f'{at}.attention', h, h, dims.context.head_dim)
        x = x + mlp(w, f'{at}.mlp', layer_norm(w, f'{at}.norm2', x, 1e-5))
    return x, torch.tensor([place is not None for place in places])


def memory_of(dims: Dims, block: int, context: Tensor, images: Tensor) -> Tensor:
    """Context tokens that a cross-attention block reads."""
    if isinstance(dims, GrootDims):
        return context
    reads_text = block % (2 * dims.text_every) == 0
    return context[~images if reads_text else images]


def velocity(
    w: Weights,
    dims: Dims,
    context: tuple[Tensor, Tensor],
    x: Tensor,
    state: Tensor,
    bucket: int,
) -> Tensor:
    """From noise to actions, (H, A), at noisy actions x (H, A) and states (S,)."""
    width, horizon = dims.dit_width, dims.horizon

    def code(count: int, divisor: int) -> Tensor:
        return bucket * torch.exp(-math.log(10000.0) * torch.arange(count) / divisor)

    of_dit = code(128, 127)
    time = F.silu(linear(w, 'time_in', torch.cat([of_dit.cos(), of_dit.sin()])))
    time = F.silu(linear(w, 'time_out', time))
    of_action = code(width // 2, width // 2)
    share = torch.cat([of_action.sin(), of_action.cos()]).expand(horizon, -1)
    actions = torch.cat([sliced(w, 'action_encoder.embed', x), share], dim=-1)
    actions = sliced(w, 'action_encoder.out', F.silu(sliced(w, 'action_encoder.mix', actions)))
    actions = actions + w['positions'][:horizon]
    tokens = F.relu(sliced(w, 'state_encoder.fc1', state.view(dims.state_steps, -1)))
    parts = [sliced(w, 'state_encoder.fc2', tokens), actions]
    if dims.future_tokens:
        parts.insert(1, w['future_tokens'])
    h = torch.cat(parts)
    for block in range(dims.dit.depth):
        at = f'dit.{block}'
        scale, shift = linear(w, f'{at}.modulation', time).chunk(2)
        normed = F.layer_norm(h, (width,), eps=1e-5) * (1 + scale) + shift
        read = normed if block % 2 else memory_of(dims, block, *context)
        h = h + attention(w, f'{at}.attention', normed, read, dims.dit.head_dim)
        h = h + mlp(w, f'{at}.mlp', F.layer_norm(h, (width,), eps=1e-5))
    shift, scale = linear(w, 'out_modulation', time).chunk(2)
    h = linear(w, 'out', F.layer_norm(h, (width,), eps=1e-6) * (1 + scale) + shift)
    h = F.relu(sliced(w, 'action_decoder.fc1', h[-horizon:]))
    return sliced(w, 'action_decoder.fc2', h)


def chunk(
    w: Weights,
    dims: Dims,
    prompt: Prompt,
    state: Tensor,
    noise: Tensor,
    steps: int,
) -> Tensor:
    """Normalised actions (H, A) from noise (H, A)."""
    context, x = features(w, dims, prompt), noise
    for k in range(steps):
        x = x + velocity(w, dims, context, x, state, 1000 * k // steps) / steps
    return x
