"""Transformer blocks in fewer and larger operators than the plain modules.

Every operator costs microseconds, and a small policy is hardly more than that. Queries, keys and
values are one product here, gate and up another; rotary positions are one product of complex
numbers; a norm's `1 + weight` is computed once.

Invariants:
- the numbers are those of the plain modules up to rounding;
- the weights are shared: a merged matrix holds them, and the plain layers keep views of it;
- inference only: nothing here has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks import gemma, llama
from vla_runtime.families.blocks.attention import rotary
from vla_runtime.families.blocks.fused_lengths import (
    FirstKeys,
    Kernel,
    Shape,
    pack_valid_keys,
    usable,
)
from vla_runtime.families.blocks.fused_product import GatedProduct, Product
from vla_runtime.families.blocks.gemma import Modulation
from vla_runtime.families.blocks.layers import gelu_tanh, normalise_rms
from vla_runtime.families.blocks.siglip import Siglip, VisionBlock

# Epsilon of every norm of a Gemma block; a Llama block's norms have their own.
EPSILON = 1e-6


def hiding_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Terms added to attention's scores: 0 where `seen` (bool) is True, else minus infinity."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def complex_rotary(positions: Tensor, head_dim: int) -> Tensor:
    """Rotary embedding as complex numbers: (B, T) positions to (B, T, 1, head_dim / 2)."""
    cosine, sine = (
        part[..., : head_dim // 2].transpose(1, 2) for part in rotary(positions, head_dim)
    )
    return torch.complex(cosine, sine)


def pairs_of(heads: Tensor) -> Tensor:
    """View of heads (..., D) as the pairs of numbers that are rotated, (..., D / 2, 2)."""
    return heads.unflatten(-1, (2, heads.shape[-1] // 2)).transpose(-1, -2)


def interleave(heads: Tensor, out: Tensor) -> None:
    """Copy rotated heads (..., D) into `out`, numbers i and i + D/2 of a pair side by side."""
    pairs = pairs_of(heads)
    out.unflatten(-1, pairs.shape[-2:]).copy_(pairs)


def uninterleave(heads: Tensor) -> Tensor:
    """Undo `interleave`: (..., D) in the order of the plain modules."""
    return heads.unflatten(-1, (heads.shape[-1] // 2, 2)).transpose(-1, -2).flatten(-2)


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


class FusedBlock:
    """A block of Gemma or Llama in four products; its rotated queries and keys are interleaved.

    `project` and `combine` are those of a language model, whose norms are plain.

    Args:
        cross: True where another stack gives keys and values: `qkv` gives queries alone.
        packed: form of the weights, as for its products.
        epilogues: the products of `combine` take the residual stream or GELU along, as for
            `Product`.

    Attributes:
        input_scale, post_scale: scales of its norms; None for adaptive ones.
    """

    def __init__(
        self,
        block: gemma.GemmaBlock | llama.LlamaBlock,
        cross: bool = False,
        packed: bool = False,
        epilogues: bool = False,
    ) -> None:
        attention, mlp = block.attention, block.mlp
        self.cross = cross
        self.width = attention.q.in_features
        self.head_dim = attention.head_dim
        projections = [attention.q] if cross else [attention.q, attention.k, attention.v]
        self.qkv = Product(projections, packed)
        self._widths = [
            attention.q.out_features + attention.k.out_features,
            attention.v.out_features,
        ]
        self.query_heads = attention.q.out_features // self.head_dim
        self.kv_heads = attention.k.out_features // self.head_dim
        self.out = Product([attention.out], packed, epilogue=epilogues)
        self.gated = GatedProduct(mlp, packed, epilogues)
        self.down = Product([mlp.down], packed, epilogue=epilogues)
        self.input_scale, self.post_scale = (
            norm_scale(norm) for norm in (block.input_norm, block.post_norm)
        )
        self.epsilon = norm_epsilon(block.input_norm)

    def in_float32(self) -> FusedBlock:
        wide = copy(self)
        for name in ('qkv', 'out', 'gated', 'down'):
            setattr(wide, name, getattr(self, name).in_float32())
        return wide

    def usable(
        self, kernel: Kernel, queries: int, keys: int, folded: bool = False
    ) -> Kernel | None:
        """Return the kernel if it can attend here, else None; `folded`: as `Shape.folded`."""
        shape = Shape(queries, keys, self.query_heads, self.kv_heads, self.head_dim)
        device = self.qkv.weight.device
        return usable(kernel, device, self.qkv.dtype, shape.folded if folded else shape)

    def project(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, heads, T, D), keys and values (B, kv_heads, T, D) of (B, T, W)."""
        batch, tokens, _ = x.shape
        half = self.head_dim // 2
        projected = self.qkv(normalise(x, self.input_scale, None, self.epsilon))
        turning, values = projected.split(self._widths, dim=-1)
        first, second = turning.float().view(batch, tokens, -1, 2, half).unbind(3)
        turned = torch.view_as_real(torch.complex(first, second).mul_(rotation))
        turned = turned.view(batch, tokens, -1, self.head_dim).to(projected.dtype).transpose(1, 2)
        v = values.view(batch, tokens, -1, self.head_dim).transpose(1, 2)
        return turned[:, : self.query_heads], turned[:, self.query_heads :], v

    def combine(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add attention (B, T, heads * D) and MLP to (B, T, W) float32, which may change."""
        x = self.out.add_to(x, attended)
        h = normalise(x, self.post_scale, None, self.epsilon)
        return self.down.add_to(x, self.gated(h))


class FusedVision(nn.Module):
    """A vision encoder with one product for queries, keys and values."""

    def __init__(self, plain: Siglip) -> None:
        super().__init__()
        self._plain = plain
        self._blocks = [
            FusedVisionBlock(block)  # type: ignore[arg-type]
            for block in plain.blocks
        ]

    def forward(self, pixels: Tensor) -> Tensor:
        x = self._plain.patch_embedding(pixels) + self._plain.positions()
        for block in self._blocks:
            x = block(x)
        return self._plain.project(self._plain.norm(x))


class FusedVisionBlock:
    """A block of the vision encoder, which shares the plain block's weights."""

    def __init__(self, plain: VisionBlock) -> None:
        attention = plain.attention
        self._plain = plain
        self._heads = attention.num_heads
        qkv, out = [attention.q, attention.k, attention.v], [attention.out]
        self._qkv, self._out, self._fc2 = (
            Product(layers, packed=True, inputs_first=False)
            for layers in (qkv, out, [plain.mlp.fc2])
        )
        self._fc1 = Product([plain.mlp.fc1], packed=True, inputs_first=False, epilogue=True)

    def __call__(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        plain = self._plain
        projected = self._qkv(plain.norm1(x)).view(n, tokens, 3, self._heads, -1)
        q, k, v = (part.transpose(1, 2) for part in projected.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self._out(attended.transpose(1, 2).reshape(n, tokens, width))
        return x + self._fc2(self._fc1(plain.norm2(x), gelu_tanh))


def norm_scale(norm: nn.Module) -> Tensor | None:
    """Scale of a plain RMSNorm, (W,) float32, Gemma's with its one; None for an adaptive one."""
    if isinstance(norm, gemma.RMSNorm):
        return 1.0 + norm.weight.detach().float()
    return norm.weight.detach().float() if isinstance(norm, llama.RMSNorm) else None


def norm_epsilon(norm: nn.Module) -> float:
    """Epsilon of an RMSNorm of Gemma or Llama."""
    return norm.epsilon if isinstance(norm, llama.RMSNorm) else EPSILON


def normalise(
    x: Tensor,
    scale: Tensor | None,
    modulation: Modulation | None,
    epsilon: float = EPSILON,
    out: Tensor | None = None,
) -> Tensor:
    """RMSNorm of (B, T, W) in float32, by scale (W,) or modulation; `out` has its own dtype."""
    if norms_at_once(x):
        found = normalise_rms(x, None if modulation else scale, epsilon)
    else:
        # `vector_norm` rounds twice more, for a whole row alike.
        inverse = x.square().mean(dim=-1, keepdim=True).add_(epsilon).rsqrt_()
        found = x * inverse
        if modulation is None:
            assert scale is not None
            found.mul_(scale)
    if modulation is not None:
        return torch.addcmul(modulation[1], found, modulation[0], out=out)
    return found if out is None else out.copy_(found)


def norms_at_once(x: Tensor) -> bool:
    """Return whether `normalise_rms` is faster than its operators one by one, as on a GPU."""
    return x.is_cuda


def encode_stack(
    blocks: Sequence[FusedBlock],
    x: Tensor,
    mask: Tensor,
    used: Tensor | None,
    attention_mask: Callable[[Tensor], Tensor] = lambda mask: mask[:, None],
    kernel: Kernel | None = None,
    static_shapes: bool = False,
) -> tuple[Tensor, Tensor]:
    """Keys (rotated) and values of every layer, (layers, B, kv_heads, P, D) each.

    Args:
        x: (B, P, W); mask: (B, P) bool, valid tokens.
        used: tokens as `used_tokens` gives them; keys and values of others are zero. None: all.
        sight: the mask to what each token sees, (B, P or 1, P) bool; by default all valid ones.
        kernel: attends without a mask, as `fused_lengths.flash`; for the default sight alone.
        static_shapes: the numbers of a mask change no operator.
    """
    if used is not None:
        keys, values = encode_stack(blocks, x[:, used], mask[:, used], None, attention_mask)
        return _spread(keys, used, x.shape[1]), _spread(values, used, x.shape[1])
    positions = mask.cumsum(dim=1) - 1
    if kernel is not None:
        places = pack_valid_keys(mask)
        x = torch.empty_like(x).scatter_(1, places[..., None].expand_as(x), x)
        positions = torch.empty_like(positions).scatter_(1, places, positions)
        attend = _by_length(kernel, mask)
    else:
        first = blocks[0]
        heads = first.query_heads, first.kv_heads
        hidden = heads_mask(attention_mask(mask), *heads, first.qkv.dtype, static_shapes)
        attend = partial(attend_heads, mask=hidden)
    rotation = complex_rotary(positions, blocks[0].head_dim)
    of_layers = []
    for block in blocks[:-1]:
        q, k, v = block.project(x, rotation)
        x = block.combine(x, attend(q, k, v))
        of_layers.append((k, v))
    # All that is needed of the last layer; its queries cost little beside a product of their own.
    _, k, v = blocks[-1].project(x, rotation)
    keys, values = map(torch.stack, zip(*of_layers, (k, v), strict=True))
    if kernel is not None:
        # Back to where the tokens were.
        index = places[None, :, None, :, None]
        keys, values = (heads.take_along_dim(index, dim=3) for heads in (keys, values))
    return uninterleave(keys), values


def _by_length(kernel: Kernel, mask: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention as `attend_heads`, to as many first keys of a row as it has valid tokens (B, P)."""
    rows, tokens = mask.shape
    first_keys = FirstKeys(kernel, rows, tokens, tokens, mask.device)
    first_keys.lengths.copy_(mask.sum(dim=1))

    def attend(*heads: Tensor) -> Tensor:
        attended = first_keys(*(tensor.transpose(1, 2).flatten(0, 1) for tensor in heads))
        return attended.view(rows, tokens, -1)

    return attend


def used_tokens(mask: Tensor) -> Tensor | None:
    """Places of the tokens that are valid in a row of (B, P); None if all of them are."""
    used = mask.any(dim=0)
    return None if used.all() else used.nonzero().squeeze(1)


def _spread(heads: Tensor, used: Tensor, tokens: int) -> Tensor:
    """(..., tokens in use, D) to (..., tokens, D); zero elsewhere."""
    whole = heads.new_zeros(*heads.shape[:-2], tokens, heads.shape[-1])
    return whole.index_copy_(-2, used, heads)
