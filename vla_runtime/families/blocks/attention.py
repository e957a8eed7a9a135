"""Rotary positions and grouped-query attention, shared by all decoder stacks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.dimensions import DecoderDims
from vla_runtime.families.blocks.layers import Linear, QueryLinear

Rotary = tuple[Tensor, Tensor]


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
    cosine, sine = rotary
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cosine + torch.cat([-second, first], dim=-1) * sine).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention without copying keys or values per query head, (B, T, heads * D).

    Args:
        q: (B, heads, T, D); k, v: (B, kv_heads, K, D).
        mask: (B or 1, T or 1, K) bool, True where a query sees a key. Every query must see at
            least one key.
    """
    batch, heads, tokens, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    if mask.shape[1] != 1:
        mask = mask.repeat(1, group, 1)
    folded = q.reshape(batch, kv_heads, group * tokens, head_dim)
    attended = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask[:, None])
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


class Attention(SplitHeads):
    """The four projections of one attention layer; the attention itself is `attend`.

    Args:
        memory_width: input width of the key and value projections; None: the stack's width.
        bias: query, key and value projections have a bias.
    """

    def __init__(
        self, dims: DecoderDims, memory_width: int | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        memory = dims.width if memory_width is None else memory_width
        self.head_dim = dims.head_dim
        self.q = QueryLinear(dims.width, dims.num_heads * dims.head_dim, dims.head_dim, bias=bias)
        self.k = Linear(memory, dims.num_kv_heads * dims.head_dim, bias=bias)
        self.v = Linear(memory, dims.num_kv_heads * dims.head_dim, bias=bias)
        self.out = Linear(dims.num_heads * dims.head_dim, dims.width, bias=False)

    def project(self, h: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Project normed tokens (B, T, W), queries and keys rotated.

        Returns queries (B, heads, T, D), and keys and values (B, kv_heads, T, D).
        """
        projected = [self.q(h), self.k(h), self.v(h)]
        heads, kv_heads, _ = (part.shape[-1] // self.head_dim for part in projected)
        together = self.heads(torch.cat(projected, dim=-1))
        turned, v = together.split([heads + kv_heads, kv_heads], dim=1)
        q, k = rotate(turned, rotary).split([heads, kv_heads], dim=1)
        return q, k, v

    def project_keys_values(self, h: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, (B, kv_heads, T, D) each, of normed tokens (B, T, W)."""
        return rotate(self.heads(self.k(h)), rotary), self.heads(self.v(h))

    def project_queries(self, h: Tensor, rotary: Rotary) -> Tensor:
        """Rotated queries (B, heads, T, D) of normed tokens (B, T, W)."""
        return rotate(self.heads(self.q(h)), rotary)
