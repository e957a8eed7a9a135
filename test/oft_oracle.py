"""OpenVLA-OFT in plain PyTorch, written from its published semantics; nothing of the package.

Weights have the names of the published files, numbers are float64, one request runs alone, and
heads of an attention run in a loop. Sources: OFT's paper (arXiv 2502.19645), and the public
description of its forward in families' semantics. A description `d` is that of an OpenVLA case
(test/cases/README.md), with `chunk`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Weights = Mapping[str, Tensor]
Description = Mapping[str, Any]
STOP = 2


def linear(w: Weights, at: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f'{at}.weight'], w.get(f'{at}.bias'))


def layer_norm(w: Weights, at: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f'{at}.weight'], w[f'{at}.bias'], eps)


def rms_norm(w: Weights, at: str, x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f'{at}.weight']


def attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """One head: (T, D) each."""
    scores = q @ k.T / q.shape[1] ** 0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


def tower_features(w: Weights, at: str, pixels: Tensor, heads: int) -> Tensor:
    """Features (N, width) of the second-to-last block, without the final norm.

    Args:
        at: name of the tower; with a class token there are registers and scaled branches.
        pixels: (3, S, S), normalised.
    """
    patch = w[f'{at}.patch_embed.proj.weight']
    x = F.conv2d(pixels[None], patch, w[f'{at}.patch_embed.proj.bias'], stride=patch.shape[-1])
    x = x[0].flatten(1).T + w[f'{at}.pos_embed'][0]
    beside = 0
    if f'{at}.cls_token' in w:
        first = torch.cat([w[f'{at}.cls_token'][0], w[f'{at}.reg_token'][0]])
        x, beside = torch.cat([first, x]), len(first)
    count = 1 + max(int(name.split('.')[3]) for name in w if name.startswith(f'{at}.blocks.'))
    for block in range(count - 1):
        here = f'{at}.blocks.{block}'
        scales = [w.get(f'{here}.ls{n}.scale_factor', torch.ones(())) for n in (1, 2)]
        q, k, v = linear(w, f'{here}.attn.qkv', layer_norm(w, f'{here}.norm1', x, 1e-6)).chunk(3, 1)
        of_heads = zip(*(part.chunk(heads, 1) for part in (q, k, v)), strict=True)
        joined = torch.cat([attended(*parts) for parts in of_heads], 1)
        x = x + scales[0] * linear(w, f'{here}.attn.proj', joined)
        hidden = F.gelu(linear(w, f'{here}.mlp.fc1', layer_norm(w, f'{here}.norm2', x, 1e-6)))
        x = x + scales[1] * linear(w, f'{here}.mlp.fc2', hidden)
    return x[beside:]


def image_features(w: Weights, d: Description, image: Tensor) -> Tensor:
    """(3, S, S) in [0, 1] to tokens (N, W): both towers side by side, then the projector."""
    found = []
    for tower, at, mean, std in zip(
        ('dino', 'siglip'),
        ('vision_backbone.featurizer', 'vision_backbone.fused_featurizer'),
        d['image_means'],
        d['image_stds'],
        strict=True,
    ):
        mean, std = (
            torch.tensor(values, dtype=image.dtype)[:, None, None] for values in (mean, std)
        )
        found.append(tower_features(w, at, (image - mean) / std, d[f'{tower}_heads']))
    x = torch.cat(found, 1)
    x = F.gelu(linear(w, 'projector.fc1', x))
    return linear(w, 'projector.fc3', F.gelu(linear(w, 'projector.fc2', x)))


def turned(x: Tensor, base: float) -> Tensor:
    """Rotary positions 0 to T - 1 of one head (T, D), halves layout."""
    half = x.shape[1] // 2
    rates = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(len(x), dtype=x.dtype)[:, None] * rates
    first, second = x[:, :half], x[:, half:]
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        1,
    )


def language_features(w: Weights, d: Description, x: Tensor, causal: bool = False) -> Tensor:
    """Embeddings (T, W) to features behind the final norm; all places see each other."""
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril() if causal else None
    group = d['num_heads'] // d['num_kv_heads']
    for layer in range(d['depth']):
        here = f'language_model.model.layers.{layer}'
        y = rms_norm(w, f'{here}.input_layernorm', x, d['rms_eps'])
        q, k, v = (
            linear(w, f'{here}.self_attn.{name}_proj', y).split(d['head_dim'], 1) for name in 'qkv'
        )
        heads = [
            attended(
                turned(q[head], d['rope_theta']),
                turned(k[head // group], d['rope_theta']),
                v[head // group],
                seen,
            )
            for head in range(d['num_heads'])
        ]
        x = x + linear(w, f'{here}.self_attn.o_proj', torch.cat(heads, 1))
        y = rms_norm(w, f'{here}.post_attention_layernorm', x, d['rms_eps'])
        gate = F.silu(linear(w, f'{here}.mlp.gate_proj', y))
        x = x + linear(w, f'{here}.mlp.down_proj', gate * linear(w, f'{here}.mlp.up_proj', y))
    return rms_norm(w, 'language_model.model.norm', x, d['rms_eps'])


def action_hidden(
    w: Weights, d: Description, images: Sequence[Tensor], ids: Tensor, state: Tensor
) -> Tensor:
    """Features (K, W) that the action head reads.

    The sequence is BOS, the patches of all images, the state, the rest of the prompt, K empty
    places, and the stop token. The features are those from the prompt's last token to the last
    place but one.

    Args:
        images: (3, S, S) in [0, 1] of each camera.
        ids: the prompt, from BOS to the empty token.
        state: (S,), normalised.
    """
    table = w['language_model.model.embed_tokens.weight']
    own = F.gelu(linear(w, 'proprio_projector.fc1', state))
    own = linear(w, 'proprio_projector.fc2', own)[None]
    places = d['chunk'] * d['action_dim']
    patches = [image_features(w, d, image) for image in images]
    prompt = torch.cat([table[ids[:1]], *patches, own, table[ids[1:]]])
    empty = torch.zeros(places, table.shape[1], dtype=table.dtype)
    x = torch.cat([prompt, empty, table[torch.tensor([STOP])]])
    last = len(prompt) - 1
    return language_features(w, d, x)[last : last + places]


def head_actions(w: Weights, d: Description, hidden: Tensor) -> Tensor:
    """Features (K, W) to normalised actions (chunk, A)."""
    at = 'action_head.model'
    x = layer_norm(w, f'{at}.layer_norm1', hidden.reshape(d['chunk'], -1), 1e-5)
    x = F.relu(linear(w, f'{at}.fc1', x))
    for block in range(2):
        here = f'{at}.mlp_resnet_blocks.{block}.ffn'
        x = x + F.relu(linear(w, f'{here}.1', layer_norm(w, f'{here}.0', x, 1e-5)))
    return linear(w, f'{at}.fc2', layer_norm(w, f'{at}.layer_norm2', x, 1e-5))


def normalised_state(statistics: Mapping[str, Any], state: np.ndarray, by: str) -> np.ndarray:
    """Scale a state to [-1, 1] and clip it, by `q` (q01, q99) or `m` (min, max)."""
    low, high, mask = bounds(statistics, by)
    scaled = 2 * (state - low) / (high - low + 1e-8) - 1
    return np.clip(np.where(mask, scaled, state), -1.0, 1.0)


def robot_actions(statistics: Mapping[str, Any], actions: np.ndarray, by: str) -> np.ndarray:
    """Scale normalised actions to the robot's units; masked ones stay."""
    low, high, mask = bounds(statistics, by)
    return np.where(mask, 0.5 * (actions + 1) * (high - low + 1e-8) + low, actions)


