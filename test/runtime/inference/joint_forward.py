"""The joint forward of pi0 and pi0.5 in float64, as plain loops over tokens and heads.

Written from the papers for the tests and sharing no line with the package: no cache, no engine, no
mask (what is not valid is not there), one prompt at a time. Slow, and short enough to be checked by
eye against arXiv 2410.24164, 2504.16054, 2403.08295 and 2303.15343.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One row as a network sees it: visible images, valid tokens, pi0's state.

    Attributes:
        pixels: per visible camera (3, S, S).
        tokens: ids of the valid tokens.
        state: (S,) padded, or None where the state is in the tokens.
    """

    pixels: Sequence[np.ndarray]
    tokens: Sequence[int]
    state: np.ndarray | None = None


class JointForward:
    """Velocities of one policy.

    Args:
        weights: by the package's parameter names.
        dims: sizes (`PiDims` or anything with its fields).
    """

    def __init__(self, weights: Mapping[str, Any], dims: Any) -> None:
        self._weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self._dims = dims
        self._images: dict[bytes, np.ndarray] = {}

    def velocity(self, prompt: Prompt, x: np.ndarray, t: float) -> np.ndarray:
        """(H, A) velocity at noisy actions x (H, A) and flow time t, all tokens run together."""
        prefix = self._prefix(prompt)
        condition = self._condition(t)
        suffix = self._suffix(x, prompt.state, condition)
        for layer in range(self._dims.language.depth):
            prefix, suffix = self._layer(layer, prefix, suffix, condition)
        normed, _ = self._adaptive_norm('expert.norm', suffix, condition)
        return self._linear('action_out', normed[-self._dims.horizon :])

    # Embeddings.

    def _prefix(self, prompt: Prompt) -> np.ndarray:
        table = self._weights['language.embedding.weight']
        text = [table[token] * math.sqrt(table.shape[1]) for token in prompt.tokens]
        images = [self._image(np.asarray(pixels, np.float64)) for pixels in prompt.pixels]
        return np.concatenate([*images, np.array(text)])

    def _image(self, pixels: np.ndarray) -> np.ndarray:
        key = pixels.tobytes()
        if key not in self._images:
            self._images[key] = self._encode_image(pixels)
        return self._images[key]

    def _encode_image(self, pixels: np.ndarray) -> np.ndarray:
        dims, weights = self._dims.vision, self._weights
        kernel, size = weights['vision.patch_embedding.weight'], dims.patch_size
        patches = []
        for row in range(0, dims.image_size, size):
            for column in range(0, dims.image_size, size):
                patch = pixels[:, row : row + size, column : column + size]
                patches.append(np.einsum('ochw,chw->o', kernel, patch))
        h = np.array(patches) + weights['vision.patch_embedding.bias']
        h = h + weights['vision.position_embedding']
        for block in range(dims.depth):
            name = f'vision.blocks.{block}'
            normed = self._layer_norm(f'{name}.norm1', h)
            q, k, v = (self._linear(f'{name}.attention.{part}', normed) for part in 'qkv')
            heads = [
                _attend(q[:, head], k[:, head], v[:, head])
                for head in _heads(dims.width, dims.num_heads)
            ]
            h = h + self._linear(f'{name}.attention.out', np.concatenate(heads, axis=1))
            normed = self._layer_norm(f'{name}.norm2', h)
            hidden = _gelu(self._linear(f'{name}.mlp.fc1', normed))
            h = h + self._linear(f'{name}.mlp.fc2', hidden)
        return self._linear('vision.projector', self._layer_norm('vision.norm', h))

    def _condition(self, t: float) -> np.ndarray:
        """The time's embedding; of pi0.5 what its adaptive norms are conditioned on."""
        width = self._dims.expert.width
        periods = [
            4e-3 * (4.0 / 4e-3) ** (i / (width // 2 - 1) if width > 2 else 0.0)
            for i in range(width // 2)
        ]
        angles = [2 * math.pi * t / period for period in periods]
        embedded = np.array([*map(math.sin, angles), *map(math.cos, angles)])
        if self._dims.state_dim:
            return embedded
        return _silu(self._linear('time_out', _silu(self._linear('time_in', embedded))))

    def _suffix(self, x: np.ndarray, state: np.ndarray | None, condition: np.ndarray) -> np.ndarray:
        actions = self._linear('action_in', np.asarray(x, np.float64))
        if not self._dims.state_dim:
            return actions
        timed = [np.concatenate([action, condition]) for action in actions]
        mixed = self._linear(
            'action_time_out', _silu(self._linear('action_time_in', np.array(timed)))
        )
        token = self._linear('state_projection', np.asarray(state, np.float64))
        return np.concatenate([token[None], mixed])

    # One layer of both stacks.

    def _layer(
        self, layer: int, prefix: np.ndarray, suffix: np.ndarray, condition: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        language, expert = f'language.blocks.{layer}', f'expert.blocks.{layer}'
        p, s = len(prefix), len(suffix)
        normed_suffix, gate = self._adaptive_norm(f'{expert}.input_norm', suffix, condition)
        normed = {
            language: self._rms_norm(f'{language}.input_norm', prefix),
            expert: normed_suffix,
        }
        q, k, v = (
            np.concatenate([self._linear(f'{n}.attention.{part}', h) for n, h in normed.items()])
            for part in 'qkv'
        )
        seen = [range(p)] * p + [self._seen_by_suffix(i, p, s) for i in range(s)]
        attended = self._grouped_attention(q, k, v, seen)
        prefix = prefix + self._linear(f'{language}.attention.out', attended[:p])
        prefix = prefix + self._mlp(language, self._rms_norm(f'{language}.post_norm', prefix))
        suffix = suffix + gate * self._linear(f'{expert}.attention.out', attended[p:])
        h, gate = self._adaptive_norm(f'{expert}.post_norm', suffix, condition)
        return prefix, suffix + gate * self._mlp(expert, h)

    def _seen_by_suffix(self, i: int, p: int, s: int) -> range:
        """pi0's state token sees the prefix and itself; actions see everything."""
        return range(p + 1) if self._dims.state_dim and i == 0 else range(p + s)

    def _grouped_attention(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: Sequence[range]
    ) -> np.ndarray:
        dims = self._dims.language
        heads, shared = _heads(q.shape[1], dims.num_heads), _heads(k.shape[1], dims.num_kv_heads)
        out = []
        for number, head in enumerate(heads):
            kv = shared[number // (dims.num_heads // dims.num_kv_heads)]
            queries = [_rotate(row, place) for place, row in enumerate(q[:, head])]
            keys = np.array([_rotate(row, place) for place, row in enumerate(k[:, kv])])
            out.append(
                np.concatenate(
                    [
                        _attend(query[None], keys[list(places)], v[list(places), kv])
                        for query, places in zip(queries, seen, strict=True)
                    ]
                )
            )
        return np.concatenate(out, axis=1)

    def _mlp(self, name: str, h: np.ndarray) -> np.ndarray:
        gate, up = (self._linear(f'{name}.mlp.{part}', h) for part in ('gate', 'up'))
        return self._linear(f'{name}.mlp.down', _gelu(gate) * up)

    # Norms and linear maps.

    def _linear(self, name: str, h: np.ndarray) -> np.ndarray:
        return h @ self._weights[f'{name}.weight'].T + self._weights.get(f'{name}.bias', 0.0)

    def _layer_norm(self, name: str, h: np.ndarray) -> np.ndarray:
        centred = h - h.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
        return scaled * self._weights[f'{name}.weight'] + self._weights[f'{name}.bias']

    def _rms_norm(self, name: str, h: np.ndarray) -> np.ndarray:
        return _unit(h) * (1 + self._weights[f'{name}.weight'])

    def _adaptive_norm(
        self, name: str, h: np.ndarray, condition: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | float]:
        """pi0.5's norm with scale, shift and gate; of pi0 the plain one, whose gate is open."""
        if self._dims.state_dim:
            return self._rms_norm(name, h), 1.0
        scale, shift, gate = np.split(self._linear(f'{name}.modulation', condition), 3)
        return _unit(h) * (1 + scale) + shift, gate


def _heads(width: int, count: int) -> list[slice]:
    size = width // count
    return [slice(head * size, (head + 1) * size) for head in range(count)]


def _unit(h: np.ndarray) -> np.ndarray:
    return h / np.sqrt((h**2).mean(axis=-1, keepdims=True) + 1e-6)


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = q @ k.T / math.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights @ v / weights.sum(axis=1, keepdims=True)


def _rotate(vector: np.ndarray, place: int) -> np.ndarray:
    """Rotary embedding: the pairs are (i, i + half)."""
    half = len(vector) // 2
    cosine, sine = _angles(place, half)
    first, second = vector[:half], vector[half:]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine])


@lru_cache(maxsize=4096)
def _angles(place: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of each pair's angle, base 10000."""
    angles = np.array([place / 10000 ** (i / half) for i in range(half)])
    return np.cos(angles), np.sin(angles)


def _silu(h: np.ndarray) -> np.ndarray:
    return h / (1 + np.exp(-h))


def _gelu(h: np.ndarray) -> np.ndarray:
    return 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
