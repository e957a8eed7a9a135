"""One transformer: towers, language models, encoders, DiTs and experts are lists of its options.

A block is an attention and an MLP, each behind a norm and added to a residual stream, (B, T, W)
float32. Its layers compute by themselves where gradients are recorded and where a network is
exported; after `join` those that read the same numbers are one product, for inference alone.

Shapes: B rows, T tokens, W width, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from vla_runtime.family.dimensions import DecoderDims
from vla_runtime.models.blocks.attention import Rotary, SplitHeads, attend, rotate
from vla_runtime.models.blocks.layers import (
    Activation,
    AdaptiveNorm,
    Linear,
    Modulation,
    QueryLinear,
    QueryNorm,
    RmsNorm,
    joined,
)
from vla_runtime.models.blocks.products import MANY, GatedProduct, Product, Way

# Keys and values that queries attend to, (B, kv_heads, K, D) each.
KeysValues = tuple[Tensor, Tensor]


class Attention(SplitHeads):
    """Grouped-query attention to the tokens themselves, or to keys and values of others.

    Args:
        width: W of the tokens.
        kv_heads: heads of keys and values; None: as many as of queries.
        head_dim: D; None: the heads share the width.
        bias: projections of queries, keys and values have a bias; `out_bias` that of the output.
        head_epsilon: of a norm of every query and key head; None: there are none.
        memory_width: W of the tokens that keys and values are made of; None: of the same.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        out_bias: bool = True,
        head_epsilon: float | None = None,
        memory_width: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.kv_heads = num_heads, kv_heads or num_heads
        self.head_dim = head_dim or width // num_heads
        self.is_cross = memory_width is not None
        queries, keys = num_heads * self.head_dim, self.kv_heads * self.head_dim
        memory = width if memory_width is None else memory_width
        if head_epsilon is None:
            self.q: Linear = QueryLinear(width, queries, self.head_dim, bias=bias)
        else:
            self.q = Linear(width, queries, bias=bias)
        self.k = Linear(memory, keys, bias=bias)
        self.v = Linear(memory, keys, bias=bias)
        self.out = Linear(queries, width, bias=out_bias)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if head_epsilon is not None:
            self.q_norm = QueryNorm(self.head_dim, head_epsilon)
            self.k_norm = RmsNorm(self.head_dim, head_epsilon)
        # Products of `join`: of queries, keys and values, or queries alone, and of the output.
        self.qkv_product: Product | None = None
        self.out_product: Product | None = None

    def join(self, way: Way) -> None:
        layers = [self.q] if self.is_cross else [self.q, self.k, self.v]
        self.qkv_product = Product(layers, way)
        # What takes the residual stream along takes no bias.
        self.out_product = Product([self.out], way, epilogue=self.out.bias is None)

    def rotate(self, x: Tensor, rotation: Rotary) -> Tensor:
        """Rotate queries or keys (B, heads, T, D)."""
        return rotate(x, rotation)

    def project(self, x: Tensor, rotation: Rotary | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, heads, T, D), keys and values (B, kv_heads, T, D) of normed tokens."""
        product = joined(self.qkv_product)
        if product is None:
            joint, parts = None, (self.q(x), self.k(x), self.v(x))
        else:
            joint = product(x)
            heads = self.num_heads, self.kv_heads, self.kv_heads
            parts = joint.split([count * self.head_dim for count in heads], dim=-1)
        if rotation is not None and self.q_norm is None:
            # Queries and keys are rotated together; receipts and TensorRT's fusions know this form.
            joint = self.heads(torch.cat(parts, dim=-1) if joint is None else joint)
            turning, v = joint.split([self.num_heads + self.kv_heads, self.kv_heads], dim=1)
            q, k = self.rotate(turning, rotation).split([self.num_heads, self.kv_heads], dim=1)
            return q, k, v
        v = self.heads(parts[2])
        q, k = self.heads(parts[0], self.q_norm), self.heads(parts[1], self.k_norm)
        if rotation is not None:
            # Behind their norms they are float32.
            q, k = (self.rotate(part, rotation).to(v.dtype) for part in (q, k))
        return q, k, v

    def queries(self, x: Tensor, rotation: Rotary | None = None) -> Tensor:
        """Queries (B, heads, T, D) alone, for keys and values of others."""
        product = joined(self.qkv_product) if self.is_cross else None
        q = self.heads(self.q(x) if product is None else product(x), self.q_norm)
        return q if rotation is None else self.rotate(q, rotation)

    def keys_values(self, x: Tensor, rotation: Rotary | None = None) -> KeysValues:
        """Keys and values alone, of tokens (B, K, W) that others attend to."""
        key, value = self.heads(self.k(x), self.k_norm), self.heads(self.v(x))
        return key if rotation is None else self.rotate(key, rotation), value

    def output(self, attended: Tensor) -> Tensor:
        """(B, T, heads * D) to (B, T, W)."""
        return outputs_of(self.out, self.out_product, attended)

    def add_output(self, stream: Tensor, attended: Tensor) -> Tensor:
        """Add the output to a residual stream, as `added`."""
        return added(stream, self.out, self.out_product, attended)


def outputs_of(layer: Linear, product: Product | None, x: Tensor) -> Tensor:
    """Return a layer's outputs (..., outputs) in the dtype of its matrix, by its product if any."""
    found: Tensor = (joined(product) or layer)(x)
    return found


