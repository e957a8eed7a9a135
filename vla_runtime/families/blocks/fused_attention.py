"""Attention of the fused expert's layers over one prefix, all layers of a kind in the same buffers.

Own layers attend to the prefix and to the suffix itself. Cross layers attend to the prefix alone,
so none of their keys and values changes from step to step.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from vla_runtime.families.blocks.fused import (
    attend_heads,
    complex_rotary,
    fold_mask,
    hiding_mask,
    interleave,
)


class OwnLayers:
    """Attention to the prefix and the suffix.

    Shapes: B rows times samples, P prefix tokens, T suffix tokens, D head_dim.

    Args:
        like: (layers, B, kv_heads, P, D), keys of the prefix.
        heads: query heads.
        of_suffix: (T, T) bool, what suffix tokens see of each other.

    Attributes:
        projected: (B * T, (heads + 2 kv_heads) * D), queries, keys and values of the layer that is
            called next.
    """

    def __init__(self, like: Tensor, heads: int, of_suffix: Tensor) -> None:
        layers, batch, kv_heads, length, head_dim = like.shape
        tokens, half = len(of_suffix), head_dim // 2
        self._of_suffix, self._length, self._heads = of_suffix, length, (heads, kv_heads)
        # Rows of the mask: one where every suffix token sees all the others.
        self._mask_rows = 1 if of_suffix.all() else tokens
        self._exact = like.dtype == torch.float32
        empty = partial(torch.empty, device=like.device)

        self._keys, self._values = keys, values = tuple(
            like.new_empty(layers, batch, kv_heads, length + tokens, head_dim) for _ in range(2)
        )
        own_keys, own_values = (
            tensor[..., length:, :].transpose(2, 3) for tensor in (keys, values)
        )
        self._own_values = own_values.unbind(0)
        self._rotation = empty(batch, tokens, 1, half, dtype=torch.complex64)
        self.projected = like.new_empty(batch * tokens, (heads + 2 * kv_heads) * head_dim)
        turning, own = self.projected.split(
            [(heads + kv_heads) * head_dim, kv_heads * head_dim], dim=1
        )
        self._own = own.view(batch, tokens, kv_heads, head_dim)
        pairs = turning.view(batch, tokens, heads + kv_heads, 2, half)
        self._first, self._second = pairs.unbind(3)
        self._turning = empty(batch, tokens, heads + kv_heads, half, dtype=torch.complex64)
        self._unturned = self._turning.split([heads, kv_heads], dim=2)
        self._query = empty(batch, tokens, heads, half, dtype=torch.complex64)
        if self._exact:
            # Rotated keys go straight to their place.
            self._key = torch.view_as_complex(own_keys.unflatten(-1, (half, 2))).unbind(0)
        else:
            self._key = (torch.empty_like(self._unturned[1]),) * layers
            self._key_places = own_keys.unflatten(-1, (half, 2)).unbind(0)
        self._attended = _attention(self._query, keys, values, self._mask_rows)

    def load(self, past_key: Tensor, past_value: Tensor, mask: Tensor) -> None:
        """Copy a prefix of the same shape: (layers, B, kv_heads, P, D) twice, and (B, P) bool."""
        length = self._length
        interleave(past_key, self._keys[..., :length, :])
        self._values[..., :length, :] = past_value
        steps = torch.arange(len(self._of_suffix), device=mask.device)
        positions = mask.long().sum(dim=1, keepdim=True) + steps
        self._rotation.copy_(complex_rotary(positions, past_key.shape[-1]))
        rows = self._mask_rows
        self._attended.hide(
            torch.cat(
                [
                    mask[:, None].expand(-1, rows, -1),
                    self._of_suffix[:rows].expand(len(mask), -1, -1),
                ],
                dim=2,
            )
        )

    def __call__(self, layer: int) -> Tensor:
        """Store a layer's keys and values; return what was attended to, (B * T, heads * D)."""
        torch.complex(self._first.float(), self._second.float(), out=self._turning)
        query, key = self._unturned
        torch.mul(query, self._rotation, out=self._query)
        torch.mul(key, self._rotation, out=self._key[layer])
        self._own_values[layer].copy_(self._own)
        if not self._exact:
            self._key_places[layer].copy_(torch.view_as_real(self._key[layer]))
        return self._attended(layer)


