"""Attention of a joined expert's layers over one prefix, those of a kind in the same buffers.

Self layers attend to the prefix and to the suffix itself, whose keys come first; cross layers to
the prefix alone. Where a kernel takes lengths (`key_lengths`) and all queries see the same keys,
the valid keys of the prefix are packed behind the suffix's, and nothing is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_runtime.models.blocks.attention import (
    complex_rotary,
    group_heads,
    heads_mask,
    interleave,
    pairs_of,
)
from vla_runtime.models.blocks.key_lengths import FirstKeys, Kernel, pack_valid_keys


class SelfLayers:
    """Attention to the prefix and the suffix.

    Shapes: B rows, P prefix tokens, T suffix tokens, D head_dim.

    Args:
        like: (layers, B, kv_heads, P, D), keys of the prefix.
        suffix_sees: (T, T) bool, what suffix tokens see of each other.
        kernel: attends without a mask, if suffix tokens see all the others; None: with one.
        static_shapes: the numbers of a mask change no operator.

    Attributes:
        projected: (B * T, (heads + 2 kv_heads) * D), queries, keys and values of the layer that is
            called next.
    """

    def __init__(
        self,
        like: Tensor,
        heads: int,
        suffix_sees: Tensor,
        kernel: Kernel | None,
        static_shapes: bool,
    ) -> None:
        layers, batch, kv_heads, length, head_dim = like.shape
        tokens, half = len(suffix_sees), head_dim // 2
        self._exact = like.dtype == torch.float32
        empty = partial(torch.empty, device=like.device)

        keys, values = (
            like.new_empty(layers, batch, kv_heads, tokens + length, head_dim) for _ in range(2)
        )
        suffix_keys, suffix_values = (
            tensor[..., :tokens, :].transpose(2, 3) for tensor in (keys, values)
        )
        self._value_places = suffix_values.unbind(0)
        self._rotation = empty(batch, tokens, 1, half, dtype=torch.complex64)
        self.projected = like.new_empty(batch * tokens, (heads + 2 * kv_heads) * head_dim)
        turning, value = self.projected.split(
            [(heads + kv_heads) * head_dim, kv_heads * head_dim], dim=1
        )
        self._value = value.view(batch, tokens, kv_heads, head_dim)
        pairs = turning.view(batch, tokens, heads + kv_heads, 2, half)
        self._first, self._second = pairs.unbind(3)
        self._turning = empty(batch, tokens, heads + kv_heads, half, dtype=torch.complex64)
        self._unturned = self._turning.split([heads, kv_heads], dim=2)
        self._query = empty(batch, tokens, heads, half, dtype=torch.complex64)
        if self._exact:
            # Rotated keys go straight to their place.
            self._key = torch.view_as_complex(suffix_keys.unflatten(-1, (half, 2))).unbind(0)
        else:
            self._key = (torch.empty_like(self._unturned[1]),) * layers
            self._key_places = suffix_keys.unflatten(-1, (half, 2)).unbind(0)
        self._steps = torch.arange(tokens, device=like.device)
        # One row of the mask serves all, where every suffix token sees all the others.
        suffix_sees = suffix_sees[:1] if suffix_sees.all() else suffix_sees
        self._attended = _attention(self._query, keys, values, suffix_sees, kernel, static_shapes)

    def load(self, past_key: Tensor, past_value: Tensor, mask: Tensor) -> None:
        """Copy a prefix of the same shape: (layers, B, kv_heads, P, D) twice, and (B, P) bool."""
        positions = mask.sum(dim=1, keepdim=True) + self._steps
        self._rotation.copy_(complex_rotary(positions, past_key.shape[-1]))
        self._attended.load(past_key, past_value, mask)

    def __call__(self, layer: int) -> Tensor:
        """Store a layer's keys and values; return what was attended to, (B * T, heads * D)."""
        torch.complex(self._first.float(), self._second.float(), out=self._turning)
        query, key = self._unturned
        torch.mul(query, self._rotation, out=self._query)
        torch.mul(key, self._rotation, out=self._key[layer])
        self._value_places[layer].copy_(self._value)
        if not self._exact:
            self._key_places[layer].copy_(torch.view_as_real(self._key[layer]))
        return self._attended(layer)


