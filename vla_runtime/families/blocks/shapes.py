"""Names and shapes of the tensors of shared blocks, counted without PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

from vla_runtime.families.blocks.dimensions import VisionDims

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]


def vision_shapes(dims: VisionDims, out_width: int) -> Named:
    width, patch = dims.width, dims.patch_size
    yield 'position_embedding', (dims.tokens, width)
    yield 'patch_embedding.weight', (width, 3, patch, patch)
    yield 'patch_embedding.bias', (width,)
    for block in range(dims.depth):
        yield from under(f'blocks.{block}', vision_block_shapes(dims))
    yield from layer_norm_shapes('norm', width)
    yield from linear_shapes('projector', width, out_width)


def vision_block_shapes(dims: VisionDims) -> Named:
    yield from layer_norm_shapes('norm1', dims.width)
    for name in ('q', 'k', 'v', 'out'):
        yield from linear_shapes(f'attention.{name}', dims.width, dims.width)
    yield from layer_norm_shapes('norm2', dims.width)
    yield from linear_shapes('mlp.fc1', dims.width, dims.mlp_dim)
    yield from linear_shapes('mlp.fc2', dims.mlp_dim, dims.width)


def layer_norm_shapes(name: str, width: int) -> Named:
    yield f'{name}.weight', (width,)
    yield f'{name}.bias', (width,)


def linear_shapes(name: str, inputs: int, outputs: int) -> Named:
    yield f'{name}.weight', (outputs, inputs)
    yield f'{name}.bias', (outputs,)


def under(prefix: str, named: Named) -> Named:
    return ((f'{prefix}.{name}', shape) for name, shape in named)
