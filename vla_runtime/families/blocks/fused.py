"""Transformer blocks in fewer and larger operators than the plain modules.

Every operator costs microseconds before it computes, and a small policy on a CPU, or any on a fast
GPU, is hardly more than that. Queries, keys and values are one product here, and so are gate and
up; rotary positions are one product of complex numbers; a norm's `1 + weight` is computed once.

Invariants:
- the numbers are those of the plain modules up to rounding; the tests hold both to the same cases;
- the weights are shared: a merged matrix holds them, and the plain layers keep views of it;
- inference only: nothing here has a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.blocks.attention import rotary
from vla_runtime.families.blocks.gemma import Gemma, GemmaBlock, RMSNorm
from vla_runtime.families.blocks.siglip import VisionBlock, VisionEncoder

# Epsilon of every norm of a Gemma block.
EPSILON = 1e-6
# Scale (one is added already), shift and gate of an adaptive norm.
Modulation = tuple[Tensor, Tensor, Tensor]


class Product:
    """One matrix product for several linear layers with the same input.

    Args:
        layers: whose outputs follow one another; all have a bias, or none has. Their weights
            become views of the merged matrix.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.weight = _merge(layers, 'weight')
        self.bias = _merge(layers, 'bias') if layers[0].bias is not None else None
        self._transposed = self.weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs), in the dtype of the weights."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def into(self, x: Tensor, out: Tensor) -> None:
        """(N, inputs) to (N, outputs) of layers without bias, all in the dtype of the weights."""
        torch.mm(x, self._transposed, out=out)


