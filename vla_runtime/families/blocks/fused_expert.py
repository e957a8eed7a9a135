"""The expert over one prefix: all layers of all denoise steps in the same few buffers.

A small policy is mostly launch cost, and half of that is making tensors and views. So whatever has
the same shape in every layer and step is made once, with its views, and overwritten. Buffers move
only for a prefix of another shape: a CUDA graph keeps the addresses it was captured with.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_runtime.families.blocks.fused import (
    EPSILON,
    FusedBlock,
    Modulation,
    attend_heads,
    complex_rotary,
    hiding_mask,
    interleave,
)


class FusedExpert:
    """Blocks over the keys and values of one prefix; `load` comes first.

    Shapes: B rows times samples, P prefix tokens, T suffix tokens, W width, D head_dim.

    Args:
        blocks: of the expert.
        of_suffix: (T, T) bool, what suffix tokens see of each other.
    """

    def __init__(self, blocks: Sequence[FusedBlock], of_suffix: Tensor) -> None:
        self._blocks, self._of_suffix = blocks, of_suffix
        # Rows of the mask: one where every suffix token sees all the others.
        self._mask_rows = 1 if of_suffix.all() else len(of_suffix)
        self._shape: torch.Size | None = None

    def load(self, past_key: Tensor, past_value: Tensor, mask: Tensor) -> None:
        """Copy a prefix; one of the same shape as before goes to the same addresses.

        Args:
            past_key, past_value: (layers, B, kv_heads, P, D).
            mask: (B, P) bool, valid prefix tokens.
        """
        if past_key.shape != self._shape:
            self._allocate(past_key)
            self._shape = past_key.shape
        _, batch, _, length, head_dim = past_key.shape
        interleave(past_key, self._keys[..., :length, :])
        self._values[..., :length, :] = past_value
        steps = torch.arange(len(self._of_suffix), device=mask.device)
        positions = mask.long().sum(dim=1, keepdim=True) + steps
        self._rotation.copy_(complex_rotary(positions, head_dim))
        rows = self._mask_rows
        seen = torch.cat(
            [
                mask[:, None].expand(-1, rows, -1),
                self._of_suffix[:rows].expand(batch, -1, -1),
            ],
            dim=2,
        )
        self._attended.hide(hiding_mask(seen, past_key.dtype))

    def _allocate(self, like: Tensor) -> None:
        """Make all buffers for prefixes with keys like these, and views of the buffers."""
        layers, batch, kv_heads, length, head_dim = like.shape
        tokens, heads = len(self._of_suffix), self._blocks[0].query_heads
        dtype, rows, half = like.dtype, batch * tokens, head_dim // 2
        empty = partial(torch.empty, device=like.device)
        self._exact = dtype == torch.float32

        self._keys, self._values = keys, values = tuple(
            like.new_empty(layers, batch, kv_heads, length + tokens, head_dim) for _ in range(2)
        )
        own_keys, own_values = (
            tensor[..., length:, :].transpose(2, 3) for tensor in (keys, values)
        )
        self._own_values = own_values.unbind(0)
        self._rotation = empty(batch, tokens, 1, half, dtype=torch.complex64)

        self._x, self._normed = (empty(batch, tokens, self._blocks[0].width) for _ in range(2))
        self._inverse = empty(batch, tokens, 1)
        # Both ends of a product, as tensors and as matrices.
        self._operand = self._normed if self._exact else self._normed.to(dtype)
        self._result = torch.empty_like(self._operand)
        self._matrix_in, self._matrix_out = (
            tensor.view(rows, -1) for tensor in (self._operand, self._result)
        )
        self._qkv = like.new_empty(rows, (heads + 2 * kv_heads) * head_dim)
        turning, own = self._qkv.split([(heads + kv_heads) * head_dim, kv_heads * head_dim], dim=1)
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
        attention = _SharedKeys if self._exact and kv_heads == 1 else _GroupedKeys
        query = torch.view_as_real(self._query).flatten(-2)
        self._attended = attention(query, keys, values, self._mask_rows)

    def __call__(self, h: Tensor, modulations: Sequence[Modulation]) -> Tensor:
        """Suffix tokens (B or 1, T, W) through all blocks; two modulations each, or none.

        Returns:
            (B, T, W), a buffer that the next call overwrites
        """
        self._x.copy_(h)
        for layer, block in enumerate(self._blocks):
            first, second = modulations[2 * layer : 2 * layer + 2] or (None, None)
            self._normalise(block.input_scale, first)
            block.qkv.into(self._matrix_in, self._qkv)
            block.out.into(self._attend(layer), self._matrix_out)
            self._add(first)
            self._normalise(block.post_scale, second)
            gate, up = block.gate_up(self._matrix_in).chunk(2, dim=-1)
            block.down.into(F.gelu(gate, approximate='tanh').mul_(up), self._matrix_out)
            self._add(second)
        return self._x

    def _normalise(self, scale: Tensor | None, modulation: Modulation | None) -> None:
        """RMSNorm of the residual stream, into the operand; as `fused.normalise`."""
        torch.mul(self._x, self._x, out=self._normed)
        torch.mean(self._normed, dim=-1, keepdim=True, out=self._inverse)
        torch.mul(self._x, self._inverse.add_(EPSILON).rsqrt_(), out=self._normed)
        if modulation is not None:
            torch.addcmul(modulation[1], self._normed, modulation[0], out=self._normed)
        elif scale is not None:
            self._normed.mul_(scale)
        if not self._exact:
            self._operand.copy_(self._normed)

    def _add(self, modulation: Modulation | None) -> None:
        """Add the last product to the residual stream, through its gate; in float32."""
        if modulation is None:
            self._x.add_(self._result)
        else:
            self._x.addcmul_(self._result.float(), modulation[2])

    def _attend(self, layer: int) -> Tensor:
        """Store this layer's keys and values; return what was attended to, (B * T, heads * D)."""
        torch.complex(self._first.float(), self._second.float(), out=self._turning)
        query, key = self._unturned
        torch.mul(query, self._rotation, out=self._query)
        torch.mul(key, self._rotation, out=self._key[layer])
        self._own_values[layer].copy_(self._own)
        if not self._exact:
            self._key_places[layer].copy_(torch.view_as_real(self._key[layer]))
        return self._attended(layer)


class _GroupedKeys:
    """Attention of every layer by one operator.

    Args:
        query: (B, T, heads, D) float32, overwritten before each layer; rotated.
        keys, values: (layers, B, kv_heads, P + T, D), overwritten in part before each layer.
        mask_rows: T or 1, queries that the mask tells apart.
    """

    def __init__(self, query: Tensor, keys: Tensor, values: Tensor, mask_rows: int) -> None:
        self._query, self._dtype = query.transpose(1, 2), keys.dtype
        self._keys, self._values = keys.unbind(0), values.unbind(0)
        self._hidden = keys.new_empty(keys.shape[1], 1, mask_rows, keys.shape[3])

    def hide(self, hidden: Tensor) -> None:
        """Take (B, T or 1, P + T), added to the scores from now on; see `fused.hiding_mask`."""
        self._hidden.copy_(hidden[:, None])

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

    def hide(self, hidden: Tensor) -> None:
        """As `_GroupedKeys.hide`."""
        self._hidden.copy_(hidden.repeat_interleave(self._repeats, dim=1))

    def __call__(self, layer: int) -> Tensor:
        torch.baddbmm(
            self._hidden, self._query, self._keys[layer], alpha=self._scale, out=self._scores
        )
        torch.softmax(self._scores, dim=-1, out=self._shares)
        torch.bmm(self._shares, self._values[layer], out=self._attended)
        return self._matrix
