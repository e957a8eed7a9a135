"""Attention without a mask: each row's valid keys come first, and a length says how many they are.

PyTorch's flash kernels take no mask, but the number of keys of each row as a tensor on the device,
which a captured CUDA graph reads anew each time. So padding is packed behind the valid keys, once a
prefix, and never read. The operator has no public name (`torch.nn.attention.varlen` is newer, and
slow to import); `usable` tries it on the device first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

logger = logging.getLogger(__name__)

# Error allowed to a kernel, in roundings of its dtype. A right one has about one; a single key
# that is not seen makes ten in bfloat16, at the size of published policies.
ROUNDINGS = 4

# Query, key, value, starts of queries and keys, most queries and keys of a row, lengths of keys.
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, Tensor], Tensor]


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    queries: int,
    keys: int,
    lengths: Tensor,
) -> Tensor:
    """Attend by PyTorch's flash kernels.

    Args:
        query: (all queries, heads, D); key, value: (all keys, kv_heads, D); row after row.
        query_starts, key_starts: (rows + 1,) int32, first query and key of each row.
        queries, keys: most of a row.
        lengths: (rows,) int32, keys of each row that are read.

    Returns:
        (all queries, heads, D)
    """
    return torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        query_starts,
        key_starts,
        queries,
        keys,
        0.0,
        False,
        False,
        seqused_k=lengths,
    )[0]


class FirstKeys:
    """Attention to the first keys of each row, in buffers that keep their addresses.

    Args:
        kernel: `flash`, or a function with its arguments.
        queries, keys: numbers of queries and of places for keys in each row.

    Attributes:
        lengths: (rows,) int32, keys of each row that are seen.
    """

    def __init__(
        self, kernel: Kernel, rows: int, queries: int, keys: int, device: torch.device
    ) -> None:
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._kernel, self._sizes = kernel, (queries, keys)
        self._starts = starts * queries, starts * keys
        self.lengths = torch.zeros_like(starts[1:])

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(rows * queries, heads, D) over (rows * keys, kv_heads, D) twice."""
        return self._kernel(query, key, value, *self._starts, *self._sizes, self.lengths)


def pack_valid_keys(mask: Tensor) -> Tensor:
    """Place of each token of a mask (B, P), int64, when valid ones come first, in their order."""
    behind = mask.sum(dim=1, keepdim=True) + (~mask).cumsum(dim=1)
    return torch.where(mask, mask.cumsum(dim=1), behind) - 1


class Shape(NamedTuple):
    """Sizes of an attention: queries and keys of a row, and heads of both."""

    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def folded(self) -> Shape:
        """All queries that see the same head of keys, as heads of a single token."""
        heads = self.queries * self.heads // self.kv_heads
        return self._replace(queries=1, heads=heads, kv_heads=1)


@cache
def usable(kernel: Kernel, device: torch.device, dtype: torch.dtype, shape: Shape) -> Kernel | None:
    """Return the kernel if it gives masked attention's numbers here, else None (see the log)."""
    try:
        error = _error(kernel, device, dtype, shape)
    except torch.cuda.OutOfMemoryError:
        # Not the kernel's refusal: free memory must not decide which numbers a policy gives.
        raise
    except (AttributeError, RuntimeError) as refusal:
        reason = str(refusal).partition('\n')[0][:200]
    else:
        # False for NaN.
        if error <= ROUNDINGS * torch.finfo(dtype).eps:
            return kernel
        reason = f'off by {error:.1g} of its largest number'
    logger.info(
        'Attention keeps its mask on %s in %s (head size %d): the same numbers up to rounding, '
        'slower on a large GPU. The kernel that takes lengths instead is not usable: %s',
        device,
        str(dtype).removeprefix('torch.'),
        shape.head_dim,
        reason,
    )
    return None


def _error(kernel: Kernel, device: torch.device, dtype: torch.dtype, shape: Shape) -> float:
    """Largest difference from masked attention in float64, over its largest number."""
    queries, keys, heads, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int, of: int) -> Tensor:
        drawn = torch.randn(2, tokens, of, head_dim, generator=generator)
        return drawn.to(device, dtype)

    # Twice as large: few keys make up what is attended to, and the numbers do not average out.
    query, key, value = 2 * draw(queries, heads), draw(keys, kv_heads), draw(keys, kv_heads)
    lengths = torch.tensor([keys, keys // 3 + 1], device=device)
    seen = torch.arange(keys, device=device) < lengths[:, None]
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (query, key, value))
    # Heads that share keys are further queries: copies of a large policy's keys take gigabytes.
    grouped = q.reshape(2, kv_heads, -1, head_dim)
    expected = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen[:, None, None])
    expected = expected.view(q.shape)
    for tensor in (key, value):
        tensor[~seen] = torch.nan
    attend = FirstKeys(kernel, 2, queries, keys, device)
    attend.lengths.copy_(lengths)
    found = attend(*(tensor.flatten(0, 1) for tensor in (query, key, value)))
    found = found.view(query.shape).transpose(1, 2).double()
    return float((found - expected).abs().max() / expected.abs().max())