class CrossLayers:
    """Attention to the prefix alone, with queries rotated from position 0 on; see `SelfLayers`.

    `projected` (B * T, heads * D) has the queries of the layer that is called next.
    """

    def __init__(
        self, like: Tensor, heads: int, tokens: int, kernel: Kernel | None, static_shapes: bool
    ) -> None:
        _, batch, _, _, head_dim = like.shape
        half = head_dim // 2
        keys, values = (like.new_empty(like.shape) for _ in range(2))
        steps = torch.arange(tokens, device=like.device)
        self._rotation = complex_rotary(steps[None], head_dim)
        self.projected = like.new_empty(batch * tokens, heads * head_dim)
        pairs = self.projected.view(batch, tokens, heads, 2, half)
        self._first, self._second = pairs.unbind(3)
        self._query = torch.empty(
            batch, tokens, heads, half, dtype=torch.complex64, device=like.device
        )
        nothing = torch.ones(1, 0, dtype=torch.bool, device=like.device)
        self._attended = _attention(self._query, keys, values, nothing, kernel, static_shapes)

    def load(self, past_key: Tensor, past_value: Tensor, mask: Tensor) -> None:
        self._attended.load(past_key, past_value, mask)

    def __call__(self, layer: int) -> Tensor:
        """Return what a layer's queries attend to, (B * T, heads * D)."""
        torch.complex(self._first.float(), self._second.float(), out=self._query)
        self._query.mul_(self._rotation)
        return self._attended(layer)


class JoinedLayers:
    """Attention of several prefixes' rows, each as it is alone, for products of all of them.

    Attributes:
        projected: as of the parts, for the rows of all of them, one part after the other.
    """

    def __init__(self, parts: Sequence[SelfLayers | CrossLayers]) -> None:
        self._parts = parts
        self._lengths = [len(part.projected) for part in parts]
        width = parts[0].projected.shape[1]
        self.projected = parts[0].projected.new_empty(sum(self._lengths), width)
        self._by_part = self.projected.split(self._lengths)

    def __call__(self, layer: int) -> Tensor:
        """Return what a layer's queries attend to, (B * T, heads * D) of the rows of all parts."""
        attended = []
        for part, projected in zip(self._parts, self._by_part, strict=True):
            part.projected.copy_(projected)
            attended.append(part(layer))
        return torch.cat(attended)


def _attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    suffix_sees: Tensor,
    kernel: Kernel | None,
    static_shapes: bool,
) -> _Keys:
    """Choose how the layers of a kind attend.

    Args:
        query: (B, T, heads, D / 2) complex64, overwritten before each layer; rotated.
        keys, values: (layers, B, kv_heads, S + P, D). Those of the suffix come first and are
            overwritten before each layer; S is T, or 0 for cross layers.
        suffix_sees: (T or 1, S) bool, keys of the suffix that queries see; one row holds for
            all of them.
    """
    real = torch.view_as_real(query).flatten(-2)
    if kernel is not None and len(suffix_sees) == 1:
        return _PackedKeys(real, keys, values, suffix_sees, kernel)
    return _GroupedKeys(real, keys, values, suffix_sees, static_shapes)


class _Keys:
    """Keys and values of every layer, the prefix's behind the suffix's; see `_attention`."""

    def __init__(self, keys: Tensor, values: Tensor, suffix_sees: Tensor) -> None:
        self._suffix_sees = suffix_sees
        self._past_keys, self._past_values = (
            tensor[..., suffix_sees.shape[1] :, :] for tensor in (keys, values)
        )

    def load(self, past_key: Tensor, past_value: Tensor, mask: Tensor) -> None:
        interleave(past_key, self._past_keys)
        self._past_values.copy_(past_value)
        self._see(mask)

    def _see(self, mask: Tensor) -> None:
        """Set the mask of valid prefix keys, (B, P) bool."""
        suffix = self._suffix_sees.expand(len(mask), -1, -1)
        self._hide(torch.cat([suffix, mask[:, None].expand(-1, suffix.shape[1], -1)], dim=2))

    def _hide(self, seen: Tensor) -> None:
        """Take what queries see from now on, (B, T or 1, S + P) bool."""
        raise NotImplementedError

    def __call__(self, layer: int) -> Tensor:
        """Return what a layer's queries attend to, (B * T, heads * D)."""
        raise NotImplementedError


