"""Names and shapes of a network's tensors, counted from its dimensions without PyTorch."""

from __future__ import annotations

from collections.abc import Container

from vla_runtime.families.blocks.dimensions import DecoderDims
from vla_runtime.families.blocks.shapes import (
    Named,
    Shape,
    decoder_block_shapes,
    linear_shapes,
    under,
    vision_shapes,
)
from vla_runtime.families.smolvla.dimensions import SmolVlaDims


def weight_shapes(dims: SmolVlaDims) -> dict[str, Shape]:
    """Tensors of a SmolVLA network, in the order of its state dict."""
    width, language = dims.expert.width, dims.language
    memory = language.num_kv_heads * language.head_dim
    shuffled = dims.vision.width * dims.pixel_shuffle**2
    return {
        **dict(under('vision', vision_shapes(dims.vision))),
        'vision.projector.weight': (language.width, shuffled),
        'language.embedding.weight': (dims.vocabulary, language.width),
        **dict(under('language', _llama(language, (), memory))),
        **dict(under('expert', _llama(dims.expert, dims.cross_layers, memory))),
        **dict(linear_shapes('action_in', dims.action_dim, width)),
        **dict(linear_shapes('action_out', width, dims.action_dim)),
        **dict(linear_shapes('state_projection', dims.state_dim, language.width)),
        **dict(linear_shapes('action_time_in', 2 * width, width)),
        **dict(linear_shapes('action_time_out', width, width)),
    }


def _llama(dims: DecoderDims, cross: Container[int], memory: int) -> Named:
    for block in range(dims.depth):
        read = memory if block in cross else None
        yield from under(f'blocks.{block}', decoder_block_shapes(dims, read))
    yield 'norm.weight', (dims.width,)
