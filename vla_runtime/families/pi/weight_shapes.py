"""Names and shapes of a network's tensors, counted from its dimensions without PyTorch.

A bundle's weights are checked against them, also on a machine without PyTorch. Tests compare them
with the state dicts of the networks, order included.
"""

from __future__ import annotations

from vla_runtime.families.blocks.dimensions import DecoderDims
from vla_runtime.families.blocks.shapes import (
    Named,
    Shape,
    attention_shapes,
    gated_mlp_shapes,
    linear_shapes,
    under,
    vision_shapes,
)
from vla_runtime.families.pi.dimensions import PiDims


def pi05_shapes(dims: PiDims) -> dict[str, Shape]:
    """Tensors of a pi0.5 network."""
    width = dims.expert.width
    return {
        **dict(_shared(dims, adaptive=True)),
        **dict(linear_shapes('time_in', width, width)),
        **dict(linear_shapes('time_out', width, width)),
    }


def pi0_shapes(dims: PiDims) -> dict[str, Shape]:
    """Tensors of a pi0 network."""
    width = dims.expert.width
    return {
        **dict(_shared(dims, adaptive=False)),
        **dict(linear_shapes('state_projection', dims.state_dim, width)),
        **dict(linear_shapes('action_time_in', 2 * width, width)),
        **dict(linear_shapes('action_time_out', width, width)),
    }


def _shared(dims: PiDims, adaptive: bool) -> Named:
    width = dims.expert.width
    yield from under('vision', vision_shapes(dims.vision))
    yield from linear_shapes('vision.projector', dims.vision.width, dims.language.width)
    yield 'language.embedding.weight', (dims.vocabulary, dims.language.width)
    yield from under('language', _gemma(dims.language, adaptive=False))
    yield from under('expert', _gemma(dims.expert, adaptive=adaptive))
    yield from linear_shapes('action_in', dims.action_dim, width)
    yield from linear_shapes('action_out', width, dims.action_dim)


def _gemma(dims: DecoderDims, adaptive: bool) -> Named:
    for block in range(dims.depth):
        yield from under(f'blocks.{block}', _gemma_block(dims, adaptive))
    yield from _rms_norm('norm', dims.width, adaptive)


def _gemma_block(dims: DecoderDims, adaptive: bool) -> Named:
    yield from _rms_norm('input_norm', dims.width, adaptive)
    yield from attention_shapes(dims)
    yield from _rms_norm('post_norm', dims.width, adaptive)
    yield from gated_mlp_shapes(dims)


def _rms_norm(name: str, width: int, adaptive: bool) -> Named:
    if adaptive:
        yield from linear_shapes(f'{name}.modulation', width, 3 * width)
    else:
        yield f'{name}.weight', (width,)