def _merge(layers: Sequence[nn.Linear], name: str) -> nn.Parameter:
    merged = torch.cat([getattr(layer, name).data for layer in layers])
    if merged.dim() == 2 and merged.dtype == torch.float32:
        # Inputs first in memory: a product with few tokens takes a fifth less time.
        merged = merged.t().contiguous().t()
    parts = merged.split([len(getattr(layer, name)) for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        setattr(layer, name, nn.Parameter(part, requires_grad=False))
    if merged.is_cuda:
        # No merged matrix fits where the single ones were. Kept, they would double the memory.
        torch.cuda.empty_cache()
    return nn.Parameter(merged, requires_grad=False)


def hiding_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Terms added to attention's scores: 0 where `seen` (bool) is True, else minus infinity."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def complex_rotary(positions: Tensor, head_dim: int) -> Tensor:
    """Rotary embedding as complex numbers: (B, T) positions to (B, T, 1, head_dim / 2)."""
    cosine, sine = (
        part[..., : head_dim // 2].transpose(1, 2) for part in rotary(positions, head_dim)
    )
    return torch.complex(cosine, sine)


def interleave(heads: Tensor, out: Tensor) -> None:
    """Copy rotated heads (..., D) into `out`, each pair of rotated numbers side by side.

    Rotation pairs number i with number i + D/2. As complex numbers the two stand side by side, and
    queries and keys whose numbers are in the same order have the same scores.
    """
    half = heads.shape[-1] // 2
    out.unflatten(-1, (half, 2)).copy_(heads.unflatten(-1, (2, half)).transpose(-1, -2))


def uninterleave(heads: Tensor) -> Tensor:
    """Undo `interleave`: (..., D) in the order of the plain modules."""
    return heads.unflatten(-1, (heads.shape[-1] // 2, 2)).transpose(-1, -2).flatten(-2)


def attend_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention.

    Args:
        q: (B, heads, T, D); k, v: (B, kv_heads, K, D).
        mask: (B, 1, T or 1, K), added to the scores.

    Returns:
        (B, T, heads * D)
    """
    batch, heads, tokens, head_dim = q.shape
    if k.shape[1] == 1:
        k, v = k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
    elif k.shape[1] != heads:
        group = heads // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return attended.transpose(1, 2).reshape(batch, tokens, heads * head_dim)


class FusedBlock:
    """A Gemma block in four products; its rotated queries and keys are interleaved.

    `project` and `combine` are those of a language model, whose norms are plain.

    Args:
        block: plain.

    Attributes:
        width: W.
        query_heads, head_dim: of the attention.
        qkv, out, gate_up, down: its products.
        input_scale, post_scale: `1 + weight` of its norms; None for adaptive ones.
    """

    def __init__(self, block: GemmaBlock) -> None:
        attention, mlp = block.attention, block.mlp
        self.width = attention.q.in_features
        self.head_dim = attention.head_dim
        self.qkv = Product([attention.q, attention.k, attention.v])
        self._widths = [
            attention.q.out_features + attention.k.out_features,
            attention.v.out_features,
        ]
        self.query_heads = attention.q.out_features // self.head_dim
        self.out = Product([attention.out])
        self.gate_up = Product([mlp.gate, mlp.up])
        self.down = Product([mlp.down])
        self.input_scale, self.post_scale = (
            norm_scale(norm) for norm in (block.input_norm, block.post_norm)
        )

    def project(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, heads, T, D), keys and values (B, kv_heads, T, D) of (B, T, W)."""
        batch, tokens, _ = x.shape
        half = self.head_dim // 2
        projected = self.qkv(normalise(x, self.input_scale, None))
        turning, values = projected.split(self._widths, dim=-1)
        first, second = turning.float().view(batch, tokens, -1, 2, half).unbind(3)
        turned = torch.view_as_real(torch.complex(first, second).mul_(rotation))
        turned = turned.view(batch, tokens, -1, self.head_dim).to(projected.dtype).transpose(1, 2)
        v = values.view(batch, tokens, -1, self.head_dim).transpose(1, 2)
        return turned[:, : self.query_heads], turned[:, self.query_heads :], v

    def combine(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add attention (B, T, heads * D) and MLP to (B, T, W) float32."""
        x = x + self.out(attended)
        gate, up = self.gate_up(normalise(x, self.post_scale, None)).chunk(2, dim=-1)
        return x + self.down(F.gelu(gate, approximate='tanh').mul_(up))


class FusedVision(nn.Module):
    """A vision encoder with one product for queries, keys and values."""

    def __init__(self, plain: VisionEncoder) -> None:
        super().__init__()
        self._plain = plain
        self._blocks = [FusedVisionBlock(block) for block in plain.blocks]  # type: ignore[arg-type]

    def forward(self, pixels: Tensor) -> Tensor:
        """As `VisionEncoder.forward`."""
        x = self._plain.patch_embedding(pixels) + self._plain.positions()
        for block in self._blocks:
            x = block(x)
        return self._plain.projector(self._plain.norm(x)).float()


class FusedVisionBlock:
    """A block of the vision encoder."""

    def __init__(self, plain: VisionBlock) -> None:
        attention = plain.attention
        self._plain = plain
        self._heads = attention.num_heads
        self._qkv = Product([attention.q, attention.k, attention.v])
        self._out = Product([attention.out])
        self._fc1, self._fc2 = Product([plain.mlp.fc1]), Product([plain.mlp.fc2])

    def __call__(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        plain = self._plain
        projected = self._qkv(plain.norm1(x)).view(n, tokens, 3, self._heads, -1)
        q, k, v = (part.transpose(1, 2) for part in projected.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self._out(attended.transpose(1, 2).reshape(n, tokens, width))
        return x + self._fc2(F.gelu(self._fc1(plain.norm2(x)), approximate='tanh'))


def norm_scale(norm: nn.Module) -> Tensor | None:
    """`1 + weight` of a plain RMSNorm; None for an adaptive one."""
    return 1.0 + norm.weight.detach().float() if isinstance(norm, RMSNorm) else None


def normalise(x: Tensor, scale: Tensor | None, modulation: Modulation | None) -> Tensor:
    """RMSNorm of (B, T, W) in float32, with its scale or its modulation."""
    # `F.rms_norm` is slower, and `vector_norm` rounds twice more, for a whole row alike.
    inverse = x.square().mean(dim=-1, keepdim=True).add_(EPSILON).rsqrt_()
    if modulation is None:
        assert scale is not None
        return (x * inverse).mul_(scale)
    return torch.addcmul(modulation[1], x * inverse, modulation[0])


def encode_stack(
    stack: Gemma, blocks: Sequence[FusedBlock], x: Tensor, mask: Tensor, used: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Keys (rotated) and values of every layer, (layers, B, kv_heads, P, D) each.

    Args:
        stack: plain.
        blocks: its blocks.
        x: (B, P, W); mask: (B, P) bool, valid tokens.
        used: as `used_tokens`; other tokens are not computed, their keys and values are zero.
            None: all are computed.
    """
    if used is not None:
        keys, values = encode_stack(stack, blocks, x[:, used], mask[:, used], None)
        return _spread(keys, used, x.shape[1]), _spread(values, used, x.shape[1])
    rotation = complex_rotary(mask.long().cumsum(dim=1) - 1, blocks[0].head_dim)
    hidden = hiding_mask(mask, stack.layers[0].attention.q.weight.dtype)[:, None, None]
    of_layers = []
    for block in blocks[:-1]:
        q, k, v = block.project(x, rotation)
        x = block.combine(x, attend_heads(q, k, v, hidden))
        of_layers.append((k, v))
    # All that is needed of the last layer; its queries cost little beside a product of their own.
    _, k, v = blocks[-1].project(x, rotation)
    keys, values = map(torch.stack, zip(*of_layers, (k, v), strict=True))
    return uninterleave(keys), values


def used_tokens(mask: Tensor) -> Tensor | None:
    """Places of the tokens that are valid in a row of (B, P); None if all of them are.

    Padding of a prompt and views that are absent are valid in none. No valid token sees them.
    """
    used = mask.any(dim=0)
    return None if used.all() else used.nonzero().squeeze(1)


def _spread(heads: Tensor, used: Tensor, tokens: int) -> Tensor:
    """(..., tokens in use, D) to (..., tokens, D); zero elsewhere."""
    whole = heads.new_zeros(*heads.shape[:-2], tokens, heads.shape[-1])
    return whole.index_copy_(-2, used, heads)