class _GroupedKeys(_Keys):
    """Attention of every layer by one operator; query (B, T, heads, D) float32."""

    def __init__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        suffix_sees: Tensor,
        static_shapes: bool,
    ) -> None:
        super().__init__(keys, values, suffix_sees)
        self._dtype, self._static_shapes = keys.dtype, static_shapes
        self._keys, self._values = keys.unbind(0), values.unbind(0)
        self._heads = query.shape[2], keys.shape[2]
        self._grouped = group_heads(query, keys.shape[2])
        # A view of the buffer that is overwritten, made once.
        self._queries = self._grouped.flatten(2, 3) if keys.shape[2] == 1 else None
        self._rows = query.shape[0] * query.shape[1]
        seen = suffix_sees.new_ones(keys.shape[1], len(suffix_sees), keys.shape[3])
        self._hidden = heads_mask(seen, *self._heads, self._dtype, self._static_shapes)

    def _hide(self, seen: Tensor) -> None:
        hidden = heads_mask(seen, *self._heads, self._dtype, self._static_shapes)
        if hidden is None or self._hidden is None:
            self._hidden = hidden
        else:
            # A captured graph keeps the address.
            self._hidden.copy_(hidden)

    def __call__(self, layer: int) -> Tensor:
        shared = self._queries
        queries = (self._grouped.flatten(2, 3) if shared is None else shared).to(self._dtype)
        attended = F.scaled_dot_product_attention(
            queries, self._keys[layer], self._values[layer], attn_mask=self._hidden
        )
        if shared is None:
            attended = attended.view(self._grouped.shape).transpose(1, 2)
        return attended.reshape(self._rows, -1)


class _PackedKeys(_Keys):
    """Attention by lengths: the prefix's valid keys come first, and what is behind is never read.

    To the kernel all queries that share a head of keys are the heads of a single token: it then
    splits the keys between the GPU's multiprocessors. Of more tokens it splits pages of keys alone,
    and leaves every row but the first unwritten (PyTorch's issue 194167).
    """

    def __init__(
        self, query: Tensor, keys: Tensor, values: Tensor, suffix_sees: Tensor, kernel: Kernel
    ) -> None:
        super().__init__(keys, values, suffix_sees)
        layers, batch, kv_heads, length, head_dim = keys.shape
        tokens = query.shape[1]
        self._query = query.view(batch, tokens, kv_heads, -1, head_dim).transpose(1, 2)
        self._operand = keys.new_empty(self._query.shape)
        self._heads = self._operand.view(batch * kv_heads, -1, head_dim)
        self._keys, self._values = (
            tensor.view(layers, -1, 1, head_dim).unbind(0) for tensor in (keys, values)
        )
        self._attend = FirstKeys(kernel, batch * kv_heads, 1, length, keys.device)
        self._lengths = self._attend.lengths.view(batch, kv_heads)

    def load(self, past_key: Tensor, past_value: Tensor, mask: Tensor) -> None:
        index, pairs = pack_valid_keys(mask)[None, :, None, :, None], pairs_of(past_key)
        keys = self._past_keys.unflatten(-1, pairs.shape[-2:])
        keys.scatter_(3, index[..., None].expand_as(pairs), pairs)
        self._past_values.scatter_(3, index.expand_as(past_value), past_value)
        self._see(mask)

    def _see(self, mask: Tensor) -> None:
        self._lengths.copy_(mask.sum(dim=1, keepdim=True) + self._suffix_sees.shape[1])

    def __call__(self, layer: int) -> Tensor:
        self._operand.copy_(self._query)
        attended = self._attend(self._heads, self._keys[layer], self._values[layer])
        attended = attended.view(self._operand.shape).transpose(1, 2)
        return attended.reshape(attended.shape[0] * attended.shape[1], -1)
