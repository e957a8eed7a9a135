"""Rotary positions and grouped-query attention, shared by all stacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Cosine and sine (…, T, head_dim); or, without gradients and not exported, complex numbers
# (B, T, 1, head_dim / 2), by which heads come out interleaved.
Rotary = Any


def rotary(positions: Tensor, head_dim: int, base: float = 10000.0) -> Rotary:
    """Rotary position embedding (arXiv 2104.09864) of integer positions (B, T).

    `base` is the ratio of the largest wavelength to the smallest. Returns cosine and sine, each
    (B, 1, T, head_dim) float32.
    """
    frequencies = rotary_frequencies(head_dim, base, positions.device)
    return rotary_of_angles(positions[:, None, :, None].float() * frequencies)


def rotary_frequencies(head_dim: int, base: float, device: torch.device) -> Tensor:
    """Angles per position of each pair of a head's numbers, (head_dim / 2,) float32."""
    exponent = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    return 1.0 / base**exponent


def rotary_of_angles(angles: Tensor) -> Rotary:
    """Cosine and sine (…, head_dim) of the angles (…, head_dim / 2) of each pair of numbers."""
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply a rotary embedding to (B, heads, T, head_dim), in float32, back in x's dtype."""
    if isinstance(rotary, Tensor):
        return _rotate_pairs(x.transpose(1, 2), rotary).transpose(1, 2)
    cosine, sine = rotary
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cosine + torch.cat([-second, first], dim=-1) * sine).to(x.dtype)


def complex_rotary(positions: Tensor, head_dim: int) -> Tensor:
    """Rotary embedding as complex numbers: (B, T) positions to (B, T, 1, head_dim / 2)."""
    cosine, sine = (
        part[..., : head_dim // 2].transpose(1, 2) for part in rotary(positions, head_dim)
    )
    return torch.complex(cosine, sine)


def _rotate_pairs(heads: Tensor, rotation: Tensor) -> Tensor:
    """Rotate heads (B, T, heads, D); the numbers of a pair come out side by side."""
    first, second = heads.float().unflatten(-1, (2, heads.shape[-1] // 2)).unbind(-2)
    turned = torch.view_as_real(torch.complex(first, second).mul_(rotation))
    return turned.view(heads.shape).to(heads.dtype)


def pairs_of(heads: Tensor) -> Tensor:
    """View of heads (..., D) as the pairs of numbers that are rotated, (..., D / 2, 2)."""
    return heads.unflatten(-1, (2, heads.shape[-1] // 2)).transpose(-1, -2)


def interleave(heads: Tensor, out: Tensor) -> None:
    """Copy rotated heads (..., D) into `out`, numbers i and i + D/2 of a pair side by side."""
    pairs = pairs_of(heads)
    out.unflatten(-1, pairs.shape[-2:]).copy_(pairs)


def uninterleave(heads: Tensor) -> Tensor:
    """Undo `interleave`: (..., D) in the order of the plain rotation."""
    return heads.unflatten(-1, (heads.shape[-1] // 2, 2)).transpose(-1, -2).flatten(-2)


def hiding_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Terms added to attention's scores: 0 where `seen` (bool) is True, else minus infinity."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def heads_mask(
    seen: Tensor, heads: int, kv_heads: int, dtype: torch.dtype, static_shapes: bool
) -> Tensor | None:
    """Return what queries see (B, T or 1, K), bool, as `attend_heads` takes it.

    Without static shapes None if all see everything: attention without a mask takes less time.
    """
    if not static_shapes and seen.all():
        return None
    hidden = hiding_mask(seen, dtype)
    if seen.shape[1] > 1:
        hidden = hidden.repeat_interleave(heads // kv_heads, dim=1)
    return hidden[:, None]


def attend_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention, (B, T, heads * D), of q (B, heads, T, D), k, v (B, kv_heads, K, D).

    Heads that share keys become further queries over the same keys, which a CPU would copy.
    """
    kv_heads = k.shape[1]
    queries = group_heads(q.transpose(1, 2), kv_heads)
    attended = F.scaled_dot_product_attention(queries.flatten(2, 3), k, v, attn_mask=mask)
    return attended.view(queries.shape).transpose(1, 2).flatten(2)


def group_heads(q: Tensor, kv_heads: int) -> Tensor:
    """View of queries (B, T, heads, D) by the keys that they share: (B, kv_heads, T, group, D)."""
    return q.unflatten(2, (kv_heads, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scaled: bool = False) -> Tensor:
    """Grouped-query attention without copying keys or values per query head, (B, T, heads * D).

    Args:
        q: (B, heads, T, D); k, v: (B, kv_heads, K, D).
        mask: (B or 1, T or 1, K) bool, True where a query sees a key. Every query must see at
            least one key. None: all keys.
        scaled: the queries hold the scale of the scores, 1/sqrt(D).
    """
    batch, heads, tokens, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    folded = q
    if group > 1:
        if mask is not None and mask.shape[1] != 1:
            mask = mask.repeat(1, group, 1)
        folded = q.reshape(batch, kv_heads, group * tokens, head_dim)
    seen = None if mask is None else mask[:, None]
    if scaled:
        attended = F.scaled_dot_product_attention(folded, k, v, attn_mask=seen, scale=1.0)
    else:
        attended = F.scaled_dot_product_attention(folded, k, v, attn_mask=seen)
    if group > 1:
        attended = attended.reshape(batch, heads, tokens, head_dim)
    return attended.transpose(1, 2).reshape(batch, tokens, heads * head_dim)


def repeat_rows(tensor: Tensor, count: int) -> Tensor:
    return tensor if count == 1 else tensor.repeat_interleave(count, dim=0)


def images_of_rows(image_tokens: Tensor, image_mask: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Give every prompt row all image tokens, those of hidden cameras as zeros.

    A hidden camera's tokens have weight zero, but zero times NaN is NaN. Image tokens (V, N, W), or
    (R, V, N, W) as in training, and mask (V,) bool; returns views (R, V, N, W) and (R, V).
    """
    image_tokens = torch.where(image_mask[:, None, None], image_tokens, 0.0)
    if image_tokens.ndim == 4:
        return image_tokens, image_mask[None].expand(rows, -1)
    return image_tokens[None].expand(rows, -1, -1, -1), image_mask[None].expand(rows, -1)


class SplitHeads(nn.Module):
    """An attention whose heads have `head_dim` numbers each."""

    head_dim: int

    def heads(self, projected: Tensor, norm: nn.Module | None = None) -> Tensor:
        """(B, T, heads * D) to (B, heads, T, D), each head through the norm if there is one.

        Norm before transposition, or ONNX Runtime would not recognise it.
        """
        batch, tokens, _ = projected.shape
        by_head = projected.view(batch, tokens, -1, self.head_dim)
        return (by_head if norm is None else norm(by_head)).transpose(1, 2)


def causal_attention(mask: Tensor) -> Tensor:
    """Keys that each token sees, (B, T, T) bool, causally, of those in the mask (B, T) bool.

    A hidden token sees itself, so that no token sees nothing.
    """
    length = mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    own = torch.eye(length, dtype=torch.bool, device=mask.device)
    return torch.logical_or(torch.logical_and(mask[:, None], causal), own)
