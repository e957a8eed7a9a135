"""The expert over one prefix in eight Triton kernels a layer: `JoinedExpert` for CUDA.

Needs Triton. Whether it is right and faster is found out at load (`engines.torch.layer_trial`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vla_runtime.models.blocks.attention import rotary
from vla_runtime.models.blocks.expert import BlockProducts, JoinedExpert, Past
from vla_runtime.models.blocks.key_lengths import Kernel, pack_valid_keys
from vla_runtime.models.blocks.layers import Modulation, gelu_tanh
from vla_runtime.models.triton import kernels
from vla_runtime.models.triton import step as triton_step
from vla_runtime.models.triton.step import power_of_2, tiles

# Tiles of the products: tokens and inputs. Every set of tiles and stages fits the 99 KB that a
# consumer GPU's multiprocessor shares.
ROWS, INNER = 64, 64
# Outputs of a program: pairs of a head, pairs of gate and up, outputs of the other products. Few
# outputs make many programs, which read the weights side by side; that, not arithmetic, takes the
# time.
HEAD_PAIRS, GATE_PAIRS, OUTPUTS = 16, 32, 32
# Inputs that a program of the last multiplies; the parts are added up by the next norm.
PART_INPUTS = 512
# Tiles of the attention: queries and keys.
QUERIES, KEYS = 64, 32
# Warps and stages of the kernels, with which no register spills at head size 256.
MULTIPLIED = {'num_warps': 4, 'num_stages': 6}
# Inputs, warps and stages in float32, whose products take more registers.
EXACT_INNER = 16
EXACT = {'num_warps': 8, 'num_stages': 4}
ATTENDED = {'num_warps': 8, 'num_stages': 2}
NORMED = {'num_warps': 4}
# Keys that a program attends to in one row. With two rows it attends to twice as many, so that
# there are as many programs. The parts of a row are added up afterwards.
PART = 64


class _Layers:
    """Keys and values of the layers of a kind: the suffix's first, valid prefix keys behind.

    Args:
        like: (layers, B, kv_heads, P, D), keys of the prefix.
        suffix_sees: (T, T) bool, what suffix tokens see of each other; (T, 0) for cross layers.
    """

    def __init__(self, like: Tensor, suffix_sees: Tensor, heads: int) -> None:
        layers, batch, kv_heads, prefix, head_dim = like.shape
        tokens, self.suffix_keys = suffix_sees.shape
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.batch, self.tokens, self.length = batch, tokens, self.suffix_keys + prefix
        self.keys, self.values = (
            like.new_zeros(layers, batch, kv_heads, self.length, head_dim) for _ in range(2)
        )
        self.suffix_sees = suffix_sees.to(torch.uint8).contiguous()
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=like.device)
        count, empty = batch * tokens, partial(torch.empty, device=like.device)
        self.cosine, self.sine = (empty(count, head_dim // 2) for _ in range(2))
        self.query = like.new_empty(count, heads, head_dim)
        self.part = PART * batch
        self.parts = tiles(self.length, self.part)
        self.of_parts = empty(self.parts, count, heads, head_dim)
        self.weights = empty(self.parts, count, heads)
        self.attended = like.new_empty(count, heads * head_dim)
        self._steps = torch.arange(tokens, device=like.device)

    def load(self, past_key: Tensor, past_value: Tensor, mask: Tensor) -> None:
        """Copy a prefix: (layers, B, kv_heads, P, D) twice, and its valid tokens (B, P) bool."""
        index = pack_valid_keys(mask)[None, :, None, :, None].expand_as(past_key)
        for buffer, past in ((self.keys, past_key), (self.values, past_value)):
            buffer[..., self.suffix_keys :, :].scatter_(3, index, past)
        valid = mask.sum(dim=1, keepdim=True)
        self.lengths.copy_(valid[:, 0] + self.suffix_keys)
        # Queries of cross layers count from 0.
        positions = (valid if self.suffix_keys else 0 * valid) + self._steps
        half = self.head_dim // 2
        for buffer, part in zip(
            (self.cosine, self.sine), rotary(positions, self.head_dim), strict=True
        ):
            buffer.view(self.batch, self.tokens, half).copy_(part[:, 0, :, :half])

    def attend(self, layer: int, precision: str) -> Tensor:
        """Attention of the queries to a layer's keys, (B * T, heads * D)."""
        count, head_dim = self.batch * self.tokens, self.head_dim
        dim = _power(head_dim)
        queries = self.tokens * self.heads // self.kv_heads
        # Float32's tiles are twice as large, and its products take more registers.
        exact = self.query.dtype == torch.float32
        rows = min(_half(QUERIES) if exact else QUERIES, _power(queries))
        kernels.attend_kernel[(tiles(queries, rows), self.batch * self.kv_heads, self.parts)](
            self.query,
            self.keys[layer],
            self.values[layer],
            self.suffix_sees,
            self.lengths,
            self.of_parts,
            self.weights,
            count,
            self.tokens,
            self.suffix_keys,
            self.heads,
            self.kv_heads,
            self.length,
            self.part,
            head_dim**-0.5,
            HEAD=head_dim,
            DIM=dim,
            ROWS=rows,
            KEYS=_half(KEYS) if exact else KEYS,
            PRECISION=precision,
            **ATTENDED,
        )
        kernels.combine_kernel[(count * self.heads,)](
            self.of_parts,
            self.weights,
            self.attended,
            count * self.heads,
            self.parts,
            HEAD=head_dim,
            DIM=dim,
            PARTS=_power(self.parts, 1),
        )
        return self.attended


