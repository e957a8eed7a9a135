"""Names and shapes of the tensors of shared blocks, counted without PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

from vla_runtime.families.blocks.dimensions import DecoderDims, VisionBlockDims, VisionDims

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]


def vision_shapes(dims: VisionDims) -> Named:
    """Tensors of `siglip.Siglip`, without a projector."""
    width, patch = dims.width, dims.patch_size
    yield 'position_embedding', (dims.tokens, width)
    yield 'patch_embedding.weight', (width, 3, patch, patch)
    yield 'patch_embedding.bias', (width,)
    for block in range(dims.depth):
        yield from under(f'blocks.{block}', vision_block_shapes(dims))
    yield from layer_norm_shapes('norm', width)


def vision_block_shapes(dims: VisionBlockDims) -> Named:
    yield from layer_norm_shapes('norm1', dims.width)
    for name in ('q', 'k', 'v', 'out'):
        yield from linear_shapes(f'attention.{name}', dims.width, dims.width)
    yield from layer_norm_shapes('norm2', dims.width)
    yield from linear_shapes('mlp.fc1', dims.width, dims.mlp_dim)
    yield from linear_shapes('mlp.fc2', dims.mlp_dim, dims.width)


def attention_shapes(
    dims: DecoderDims, memory_width: int | None = None, bias: bool = False
) -> Named:
    """Tensors of `attention.Attention`."""
    memory = dims.width if memory_width is None else memory_width
    keys = dims.num_kv_heads * dims.head_dim
    for name, outputs, inputs in (
        ('q', dims.num_heads * dims.head_dim, dims.width),
        ('k', keys, memory),
        ('v', keys, memory),
    ):
        yield f'attention.{name}.weight', (outputs, inputs)
        if bias:
            yield f'attention.{name}.bias', (outputs,)
    yield 'attention.out.weight', (dims.width, dims.num_heads * dims.head_dim)


def gated_mlp_shapes(dims: DecoderDims) -> Named:
    yield 'mlp.gate.weight', (dims.mlp_dim, dims.width)
    yield 'mlp.up.weight', (dims.mlp_dim, dims.width)
    yield 'mlp.down.weight', (dims.width, dims.mlp_dim)


def decoder_block_shapes(
    dims: DecoderDims, memory_width: int | None = None, bias: bool = False
) -> Named:
    """Tensors of a decoder block with plain RMS norms."""
    yield 'input_norm.weight', (dims.width,)
    yield from attention_shapes(dims, memory_width, bias)
    yield 'post_norm.weight', (dims.width,)
    yield from gated_mlp_shapes(dims)


def layer_norm_shapes(name: str, width: int) -> Named:
    yield f'{name}.weight', (width,)
    yield f'{name}.bias', (width,)


def linear_shapes(name: str, inputs: int, outputs: int) -> Named:
    yield f'{name}.weight', (outputs, inputs)
    yield f'{name}.bias', (outputs,)


def under(prefix: str, named: Named) -> Named:
    return ((f'{prefix}.{name}', shape) for name, shape in named)