def bounds(statistics: Mapping[str, Any], by: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    low, high = (
        np.array(statistics[key], dtype=np.float64)
        for key in (('q01', 'q99') if by == 'q' else ('min', 'max'))
    )
    return low, high, np.array(statistics.get('mask', [True] * len(low)))


def prepared_image(image: np.ndarray, edge: int) -> Tensor:
    """An image (h, w, 3) as OFT's evaluation sees it, (3, edge, edge) in [0, 1]."""
    bits = np.floor(cut_levels(image, edge)).clip(0, 255)
    return torch.from_numpy(bits / 255).permute(2, 0, 1)


def cut_levels(image: np.ndarray, edge: int) -> np.ndarray:
    """Grey levels (edge, edge, 3) before they are cut to whole numbers.

    TensorFlow's `lanczos3` with antialias to a square, rounded; then `crop_and_resize` of the
    middle 90% of the area, whose corners are points; 8 bits are x * 255.5 without its fraction.
    """
    levels = image.astype(np.float64)
    if image.shape[:2] != (edge, edge):
        rows, columns = (lanczos_weights(side, edge) for side in image.shape[:2])
        levels = np.einsum('yh,xw,hwc->yxc', rows, columns, levels, optimize=True)
        levels = np.clip(np.round(levels), 0, 255)
    kept = 0.9**0.5
    at = ((1 - kept) / 2 + np.arange(edge) / (edge - 1) * kept) * (edge - 1)
    before = np.floor(at).astype(int)
    after, share = np.ceil(at).astype(int), at - before
    whole = levels / 255
    down = whole[before] * (1 - share)[:, None, None] + whole[after] * share[:, None, None]
    both = down[:, before] * (1 - share)[None, :, None] + down[:, after] * share[None, :, None]
    return np.clip(both, 0, 1) * 255.5


def lanczos_weights(inputs: int, outputs: int) -> np.ndarray:
    """(outputs, inputs) weights of an antialiased Lanczos filter with three lobes."""
    scale = inputs / outputs
    centres = (np.arange(outputs) + 0.5) * scale
    x = (np.arange(inputs)[None] + 0.5 - centres[:, None]) / max(scale, 1.0)
    weights = np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)
    return weights / weights.sum(1, keepdims=True)
