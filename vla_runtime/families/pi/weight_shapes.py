"""Names and shapes of a network's tensors, counted from its dimensions without PyTorch.

A bundle's weights are compared with them, on a machine that only serves engines too. Tests hold
them to the state dicts of `models/`, order included.
"""

from __future__ import annotations

from collections.abc import Iterator

from vla_runtime.families.pi.dimensions import GemmaDims, PolicyDims, VisionDims
from vla_runtime.types import Family

Shape = tuple[int, ...]
_Named = Iterator[tuple[str, Shape]]


def network_shapes(family: Family, dims: PolicyDims) -> dict[str, Shape]:
    """Tensor names to shapes, in the order of the network's state dict."""
    return dict(_policy(family, dims))


def _policy(family: Family, dims: PolicyDims) -> _Named:
    width = dims.expert.width
    yield from _under('vision', _vision(dims.vision, dims.language.width))
    yield 'language.embedding.weight', (dims.vocabulary, dims.language.width)
    yield from _under('language', _gemma(dims.language, adaptive=False))
    yield from _under('expert', _gemma(dims.expert, adaptive=family == 'pi05'))
    yield from _linear('action_in', dims.action_dim, width)
    yield from _linear('action_out', width, dims.action_dim)
    if family == 'pi0':
        yield from _linear('state_projection', dims.state_dim, width)
        yield from _linear('action_time_in', 2 * width, width)
        yield from _linear('action_time_out', width, width)
    else:
        yield from _linear('time_in', width, width)
        yield from _linear('time_out', width, width)


def _vision(dims: VisionDims, out_width: int) -> _Named:
    width, patch = dims.width, dims.patch_size
    yield 'position_embedding', (dims.tokens, width)
    yield 'patch_embedding.weight', (width, 3, patch, patch)
    yield 'patch_embedding.bias', (width,)
    for block in range(dims.depth):
        yield from _under(f'blocks.{block}', _vision_block(dims))
    yield from _layer_norm('norm', width)
    yield from _linear('projector', width, out_width)


def _vision_block(dims: VisionDims) -> _Named:
    yield from _layer_norm('norm1', dims.width)
    for name in ('q', 'k', 'v', 'out'):
        yield from _linear(f'attention.{name}', dims.width, dims.width)
    yield from _layer_norm('norm2', dims.width)
    yield from _linear('mlp.fc1', dims.width, dims.mlp_dim)
    yield from _linear('mlp.fc2', dims.mlp_dim, dims.width)


def _gemma(dims: GemmaDims, adaptive: bool) -> _Named:
    for block in range(dims.depth):
        yield from _under(f'blocks.{block}', _gemma_block(dims, adaptive))
    yield from _rms_norm('norm', dims.width, adaptive)


def _gemma_block(dims: GemmaDims, adaptive: bool) -> _Named:
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


def _rms_norm(name: str, width: int, adaptive: bool) -> _Named:
    if adaptive:
        yield from _linear(f'{name}.modulation', width, 3 * width)
    else:
        yield f'{name}.weight', (width,)


def _layer_norm(name: str, width: int) -> _Named:
    yield f'{name}.weight', (width,)
    yield f'{name}.bias', (width,)


def _linear(name: str, inputs: int, outputs: int) -> _Named:
    yield f'{name}.weight', (outputs, inputs)
    yield f'{name}.bias', (outputs,)


def _under(prefix: str, named: _Named) -> _Named:
    return ((f'{prefix}.{name}', shape) for name, shape in named)