def added(stream: Tensor, layer: Linear, product: Product | None, x: Tensor) -> Tensor:
    """Add a layer's outputs to a stream (B, T, W) float32, which a product may overwrite."""
    if (product := joined(product)) is None:
        return stream + layer(x).float()
    return product.add_to(stream, x)


class Mlp(nn.Module):
    """Two layers with an activation between them."""

    def __init__(
        self, width: int, hidden: int, activation: Activation, out: int | None = None
    ) -> None:
        super().__init__()
        self.fc1 = Linear(width, hidden)
        self.fc2 = Linear(hidden, width if out is None else out)
        self.activation = activation
        self._products: tuple[Product | None, Product | None] = None, None

    def join(self, way: Way) -> None:
        self._products = Product([self.fc1], way, epilogue=True), Product([self.fc2], way)

    def hidden(self, x: Tensor) -> Tensor:
        if (product := joined(self._products[0])) is None:
            return self.activation(self.fc1(x))
        found: Tensor = product(x, self.activation)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return outputs_of(self.fc2, self._products[1], self.hidden(x))

    def add_output(self, stream: Tensor, x: Tensor) -> Tensor:
        """As `Attention.add_output`, of normed tokens (B, T, W)."""
        return added(stream, self.fc2, self._products[1], self.hidden(x))


