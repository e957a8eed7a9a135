"""Language models and experts: lists of the transformer's options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn import functional as F

from vla_runtime.family.dimensions import DecoderDims
from vla_runtime.models.blocks.layers import Activation, AdaptiveNorm, RmsNorm, gelu_tanh
from vla_runtime.models.blocks.products import FEW, MANY
from vla_runtime.models.blocks.transformer import Attention, Block, GatedMlp, Stack


def gemma(dims: DecoderDims, vocabulary: int = 0, *, adaptive: bool = False) -> Stack:
    """Gemma (arXiv 2403.08295), an expert without a vocabulary.

    With `adaptive` the flow time modulates the norms.
    """

    def norm() -> nn.Module:
        return AdaptiveNorm(dims.width) if adaptive else RmsNorm(dims.width, offset=1.0)

    def block(layer: int) -> Block:
        return _block(dims, norm, gelu_tanh, bool(vocabulary))

    scale = dims.width**0.5
    return Stack(dims, block, norm, vocabulary=vocabulary, embedding_scale=scale)


def llama(
    dims: DecoderDims,
    epsilon: float,
    vocabulary: int = 0,
    *,
    cross: Sequence[int] = (),
    memory_width: int | None = None,
    bias: bool = False,
) -> Stack:
    """Llama (arXiv 2302.13971), and Qwen2 (arXiv 2407.10671) with `bias`.

    The layers `cross` attend to keys and values of another stack's tokens, `memory_width` wide.
    """

    def norm() -> nn.Module:
        return RmsNorm(dims.width, epsilon)

    def block(layer: int) -> Block:
        memory = memory_width if layer in cross else None
        return _block(dims, norm, F.silu, bool(vocabulary), bias=bias, memory_width=memory)

    return Stack(dims, block, norm, vocabulary=vocabulary)


def qwen3(dims: DecoderDims, epsilon: float, vocabulary: int, *, final_norm: bool = True) -> Stack:
    """Qwen3 (arXiv 2505.09388): norms on query and key heads, which carry the scores' scale."""

    def norm() -> nn.Module:
        return RmsNorm(dims.width, epsilon)

    def block(layer: int) -> Block:
        return _block(dims, norm, F.silu, True, head_epsilon=epsilon)

    return Stack(dims, block, norm if final_norm else nn.Identity, vocabulary=vocabulary)


def _block(
    dims: DecoderDims,
    norm: Callable[[], nn.Module],
    activation: Activation,
    reads_text: bool,
    *,
    bias: bool = False,
    **options: Any,
) -> Block:
    """Pre-norm block with a gated MLP; `options` are those of `Attention`."""
    return Block(
        norm,
        lambda: Attention(
            dims.width,
            dims.num_heads,
            kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            bias=bias,
            out_bias=False,
            **options,
        ),
        lambda: GatedMlp(dims.width, dims.mlp_dim, activation),
        names=('input_norm', 'post_norm'),
        way=MANY if reads_text else FEW,
    )
