"""Names and shapes of a network's tensors, counted from its dimensions without PyTorch."""

from __future__ import annotations

from vla_runtime.families.act.dimensions import ActDims, ResNetDims, StackDims
from vla_runtime.families.blocks.shapes import (
    Named,
    Shape,
    layer_norm_shapes,
    linear_shapes,
    under,
)


def weight_shapes(dims: ActDims) -> dict[str, Shape]:
    """Tensors of an ACT network, in the order of its state dict."""
    return dict(_tensors(dims))


def _tensors(dims: ActDims) -> Named:
    width = dims.width
    yield 'latent', (width,)
    yield 'vector_positions', (dims.vector_tokens, width)
    yield 'action_positions', (dims.horizon, width)
    yield from under('vision.backbone', _resnet(dims.backbone))
    yield 'vision.projection.weight', (width, dims.backbone.width, 1, 1)
    yield 'vision.projection.bias', (width,)
    yield from linear_shapes('state_projection', dims.state_dim - dims.environment_dim, width)
    if dims.environment_dim:
        yield from linear_shapes('environment_projection', dims.environment_dim, width)
    for layer in range(dims.encoder.depth):
        yield from under(f'encoder.{layer}', _encoder_layer(dims.encoder))
    if dims.pre_norm:
        yield from layer_norm_shapes('encoder_norm', width)
    for layer in range(dims.decoder.depth):
        yield from under(f'decoder.{layer}', _decoder_layer(dims.decoder))
    yield from layer_norm_shapes('decoder_norm', width)
    yield from linear_shapes('action_head', width, dims.action_dim)


def _resnet(dims: ResNetDims) -> Named:
    yield from under('stem', _conv_norm(3, dims.stem, 7))
    inputs = dims.stem
    for stage, (channels, count) in enumerate(zip(dims.channels, dims.blocks, strict=True)):
        outputs = channels * dims.expansion
        for block in range(count):
            # The first block of a stage halves the image, but for the first and a dilated stage.
            halves = block == 0 and stage > 0 and not (dims.dilated and stage == 3)
            shortcut = halves or inputs != outputs
            shapes = _block(dims, inputs, channels, shortcut)
            yield from under(f'stages.{stage}.{block}', shapes)
            inputs = outputs


def _block(dims: ResNetDims, inputs: int, channels: int, shortcut: bool) -> Named:
    outputs = channels * dims.expansion
    if dims.bottleneck:
        sizes = [(inputs, channels, 1), (channels, channels, 3), (channels, outputs, 1)]
    else:
        sizes = [(inputs, channels, 3), (channels, channels, 3)]
    for index, size in enumerate(sizes):
        yield from under(f'convolutions.{index}', _conv_norm(*size))
    if shortcut:
        yield from under('shortcut', _conv_norm(inputs, outputs, 1))


def _conv_norm(inputs: int, outputs: int, kernel: int) -> Named:
    yield 'conv.weight', (outputs, inputs, kernel, kernel)
    for name in ('weight', 'bias', 'running_mean', 'running_var'):
        yield f'norm.{name}', (outputs,)


def _encoder_layer(dims: StackDims) -> Named:
    yield from under('attention', _attention(dims))
    yield from layer_norm_shapes('norm1', dims.width)
    yield from under('mlp', _mlp(dims))
    yield from layer_norm_shapes('norm2', dims.width)


def _decoder_layer(dims: StackDims) -> Named:
    yield from under('self_attention', _attention(dims))
    yield from layer_norm_shapes('norm1', dims.width)
    yield from under('cross_attention', _attention(dims))
    yield from layer_norm_shapes('norm2', dims.width)
    yield from under('mlp', _mlp(dims))
    yield from layer_norm_shapes('norm3', dims.width)


def _attention(dims: StackDims) -> Named:
    for name in ('q', 'k', 'v', 'out'):
        yield from linear_shapes(name, dims.width, dims.width)


def _mlp(dims: StackDims) -> Named:
    yield from linear_shapes('fc1', dims.width, dims.mlp_dim)
    yield from linear_shapes('fc2', dims.mlp_dim, dims.width)
