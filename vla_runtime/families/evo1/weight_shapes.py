"""Names and shapes of a network's tensors, counted from its dimensions without PyTorch."""

from __future__ import annotations

from vla_runtime.families.blocks.dimensions import DecoderDims, VisionDims
from vla_runtime.families.blocks.shapes import (
    Named,
    Shape,
    decoder_block_shapes,
    layer_norm_shapes,
    linear_shapes,
    under,
    vision_block_shapes,
)
from vla_runtime.families.evo1.dimensions import Evo1Dims
from vla_runtime.families.evo1.time_table import ROWS, TABLE


def weight_shapes(dims: Evo1Dims) -> dict[str, Shape]:
    """Tensors of an Evo-1 network, in the order of its state dict."""
    width, head = dims.language.width, dims.head
    chunk = dims.horizon * dims.action_dim
    return {
        'action_positions': (1, dims.horizon, width),
        TABLE: (1, ROWS, width),
        **dict(under('vision', _vision(dims.vision))),
        **dict(under('vision', _projector(dims))),
        'language.embedding.weight': (dims.vocabulary, width),
        **dict(under('language', _language(dims.language))),
        **dict(_projection(dims, 'state_encoder.fc1', dims.state_dim, head.state_hidden)),
        **dict(_projection(dims, 'state_encoder.fc2', head.state_hidden, width)),
        **dict(_projection(dims, 'action_encoder.fc1', dims.action_dim, width)),
        **dict(_projection(dims, 'action_encoder.fc2', width, width)),
        **dict(_projection(dims, 'action_encoder.fc3', width, width)),
        **dict(_head(dims)),
        **dict(layer_norm_shapes('norm', width)),
        **dict(linear_shapes('pool', dims.horizon * width, width)),
        **dict(_projection(dims, 'velocity_head.fc1', width, head.velocity_hidden)),
        **dict(_projection(dims, 'velocity_head.fc2', head.velocity_hidden, chunk)),
    }


def _vision(dims: VisionDims) -> Named:
    width, patch = dims.width, dims.patch_size
    yield 'class_token', (1, 1, width)
    yield 'position_embedding', (1, 1 + dims.tokens, width)
    yield 'patch_embedding.weight', (width, 3, patch, patch)
    yield 'patch_embedding.bias', (width,)
    for block in range(dims.depth):
        yield f'blocks.{block}.scale1', (width,)
        yield f'blocks.{block}.scale2', (width,)
        yield from under(f'blocks.{block}', vision_block_shapes(dims))


def _projector(dims: Evo1Dims) -> Named:
    wide = dims.vision.width * dims.pixel_shuffle**2
    yield from layer_norm_shapes('projector.norm', wide)
    yield from linear_shapes('projector.fc1', wide, dims.language.width)
    yield from linear_shapes('projector.fc2', dims.language.width, dims.language.width)


def _language(dims: DecoderDims) -> Named:
    for block in range(dims.depth):
        yield from under(f'blocks.{block}', decoder_block_shapes(dims, bias=True))
    yield 'norm.weight', (dims.width,)


def _head(dims: Evo1Dims) -> Named:
    width = dims.language.width
    for block in range(dims.head.depth):
        name = f'blocks.{block}'
        yield from layer_norm_shapes(f'{name}.norm1', width)
        for part in ('q', 'k', 'v', 'out'):
            yield from linear_shapes(f'{name}.attention.{part}', width, width)
        yield from layer_norm_shapes(f'{name}.norm2', width)
        yield from linear_shapes(f'{name}.mlp.fc1', width, dims.head.mlp_dim)
        yield from linear_shapes(f'{name}.mlp.fc2', dims.head.mlp_dim, width)


def _projection(dims: Evo1Dims, name: str, inputs: int, outputs: int) -> Named:
    """Tensors of `networks.Projection`."""
    yield f'{name}.weight', (inputs, outputs) if dims.input_major else (outputs, inputs)
    yield f'{name}.bias', (outputs,)
