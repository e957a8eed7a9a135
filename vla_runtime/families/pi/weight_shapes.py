"""Names and shapes of a network's tensors, counted from its dimensions without PyTorch.

A bundle's weights are compared with them, on a machine that only serves engines too. Tests hold
them to the state dicts of the networks, order included.
"""

from __future__ import annotations

from vla_runtime.families.blocks.dimensions import GemmaDims
from vla_runtime.families.blocks.shapes import Named, Shape, linear_shapes, under, vision_shapes
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
    yield from under('vision', vision_shapes(dims.vision, dims.language.width))
    yield 'language.embedding.weight', (dims.vocabulary, dims.language.width)
    yield from under('language', _gemma(dims.language, adaptive=False))
    yield from under('expert', _gemma(dims.expert, adaptive=adaptive))
    yield from linear_shapes('action_in', dims.action_dim, width)
    yield from linear_shapes('action_out', width, dims.action_dim)


def _gemma(dims: GemmaDims, adaptive: bool) -> Named:
    for block in range(dims.depth):
        yield from under(f'blocks.{block}', _gemma_block(dims, adaptive))
    yield from _rms_norm('norm', dims.width, adaptive)


def _gemma_block(dims: GemmaDims, adaptive: bool) -> Named:
    width, head_dim = dims.width, dims.head_dim
    yield from _rms_norm('input_norm', width, adaptive)
    yield 'attention.q.weight', (dims.num_heads * head_dim, width)
    yield 'attention.k.weight', (dims.num_kv_heads * head_dim, width)
    yield 'attention.v.weight', (dims.num_kv_heads * head_dim, width)
    yield 'attention.out.weight', (width, dims.num_heads * head_dim)
    yield from _rms_norm('post_norm', width, adaptive)
    yield 'mlp.gate.weight', (dims.mlp_dim, width)
    yield 'mlp.up.weight', (dims.mlp_dim, width)
    yield 'mlp.down.weight', (width, dims.mlp_dim)


def _rms_norm(name: str, width: int, adaptive: bool) -> Named:
    if adaptive:
        yield from linear_shapes(f'{name}.modulation', width, 3 * width)
    else:
        yield f'{name}.weight', (width,)
