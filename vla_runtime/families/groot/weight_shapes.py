"""Names and shapes of a network's tensors, counted from its dimensions without PyTorch."""

from __future__ import annotations

from vla_runtime.families.blocks.dimensions import DecoderDims
from vla_runtime.families.blocks.shapes import (
    Named,
    Shape,
    attention_shapes,
    gated_mlp_shapes,
    layer_norm_shapes,
    linear_shapes,
    under,
    vision_block_shapes,
    vision_shapes,
)
from vla_runtime.families.groot.dimensions import GrootDims, StackDims
from vla_runtime.families.groot.n17_dimensions import FRAMES, GrootN17Dims
from vla_runtime.families.groot.time_table import DIT_CODE

AnyDims = GrootDims | GrootN17Dims


def n15_weight_shapes(dims: GrootDims) -> dict[str, Shape]:
    """Tensors of a GR00T N1.5 network, in the order of its state dict."""
    return {
        **dict(_tables(dims)),
        **dict(under('vision', vision_shapes(dims.vision))),
        **dict(under('vision.connector', _connector(dims))),
        **dict(_language(dims)),
        'language.norm.weight': (dims.language.width,),
        **dict(_head(dims)),
    }


def n17_weight_shapes(dims: GrootN17Dims) -> dict[str, Shape]:
    """Tensors of a GR00T N1.7 network, in the order of its state dict."""
    return {
        **dict(_tables(dims)),
        **dict(under('vision', _qwen_vision(dims))),
        **dict(_language(dims)),
        **dict(_head(dims)),
    }


def _tables(dims: AnyDims) -> Named:
    if dims.future_tokens:
        yield 'future_tokens', (dims.future_tokens, dims.dit_width)
    yield 'positions', (dims.positions, dims.dit_width)


def _language(dims: AnyDims) -> Named:
    yield 'language.embedding.weight', (dims.vocabulary, dims.language.width)
    for block in range(dims.language.depth):
        yield from under(f'language.blocks.{block}', _decoder_block(dims.language))


def _qwen_vision(dims: GrootN17Dims) -> Named:
    vision = dims.vision
    yield 'position_embedding', (vision.positions**2, vision.width)
    patch = (vision.patch_size, vision.patch_size)
    yield 'patch_embedding.weight', (vision.width, 3, FRAMES, *patch)
    yield 'patch_embedding.bias', (vision.width,)
    for block in range(vision.depth):
        yield from under(f'blocks.{block}', vision_block_shapes(vision))
    joined = vision.width * vision.merge**2
    yield from under('merger', _merger(joined, vision.width, dims.language.width))
    for index in range(len(vision.deepstack)):
        yield from under(f'deepstack.{index}', _merger(joined, joined, dims.language.width))


def _merger(joined: int, normalised: int, outputs: int) -> Named:
    yield from layer_norm_shapes('norm', normalised)
    yield from linear_shapes('fc1', joined, joined)
    yield from linear_shapes('fc2', joined, outputs)


def _head(dims: AnyDims) -> Named:
    language, width = dims.language.width, dims.dit_width
    yield from layer_norm_shapes('context_norm', language)
    if dims.context is not None:
        for block in range(dims.context.depth):
            yield from under(f'context.{block}', _context_block(dims.context, language))
    yield from _sliced_mlp('state_encoder', dims.state_dim, dims.head_width, width)
    for name, inputs in (('embed', dims.action_dim), ('mix', 2 * width), ('out', width)):
        yield from _sliced(f'action_encoder.{name}', inputs, width)
    yield from linear_shapes('time_in', DIT_CODE, width)
    yield from linear_shapes('time_out', width, width)
    for block in range(dims.dit.depth):
        memory = language if block in dims.cross_blocks else width
        yield from under(f'dit.{block}', _dit_block(dims.dit, memory))
    yield from linear_shapes('out_modulation', width, 2 * width)
    yield from linear_shapes('out', width, dims.head_width)
    yield from _sliced_mlp('action_decoder', dims.head_width, dims.head_width, dims.action_dim)


def _connector(dims: GrootDims) -> Named:
    inputs, outputs = dims.vision.width * dims.pixel_shuffle**2, dims.language.width
    if dims.connector_layers == 1:
        yield from linear_shapes('0', inputs, outputs)
        return
    yield from layer_norm_shapes('0', inputs)
    yield from linear_shapes('1', inputs, outputs)
    # Between them is the activation.
    yield from linear_shapes('3', outputs, outputs)


def _decoder_block(dims: DecoderDims) -> Named:
    yield 'input_norm.weight', (dims.width,)
    yield from attention_shapes(dims)
    yield 'attention.q_norm.weight', (dims.head_dim,)
    yield 'attention.k_norm.weight', (dims.head_dim,)
    yield 'post_norm.weight', (dims.width,)
    yield from gated_mlp_shapes(dims)


def _context_block(dims: StackDims, width: int) -> Named:
    yield from layer_norm_shapes('norm1', width)
    yield from under('attention', _attention(dims, width, width))
    yield from layer_norm_shapes('norm2', width)
    yield from under('mlp', _mlp(width, dims.mlp_dim))


def _dit_block(dims: StackDims, memory: int) -> Named:
    width = dims.heads_width
    yield from linear_shapes('modulation', width, 2 * width)
    yield from under('attention', _attention(dims, width, memory))
    yield from under('mlp', _mlp(width, dims.mlp_dim))


def _attention(dims: StackDims, width: int, memory: int) -> Named:
    for name, inputs in (('q', width), ('k', memory), ('v', memory)):
        yield from linear_shapes(name, inputs, dims.heads_width)
    yield from linear_shapes('out', dims.heads_width, width)


def _mlp(width: int, hidden: int) -> Named:
    yield from linear_shapes('fc1', width, hidden)
    yield from linear_shapes('fc2', hidden, width)


def _sliced(name: str, inputs: int, outputs: int) -> Named:
    yield f'{name}.weight', (inputs, outputs)
    yield f'{name}.bias', (outputs,)


def _sliced_mlp(name: str, inputs: int, hidden: int, outputs: int) -> Named:
    yield from _sliced(f'{name}.fc1', inputs, hidden)
    yield from _sliced(f'{name}.fc2', hidden, outputs)