class CrossLayers:
    """Attention to the prefix alone, whose queries are rotated from position 0 on.

    Shapes and arguments as of `OwnLayers`, with the number of suffix tokens T.

    Attributes:
        projected: (B * T, heads * D), queries of the layer that is called next.
    """

    def __init__(self, like: Tensor, heads: int, tokens: int) -> None:
        _, batch, _, _, head_dim = like.shape
        half = head_dim // 2
        self._keys, self._values = (torch.empty_like(like) for _ in range(2))
        steps = torch.arange(tokens, device=like.device)
        self._rotation = complex_rotary(steps[None], head_dim)
        self.projected = like.new_empty(batch * tokens, heads * head_dim)
        pairs = self.projected.view(batch, tokens, heads, 2, half)
        self._first, self._second = pairs.unbind(3)
        self._query = torch.empty(
            batch, tokens, heads, half, dtype=torch.complex64, device=like.device
        )
        self._attended = _attention(self._query, self._keys, self._values, mask_rows=1)

    def load(self, past_key: Tensor, past_value: Tensor, mask: Tensor) -> None:
        """As `OwnLayers.load`."""
        interleave(past_key, self._keys)
        self._values.copy_(past_value)
        self._attended.hide(mask[:, None])

    def __call__(self, layer: int) -> Tensor:
        """Return what a layer's queries attend to, (B * T, heads * D)."""
        torch.complex(self._first.float(), self._second.float(), out=self._query)
        self._query.mul_(self._rotation)
        return self._attended(layer)


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, mask_rows: int
) -> _GroupedKeys | _SharedKeys:
    kind = _SharedKeys if keys.dtype == torch.float32 and keys.shape[2] == 1 else _GroupedKeys
    return kind(torch.view_as_real(query).flatten(-2), keys, values, mask_rows)


class _GroupedKeys:
    """Attention of every layer by one operator.

    Args:
        query: (B, T, heads, D) float32, overwritten before each layer; rotated.
        keys, values: (layers, B, kv_heads, K, D), overwritten in part before each layer.
        mask_rows: T or 1, queries that the mask tells apart.
    """

    def __init__(self, query: Tensor, keys: Tensor, values: Tensor, mask_rows: int) -> None:
        self._query, self._dtype = query.transpose(1, 2), keys.dtype
        self._keys, self._values = keys.unbind(0), values.unbind(0)
        self._heads = query.shape[2], keys.shape[2]
        seen = torch.ones(
            keys.shape[1], mask_rows, keys.shape[3], dtype=torch.bool, device=keys.device
        )
        self._hidden = fold_mask(seen, *self._heads, self._dtype)

    def hide(self, seen: Tensor) -> None:
        """Take what queries see from now on, (B, T or 1, K) bool."""
        self._hidden.copy_(fold_mask(seen, *self._heads, self._dtype))

    def __call__(self, layer: int) -> Tensor:
        """Return what a layer's queries attend to, (B * T, heads * D)."""
        query = self._query.to(self._dtype)
        attended = attend_heads(query, self._keys[layer], self._values[layer], self._hidden)
        return attended.flatten(0, 1)


class _SharedKeys:
    """As `_GroupedKeys`, in float32 with one head of keys: two products, into buffers.

    The heads' queries are further queries over the same keys.
    """

    def __init__(self, query: Tensor, keys: Tensor, values: Tensor, mask_rows: int) -> None:
        batch, tokens, heads, head_dim = query.shape
        self._query = query.view(batch, tokens * heads, head_dim)
        # Each row of the mask is for all heads of its query.
        self._repeats = heads if mask_rows > 1 else 1
        self._hidden = keys.new_empty(batch, mask_rows * self._repeats, keys.shape[3])
        self._keys = keys.squeeze(2).transpose(2, 3).unbind(0)
        self._values = values.squeeze(2).unbind(0)
        self._scale = head_dim**-0.5
        self._scores = keys.new_empty(batch, tokens * heads, keys.shape[3])
        self._shares = torch.empty_like(self._scores)
        self._attended = keys.new_empty(batch, tokens * heads, head_dim)
        self._matrix = self._attended.view(batch * tokens, -1)

    def hide(self, seen: Tensor) -> None:
        """As `_GroupedKeys.hide`."""
        hidden = hiding_mask(seen, self._hidden.dtype)
        self._hidden.copy_(hidden.repeat_interleave(self._repeats, dim=1))

    def __call__(self, layer: int) -> Tensor:
        torch.baddbmm(
            self._hidden, self._query, self._keys[layer], alpha=self._scale, out=self._scores
        )
        torch.softmax(self._scores, dim=-1, out=self._shares)
        torch.bmm(self._shares, self._values[layer], out=self._attended)
        return self._matrix
