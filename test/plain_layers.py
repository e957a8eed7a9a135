"""Layers in plain PyTorch for oracles: one sequence at a time, no batch, heads in a loop.

Weights are named as in a bundle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = Mapping[str, Tensor]


def linear(w: Weights, at: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f'{at}.weight'], w.get(f'{at}.bias'))


def layer_norm(w: Weights, at: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f'{at}.weight'], w[f'{at}.bias'], eps)


def rms_norm(w: Weights, at: str, x: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[f'{at}.weight']


def mlp(w: Weights, at: str, x: Tensor, approximate: str = 'tanh') -> Tensor:
    return linear(w, f'{at}.fc2', F.gelu(linear(w, f'{at}.fc1', x), approximate=approximate))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Turn (T, D) by angles (T, D / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        dim=-1,
    )


def attention(
    w: Weights,
    at: str,
    x: Tensor,
    memory: Tensor,
    head_dim: int,
    *,
    seen: Tensor | None = None,
    angles: Tensor | None = None,
    normed: float | None = None,
) -> Tensor:
    """Attend, a head at a time.

    Args:
        w, at: weights and name of the attention.
        x: (T, W).
        memory: (K, M).
        head_dim: D.
        seen: (T or 1, K) bool; None: all.
        angles: (T, D / 2) by which queries and keys are turned.
        normed: epsilon of the norms of query and key heads, if there are any.
    """
    q, k, v = (
        linear(w, f'{at}.{name}', source).split(head_dim, dim=-1)
        for name, source in (('q', x), ('k', memory), ('v', memory))
    )
    heads = []
    for number, query in enumerate(q):
        shared = number * len(k) // len(q)
        key, value = k[shared], v[shared]
        if normed is not None:
            query = rms_norm(w, f'{at}.q_norm', query, normed)
            key = rms_norm(w, f'{at}.k_norm', key, normed)
        if angles is not None:
            query, key = turned(query, angles), turned(key, angles)
        scores = query @ key.T / math.sqrt(head_dim)
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        heads.append(scores.softmax(-1) @ value)
    return linear(w, f'{at}.out', torch.cat(heads, dim=-1))


def squares(x: Tensor, rows: int, columns: int, edge: int) -> list[Tensor]:
    """Squares of patches, row by row, of patches (rows * columns, width) row by row."""
    return [
        torch.stack(
            [
                x[row * columns + column]
                for row in range(top, top + edge)
                for column in range(left, left + edge)
            ]
        )
        for top in range(0, rows, edge)
        for left in range(0, columns, edge)
    ]


def causal(length: int) -> Tensor:
    """Keys that each token sees, (T, T) bool."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def decoder_block(
    w: Weights,
    at: str,
    x: Tensor,
    head_dim: int,
    eps: float,
    seen: Tensor,
    angles: Tensor,
    normed: float | None = None,
) -> Tensor:
    """One block of a Llama-like language model on tokens (T, W)."""
    h = rms_norm(w, f'{at}.input_norm', x, eps)
    x = x + attention(w, f'{at}.attention', h, h, head_dim, seen=seen, angles=angles, normed=normed)
    h = rms_norm(w, f'{at}.post_norm', x, eps)
    gate, up = (linear(w, f'{at}.mlp.{name}', h) for name in ('gate', 'up'))
    return x + linear(w, f'{at}.mlp.down', F.silu(gate) * up)