class GatedMlp(nn.Module):
    """An MLP whose hidden numbers are gated through an activation (arXiv 2002.05202)."""

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: Activation,
        out: int | None = None,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate = Linear(width, hidden, bias=bias)
        self.up = Linear(width, hidden, bias=bias)
        self.down = Linear(hidden, width if out is None else out, bias=bias)
        self.activation = activation
        self.gated_product: GatedProduct | None = None
        self.down_product: Product | None = None

    def join(self, way: Way) -> None:
        if self.gate.bias is None:
            self.gated_product = GatedProduct(self.gate, self.up, self.activation, way)
        # What takes the residual stream along takes no bias.
        self.down_product = Product([self.down], way, epilogue=self.down.bias is None)

    def hidden(self, x: Tensor) -> Tensor:
        if (gated := joined(self.gated_product)) is None:
            return self.activation(self.gate(x)) * self.up(x)
        found: Tensor = gated(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return outputs_of(self.down, self.down_product, self.hidden(x))

    def add_output(self, stream: Tensor, x: Tensor) -> Tensor:
        """As `Attention.add_output`, of normed tokens (B, T, W)."""
        return added(stream, self.down, self.down_product, self.hidden(x))


class Block(nn.Module):
    """An attention and an MLP, each behind a norm, on a residual stream (B, T, W) float32.

    In code the norms are `first_norm`, before the attention, and `second_norm`, before the MLP. In
    the state dict, and so in bundles, they have the names of the published policy: `norm1` and
    `norm2`, or `input_norm` and `post_norm`, as `names` says.

    Args:
        norms: makes the norm before the attention, and that before the MLP.
        names: of the norms in the state dict.
        scaled: width of learned scales of the branches (LayerScale, arXiv 2103.17239); 0 for none.
        way: how the products of a joined block compute.
    """

    def __init__(
        self,
        norms: Callable[[], nn.Module],
        attention: Callable[[], Attention],
        mlp: Callable[[], nn.Module],
        *,
        names: tuple[str, str] = ('norm1', 'norm2'),
        scaled: int = 0,
        way: Way = MANY,
    ) -> None:
        super().__init__()
        self.way, self._names = way, names
        self.scale1: nn.Parameter | None = nn.Parameter(torch.ones(scaled)) if scaled else None
        self.scale2: nn.Parameter | None = nn.Parameter(torch.ones(scaled)) if scaled else None
        self.add_module(names[0], norms())
        self.attention = attention()
        self.add_module(names[1], norms())
        self.mlp: Any = mlp()

    @property
    def first_norm(self) -> Any:
        return getattr(self, self._names[0])

    @property
    def second_norm(self) -> Any:
        return getattr(self, self._names[1])

    def join(self) -> None:
        """Join the products, once; the layers' weights become views of what they are joined in."""
        for part in (self.attention, self.mlp):
            part.join(self.way)
        for norm in (self.first_norm, self.second_norm):
            if isinstance(norm, (RmsNorm, AdaptiveNorm)):
                norm.join()

    def project(
        self, x: Tensor, rotation: Rotary | None, modulation: Modulation | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the residual stream, as of `Attention.project`."""
        return self.attention.project(self.first_norm(x, modulation), rotation)

    def combine(
        self,
        x: Tensor,
        attended: Tensor,
        first: Modulation | None = None,
        second: Modulation | None = None,
    ) -> Tensor:
        """Add the attention's output (B, T, heads * D) and the MLP to the residual stream.

        A joined block may overwrite the stream.
        """
        attention, mlp = self.attention, self.mlp
        x = _residual(x, attention.output, attention.add_output, attended, self.scale1, first)
        h = self.second_norm(x, second)
        return _residual(x, mlp, mlp.add_output, h, self.scale2, second)

    def forward(
        self,
        x: Tensor,
        seen: Tensor | None = None,
        rotation: Rotary | None = None,
        memory: KeysValues | None = None,
        first: Modulation | None = None,
        second: Modulation | None = None,
    ) -> Tensor:
        """Run the block over x (B, T, W) float32, which a joined one may overwrite.

        Args:
            seen: (B or 1, T or 1, K) bool, True where a token sees another; None: everywhere.
            rotation: positions that queries and keys are rotated by.
            memory: keys and values of others; None: of x itself.
            first, second: modulations of the norms before attention and MLP.
        """
        if memory is None:
            q, key, value = self.project(x, rotation, first)
        else:
            q = self.attention.queries(self.first_norm(x, first), rotation)
            key, value = memory
        return self.combine(x, attend(q, key, value, seen), first, second)


def _residual(
    stream: Tensor,
    output: Callable[[Tensor], Tensor],
    add_output: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    scale: Tensor | None,
    modulation: Modulation | None,
) -> Tensor:
    """Add a branch's outputs of x to the stream, through its learned scale and gate if any."""
    gate = None if modulation is None else modulation[2]
    if scale is None and gate is None:
        return add_output(stream, x)
    y = output(x).float()
    y = y if scale is None else scale * y
    return stream + (y if gate is None else y * gate)


class Stack(nn.Module):
    """Blocks with a final norm, and a text table of `vocabulary` rows, 0 for none.

    `embedding_scale` multiplies what is looked up.
    """

    def __init__(
        self,
        dims: DecoderDims,
        block: Callable[[int], Block],
        norm: Callable[[], nn.Module],
        *,
        vocabulary: int = 0,
        embedding_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.embedding_scale = embedding_scale
        if vocabulary:
            self.embedding = nn.Embedding(vocabulary, dims.width)
        self.blocks = nn.ModuleList(block(layer) for layer in range(dims.depth))
        self.norm: Any = norm()

    @property
    def layers(self) -> list[Block]:
        return [cast(Block, block) for block in self.blocks]

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, L) token ids to (B, L, W) float32."""
        embedded = self.embedding(tokens).float()
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale

    def join(self) -> None:
        if isinstance(self.norm, (RmsNorm, AdaptiveNorm)):
            self.norm.join()

    def features(
        self, x: Tensor, rotation: Rotary | None, seen: Tensor, between: Sequence[Tensor] = ()
    ) -> Tensor:
        """Run all blocks, without the final norm.

        `between` is added behind the first blocks, one each, (B, T, W), but not behind the last.
        """
        last = len(self.layers) - 1
        for index, block in enumerate(self.layers):
            x = block(x, seen, rotation)
            if index < min(len(between), last):
                x = x + between[index]
        return x

    def keys_values(
        self, x: Tensor, rotation: Rotary, seen: Tensor
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Rotated keys and values of every layer, (B, kv_heads, T, D) each."""
        found = []
        for block in self.layers[:-1]:
            q, key, value = block.project(x, rotation)
            x = block.combine(x, attend(q, key, value, seen))
            found.append((key, value))
        # All that is needed of the last layer.
        last = self.layers[-1]
        found.append(last.attention.keys_values(last.first_norm(x), rotation))
        keys, values = zip(*found, strict=True)
        return keys, values
