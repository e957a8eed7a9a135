"""Attention by lengths in plain PyTorch, in float64; stands where a GPU has `flash`.

Nothing in it waits for a number, so it can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend_by_lengths(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    queries: int,
    keys: int,
    lengths: Tensor,
) -> Tensor:
    """As `key_lengths.flash`, for rows with as many queries and places for keys each."""
    rows, (_, heads, head_dim), kv_heads = len(lengths), query.shape, key.shape[1]
    assert len(query_starts) == len(key_starts) == rows + 1
    assert {t.dtype for t in (query_starts, key_starts, lengths)} == {torch.int32}
    hidden = torch.arange(keys) >= lengths[:, None]
    q = query.double().view(rows, queries, kv_heads, heads // kv_heads, head_dim)
    k, v = (part.double().view(rows, keys, kv_heads, head_dim) for part in (key, value))
    scores = torch.einsum('rqhgd,rkhd->rhgqk', q, k) * head_dim**-0.5
    shares = scores.masked_fill(hidden[:, None, None, None], -torch.inf).softmax(dim=-1)
    # Zero times NaN is NaN.
    v = v.masked_fill(hidden[..., None, None], 0.0)
    return torch.einsum('rhgqk,rkhd->rqhgd', shares, v).reshape(query.shape).to(query.dtype)
