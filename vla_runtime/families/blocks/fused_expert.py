"""The expert over one prefix: all layers of all denoise steps in the same few buffers.

Making tensors and views is half the cost of a launch: so whatever has the same shape in every layer
and step is made once and overwritten. Buffers move only for a prefix of another shape: a CUDA graph
keeps its addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vla_runtime.families.blocks import fused
from vla_runtime.families.blocks.flow_update import advance
from vla_runtime.families.blocks.fused import FusedBlock
from vla_runtime.families.blocks.fused_attention import CrossLayers, JoinedLayers, OwnLayers
from vla_runtime.families.blocks.fused_lengths import Kernel
from vla_runtime.families.blocks.gemma import Modulation
from vla_runtime.families.blocks.layers import Apply, apply

# Keys and values of the layers of a kind, (layers, B, kv_heads, P, D) each.
Past = tuple[Tensor, Tensor]


class FusedExpert:
    """Blocks over the keys and values of one prefix; `load` comes first.

    Shapes: B rows, P prefix tokens, T suffix tokens, W width, D head_dim.

    Args:
        of_suffix: (T, T) bool, what suffix tokens see of each other.
        kernel: attends without a mask where that can be, as `fused_lengths.flash`; None: nowhere.
        static_shapes: the numbers of a mask change no operator.
    """

    # Attention of the layers of a kind, with `load`; None without such layers.
    _own: Any
    _cross: Any
    # Computes a float32 layer before or behind the blocks.
    linear: Apply = staticmethod(apply)
    # Moves x along the flow.
    advance: Callable[..., Tensor] = staticmethod(advance)

    def __init__(
        self,
        blocks: Sequence[FusedBlock],
        of_suffix: Tensor,
        kernel: Kernel | None = None,
        static_shapes: bool = False,
    ) -> None:
        self._blocks, self._of_suffix = blocks, of_suffix
        self._kernel, self._static_shapes = kernel, static_shapes
        # Index of each block among those of its kind.
        kinds = [block.cross for block in blocks]
        self._places = [kinds[:layer].count(cross) for layer, cross in enumerate(kinds)]
        self._shape: torch.Size | None = None
        self._own = self._cross = None
        # Whose rows the products hold together.
        self._requests = 1

    def load(self, mask: Tensor, own: Past | None, cross: Past | None = None) -> None:
        """Copy a prefix; one of the same shape as before goes to the same addresses.

        Args:
            mask: (B, P) bool, valid prefix tokens.
            own: keys and values of the blocks that attend to the suffix too; None without any.
            cross: keys and values of those that attend to the prefix alone; None without any.
        """
        if mask.shape != self._shape:
            self._allocate(own, cross)
            self._shape = mask.shape
        for attention, past in ((self._own, own), (self._cross, cross)):
            if attention is not None and past is not None:
                attention.load(*past, mask)

    def _allocate(self, own: Past | None, cross: Past | None) -> None:
        tokens, heads = len(self._of_suffix), self._blocks[0].query_heads
        ways = self._kernel, self._static_shapes
        self._own = self._cross = None
        if own is not None:
            self._own = OwnLayers(own[0], heads, self._of_suffix, *ways)
        if cross is not None:
            self._cross = CrossLayers(cross[0], heads, tokens, *ways)
        past = own or cross
        assert past is not None
        self._allocate_stream(past[0].shape[1], past[0].dtype, past[0].device)

    @classmethod
    def joined(cls, parts: Sequence[FusedExpert]) -> FusedExpert:
        """Return an expert over the rows of several, whose prefixes it reads where they lie.

        Its numbers are theirs, bit for bit, where a product's do not depend on the other rows.
        """
        first = parts[0]
        joined = cls(first._blocks, first._of_suffix)
        joined._requests = len(parts)
        if first._own is not None:
            joined._own = JoinedLayers([part._own for part in parts])
        if first._cross is not None:
            joined._cross = JoinedLayers([part._cross for part in parts])
        batch = sum(len(part._x) for part in parts)
        joined._allocate_stream(batch, first._operand.dtype, first._x.device)
        return joined

    def _allocate_stream(self, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the buffers of the residual stream of so many rows."""
        tokens = len(self._of_suffix)
        self._attentions = [self._cross if block.cross else self._own for block in self._blocks]
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
            block.qkv.into(self._matrix_in, attention.projected, self._requests)
            attended = attention(self._places[layer])
            out = block.out.matmul_via(self._matrix_out, attended, self._requests)
            self._add(out, first)
            self._normalise(block.post_scale, second, block.epsilon)
            gated = block.gated(self._matrix_in, self._requests)
            self._add(block.down.matmul_via(self._matrix_out, gated, self._requests), second)
        return self._x

    def _normalise(
        self, scale: Tensor | None, modulation: Modulation | None, epsilon: float
    ) -> None:
        if fused.norms_at_once(self._x):
            fused.normalise(self._x, scale, modulation, epsilon, self._operand)
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