@dataclass
class _Norm:
    """Scale and shift of a norm, and the gate behind it, as the kernels address them."""

    scale: Tensor | None
    shift: Tensor | None
    gate: Tensor | None
    strides: tuple[int, int]

    @classmethod
    def of(cls, scale: Tensor | None, modulation: Modulation | None) -> _Norm:
        """Return that of a modulation (B or 1, T or 1, W), else of a plain scale (W,)."""
        if modulation is None:
            return cls(scale, None, None, (0, 0))
        batch, tokens, width = modulation[0].shape
        strides = (tokens * width if batch > 1 else 0, width if tokens > 1 else 0)
        return cls(*modulation, strides)


# Before the first layer, and behind the last.
_NONE = _Norm(None, None, None, (0, 0))


class TritonExpert(JoinedExpert):
    """`JoinedExpert` in Triton kernels (ValueError: blocks that these cannot compute)."""

    linear = staticmethod(triton_step.linear)
    advance = staticmethod(triton_step.advance)

    def __init__(
        self,
        blocks: Sequence[BlockProducts],
        suffix_sees: Tensor,
        kernel: Kernel | None = None,
        static_shapes: bool = True,
    ) -> None:
        super().__init__(blocks, suffix_sees, kernel, static_shapes)
        for block in blocks:
            if block.qkv.bias is not None:
                raise ValueError('the Triton kernels take matrices without bias')
        # Of each block, with the weights of an output side by side.
        self._matrices = [
            [
                product.weight.contiguous()
                for product in (block.qkv, block.out, block.gated, block.down)
            ]
            for block in blocks
        ]
        # Float32 without TensorFloat-32's 10 bits.
        exact = blocks[0].qkv.dtype == torch.float32
        self._precision = 'ieee' if exact else 'tf32'
        self._inner = EXACT_INNER if exact else INNER
        self._multiplied = EXACT if exact else MULTIPLIED

    def _allocate(self, self_past: Past | None, cross_past: Past | None) -> None:
        block, suffix_sees = self._blocks[0], self._suffix_sees
        self._self_layers = self._cross_layers = None
        if self_past is not None:
            self._self_layers = _Layers(self_past[0], suffix_sees, block.query_heads)
        if cross_past is not None:
            self._cross_layers = _Layers(cross_past[0], suffix_sees[:, :0], block.query_heads)
        self._attentions = [
            self._cross_layers if block.cross else self._self_layers for block in self._blocks
        ]
        past = self_past or cross_past
        assert past is not None
        like, self._tokens = past[0], len(suffix_sees)
        count = like.shape[1] * self._tokens
        self._count, self._width = count, block.width
        self._rows = min(ROWS, _power(count))
        self._x = torch.empty(like.shape[1], self._tokens, block.width, device=like.device)
        self._normed = like.new_empty(count, block.width)
        self._hidden = like.new_empty(count, block.down.weight.shape[1])
        most = max(tiles(p.weight.shape[1], PART_INPUTS) for p in (block.out, block.down))
        self._parts = torch.empty(most, count, block.width, device=like.device)

    def __call__(self, h: Tensor, modulations: Sequence[Modulation]) -> Tensor:
        with triton_step.device_of(h):
            return self._run_layers(h, modulations)

    def _run_layers(self, h: Tensor, modulations: Sequence[Modulation]) -> Tensor:
        self._x.copy_(h)
        parts, before = 0, _NONE
        for layer, block in enumerate(self._blocks):
            qkv, out, gated, down = self._matrices[layer]
            first, second = modulations[2 * layer : 2 * layer + 2] or (None, None)
            norm = _Norm.of(block.input_scale, first)
            self._add_and_normalise(norm, block.epsilon, parts, before)
            self._project(layer, qkv)
            attended = self._attentions[layer].attend(self._places[layer], self._precision)
            parts, before = self._multiply(attended, out), norm
            norm = _Norm.of(block.post_scale, second)
            self._add_and_normalise(norm, block.epsilon, parts, before)
            self._gate(block, gated)
            parts, before = self._multiply(self._hidden, down), norm
        self._add_and_normalise(_NONE, 0.0, parts, before)
        return self._x

    def _add_and_normalise(self, norm: _Norm, epsilon: float, parts: int, before: _Norm) -> None:
        # What an option leaves out is not read.
        unread, given = self._x, (before.gate, norm.scale, norm.shift)
        kernels.norm_kernel[(self._count,)](
            self._x,
            self._parts,
            *(unread if tensor is None else tensor for tensor in given),
            self._normed,
            self._count,
            self._tokens,
            self._width,
            epsilon,
            *before.strides,
            *norm.strides,
            PARTS=parts,
            GATED=before.gate is not None,
            NORMED=norm.scale is not None,
            SHIFTED=norm.shift is not None,
            WIDTH=_power(self._width),
            **NORMED,
        )

    def _project(self, layer: int, weight: Tensor) -> None:
        block = self._blocks[layer]
        layers, place = self._attentions[layer], self._places[layer]
        half = block.head_dim // 2
        columns = min(HEAD_PAIRS, _power(half))
        projected = len(weight) // block.head_dim
        grid = tiles(self._count, self._rows), projected * tiles(half, columns)
        kernels.project_kernel[grid](
            self._normed,
            weight,
            layers.cosine,
            layers.sine,
            layers.query,
            layers.keys[place],
            layers.values[place],
            self._count,
            self._tokens,
            self._width,
            block.query_heads,
            block.kv_heads,
            layers.length,
            HALF=half,
            **self._tile(columns),
        )

    def _gate(self, block: BlockProducts, weight: Tensor) -> None:
        hidden = self._hidden.shape[1]
        kernels.gated_kernel[tiles(self._count, self._rows), tiles(hidden, GATE_PAIRS)](
            self._normed,
            weight,
            self._hidden,
            self._count,
            self._width,
            hidden,
            GELU=block.gated.activation is gelu_tanh,
            **self._tile(GATE_PAIRS),
        )

    def _multiply(self, operand: Tensor, weight: Tensor) -> int:
        """Multiply (N, inputs) with a matrix; return the number of parts of the result."""
        inputs = operand.shape[1]
        parts = tiles(inputs, PART_INPUTS)
        grid = tiles(self._count, self._rows), tiles(self._width, OUTPUTS), parts
        kernels.product_kernel[grid](
            operand,
            weight,
            self._parts,
            self._count,
            self._width,
            inputs,
            PART_INPUTS,
            **self._tile(OUTPUTS),
        )
        return parts

    def _tile(self, columns: int) -> dict[str, Any]:
        return {
            'ROWS': self._rows,
            'COLUMNS': columns,
            'INNER': self._inner,
            'PRECISION': self._precision,
            **self._multiplied,
        }


def _half(side: int) -> int:
    return max(16, side // 2)


def _power(size: int, least: int = 16) -> int:
    """As `power_of_2`; matrix units take 16 and more."""
    return power_of_2(size, least)
