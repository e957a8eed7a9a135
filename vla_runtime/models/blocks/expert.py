"""The expert over one prefix: all layers of all denoise steps in the same few buffers.

Making tensors and views is half the cost of a launch: so whatever has the same shape in every layer
and step is made once and overwritten. Buffers move only for a prefix of another shape: a CUDA graph
keeps its addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from vla_runtime.models.blocks import layers
from vla_runtime.models.blocks.attention import Rotary, attend, rotary
from vla_runtime.models.blocks.expert_attention import CrossLayers, JoinedLayers, SelfLayers
from vla_runtime.models.blocks.flow_update import advance
from vla_runtime.models.blocks.key_lengths import Kernel
from vla_runtime.models.blocks.layers import Apply, Modulation, RmsNorm, apply
from vla_runtime.models.blocks.products import GatedProduct, Product
from vla_runtime.models.blocks.transformer import Block, GatedMlp

# Keys and values of the layers of a kind, (layers, B, kv_heads, P, D) each.
Past = tuple[Tensor, Tensor]


class Expert:
    """Blocks over the keys and values of one prefix, layer by layer: what is exported.

    It has gradients, for training and the Jacobian.

    Args:
        suffix_sees: (T, T) bool, what suffix tokens see of each other.
        mask: (B, P) bool, valid prefix tokens.
        self_past, cross_past: as of `JoinedExpert.load`.
    """

    linear: Apply = staticmethod(apply)
    advance: Callable[..., Tensor] = staticmethod(advance)

    def __init__(
        self,
        blocks: Sequence[Block],
        suffix_sees: Tensor,
        mask: Tensor,
        self_past: Past | None,
        cross_past: Past | None = None,
    ) -> None:
        self._blocks, self._suffix_sees, self._mask = blocks, suffix_sees, mask
        self._self_past, self._cross_past = self_past, cross_past

    def rotary(self, positions: Tensor, *, is_cross: bool = False) -> Rotary:
        """Rotary positions (B or 1, T) of the suffix's queries and keys."""
        return rotary(positions, self._blocks[0].attention.head_dim)

    def __call__(self, h: Tensor, modulations: Sequence[Modulation]) -> Tensor:
        """Suffix tokens (B or 1, T, W) through all blocks; two modulations each, or none."""
        mask, (rows, tokens) = self._mask, (self._mask.shape[0], h.shape[1])
        h = h.expand(rows, -1, -1)
        steps = torch.arange(tokens, device=h.device)
        start = mask.long().sum(dim=1, keepdim=True)
        after_prefix = self.rotary(start + steps)
        seen = torch.cat(
            [
                mask[:, None].expand(-1, tokens, -1),
                self._suffix_sees[None].expand(rows, -1, -1),
            ],
            dim=2,
        )
        of_kind = {True: 0, False: 0}
        for layer, block in enumerate(self._blocks):
            first, second = modulations[2 * layer : 2 * layer + 2] or (None, None)
            is_cross = block.attention.is_cross
            index, past = of_kind[is_cross], self._cross_past if is_cross else self._self_past
            of_kind[is_cross] += 1
            assert past is not None
            key, value = past[0][index], past[1][index]
            if is_cross:
                # As if there were no prefix before them.
                q = block.attention.queries(
                    block.first_norm(h, first), self.rotary(steps[None], is_cross=True)
                )
                attended = attend(q, key, value, mask[:, None])
            else:
                q, k, v = block.project(h, after_prefix, first)
                k, v = torch.cat([key, k], dim=2), torch.cat([value, v], dim=2)
                attended = attend(q, k, v, seen)
            h = block.combine(h, attended, first, second)
        return h


def required(product: Any) -> Any:
    """Return a product that `join` has made."""
    assert product is not None, 'a block that is not joined'
    return product


class BlockProducts:
    """What a joined block's layers compute with, for one after the other over the same buffers.

    Attributes:
        cross: True where another stack gives keys and values: `qkv` gives queries alone.
        input_scale, post_scale: scales of its norms; None for adaptive ones.
    """

    def __init__(self, block: Block) -> None:
        attention, mlp = block.attention, cast(GatedMlp, block.mlp)
        self.cross, self.width = attention.is_cross, attention.q.in_features
        self.head_dim = attention.head_dim
        self.query_heads, self.kv_heads = attention.num_heads, attention.kv_heads
        self.qkv: Product = required(attention.qkv_product)
        self.out: Product = required(attention.out_product)
        self.gated: GatedProduct = required(mlp.gated_product)
        self.down: Product = required(mlp.down_product)
        norms = block.first_norm, block.second_norm
        self.input_scale, self.post_scale = (
            norm.scale().detach() if isinstance(norm, RmsNorm) else None for norm in norms
        )
        self.epsilon: float = block.first_norm.epsilon

    def in_float32(self) -> BlockProducts:
        wide = copy(self)
        for name in ('qkv', 'out', 'gated', 'down'):
            setattr(wide, name, getattr(self, name).in_float32())
        return wide


class JoinedExpert:
    """Blocks over the keys and values of one prefix; `load` comes first.

    Shapes: B rows, P prefix tokens, T suffix tokens, W width, D head_dim.

    Args:
        suffix_sees: (T, T) bool, what suffix tokens see of each other.
        kernel: attends without a mask where that can be, as `key_lengths.flash`; None: nowhere.
        static_shapes: the numbers of a mask change no operator.
    """

    # Attention of the layers of a kind, with `load`; None without such layers.
    _self_layers: Any
    _cross_layers: Any
    # Computes a float32 layer before or behind the blocks.
    linear: Apply = staticmethod(apply)
    # Moves x along the flow.
    advance: Callable[..., Tensor] = staticmethod(advance)

    def __init__(
        self,
        blocks: Sequence[BlockProducts],
        suffix_sees: Tensor,
        kernel: Kernel | None = None,
        static_shapes: bool = False,
    ) -> None:
        self._blocks, self._suffix_sees = blocks, suffix_sees
        self._kernel, self._static_shapes = kernel, static_shapes
        # Index of each block among those of its kind.
        kinds = [block.cross for block in blocks]
        self._places = [kinds[:layer].count(cross) for layer, cross in enumerate(kinds)]
        self._shape: torch.Size | None = None
        self._self_layers = self._cross_layers = None
        # Whose rows the products hold together.
        self._requests = 1

    def load(self, mask: Tensor, self_past: Past | None, cross_past: Past | None = None) -> None:
        """Copy a prefix; one of the same shape as before goes to the same addresses.

        Args:
            mask: (B, P) bool, valid prefix tokens.
            self_past: keys and values of the blocks that attend to the suffix too; None: no blocks.
            cross_past: keys and values of those that attend to the prefix alone; None: no blocks.
        """
        if mask.shape != self._shape:
            self._allocate(self_past, cross_past)
            self._shape = mask.shape
        for attention, past in ((self._self_layers, self_past), (self._cross_layers, cross_past)):
            if attention is not None and past is not None:
                attention.load(*past, mask)

    def _allocate(self, self_past: Past | None, cross_past: Past | None) -> None:
        tokens, heads = len(self._suffix_sees), self._blocks[0].query_heads
        ways = self._kernel, self._static_shapes
        self._self_layers = self._cross_layers = None
        if self_past is not None:
            self._self_layers = SelfLayers(self_past[0], heads, self._suffix_sees, *ways)
        if cross_past is not None:
            self._cross_layers = CrossLayers(cross_past[0], heads, tokens, *ways)
        past = self_past or cross_past
        assert past is not None
        self._allocate_stream(past[0].shape[1], past[0].dtype, past[0].device)

    @classmethod
    def joined(cls, parts: Sequence[JoinedExpert]) -> JoinedExpert:
        """Return an expert over the rows of several, whose prefixes it reads where they lie.

        Its numbers are theirs, bit for bit, where a product's do not depend on the other rows.
        """
        first = parts[0]
        joined = cls(first._blocks, first._suffix_sees)
        joined._requests = len(parts)
        if first._self_layers is not None:
            joined._self_layers = JoinedLayers([part._self_layers for part in parts])
        if first._cross_layers is not None:
            joined._cross_layers = JoinedLayers([part._cross_layers for part in parts])
        batch = sum(len(part._x) for part in parts)
        joined._allocate_stream(batch, first._operand.dtype, first._x.device)
        return joined

    def _allocate_stream(self, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the buffers of the residual stream of so many rows."""
        tokens = len(self._suffix_sees)
        self._attentions = [
            self._cross_layers if block.cross else self._self_layers for block in self._blocks
        ]
        width = self._blocks[0].width
        empty = partial(torch.empty, device=device)
        self._exact = dtype == torch.float32
        self._x, self._normed = (empty(batch, tokens, width) for _ in range(2))
        self._inverse = empty(batch, tokens, 1)
        # The mean of squares is a product: a third of the time of a sum over a short row.
        # Request by request: a CPU takes the rows of this product in fours, and what is left over
        # in another way.
        rows = batch * tokens // self._requests
        squares, means = self._normed.view(-1, width), self._inverse.view(-1, 1)
        self._means = [*zip(squares.split(rows), means.split(rows), strict=True)]
        self._ones = torch.ones_like(self._means[0][1])
        self._average = self._ones.new_full((width, 1), 1 / width)
        # Both ends of a product, as tensors and as matrices.
        self._operand = self._normed if self._exact else self._normed.to(dtype)
        self._matrix_in, self._matrix_out = (
            tensor.view(batch * tokens, -1)
            for tensor in (self._operand, torch.empty_like(self._operand))
        )

    def __call__(self, h: Tensor, modulations: Sequence[Modulation]) -> Tensor:
        """Suffix tokens (B or 1, T, W) through all blocks; two modulations each, or none.

        Returns (B, T, W), a buffer that the next call overwrites.
        """
        self._x.copy_(h)
        for layer, block in enumerate(self._blocks):
            attention = self._attentions[layer]
            first, second = modulations[2 * layer : 2 * layer + 2] or (None, None)
            self._normalise(block.input_scale, first, block.epsilon)
            block.qkv.into(self._matrix_in, attention.projected)
            attended = attention(self._places[layer])
            out = block.out.matmul_via(self._matrix_out, attended)
            self._add(out, first)
            self._normalise(block.post_scale, second, block.epsilon)
            gated = block.gated(self._matrix_in)
            self._add(block.down.matmul_via(self._matrix_out, gated), second)
        return self._x

    def _normalise(
        self, scale: Tensor | None, modulation: Modulation | None, epsilon: float
    ) -> None:
        if layers.norms_at_once(self._x):
            layers.normalise(self._x, scale, modulation, epsilon, self._operand)
            return
        torch.mul(self._x, self._x, out=self._normed)
        for squares, means in self._means:
            torch.addmm(self._ones, squares, self._average, beta=epsilon, out=means)
        self._inverse.rsqrt_()
        torch.mul(self._x, self._inverse, out=self._normed)
        if modulation is not None:
            torch.addcmul(modulation[1], self._normed, modulation[0], out=self._normed)
        elif scale is not None:
            self._normed.mul_(scale)
        if not self._exact:
            self._operand.copy_(self._normed)

    def _add(self, product: Tensor, modulation: Modulation | None) -> None:
        """Add (B * T, W) to the residual stream, through its gate; in float32."""
        result = product.view(self._x.shape)
        if modulation is None:
            self._x.add_(result)
        else:
            self._x.addcmul_(result, modulation[2])
