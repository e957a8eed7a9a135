"""Shapes of a network's tensors, traced on PyTorch's `meta` device without computing."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.flow_step import Prefix
from vla_runtime.families.meta_shapes import OperatorShapeCache
from vla_runtime.families.shape_cache import remember, remembered, shapes_file
from vla_runtime.families.token_network import TokenNetwork
from vla_runtime.family.declaration import RowInput, distinct_image_sizes
from vla_runtime.family.listing import code_folders

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
KINDS = {'float32': torch.float32, 'int64': torch.int64, 'bool': torch.bool}


@dataclass(frozen=True)
class PrefixTensor:
    """A tensor that the prefix hands to the head.

    Attributes:
        shape: shape for one prompt row.
        row_axis: axis whose length is the number of prompt rows.
        dtype: dtype of its numbers.
    """

    shape: tuple[int, ...]
    row_axis: int
    dtype: torch.dtype

    def for_rows(self, rows: int) -> tuple[int, ...]:
        """Return the shape for `rows` prompt rows."""
        return (*self.shape[: self.row_axis], rows, *self.shape[self.row_axis + 1 :])


@dataclass(frozen=True)
class TracedShapes:
    """Shapes of a network's inputs and outputs.

    Attributes:
        image_tokens: (N, W) of the image with most tokens.
        token_counts: N of an image by its (height, width).
        past: tensors that the prefix hands to the head, by name, in the network's order.
        conditioning: C, numbers per row of the time table.
    """

    image_tokens: tuple[int, int]
    token_counts: Mapping[tuple[int, int], int]
    past: Mapping[str, PrefixTensor]
    conditioning: int

    def past_buffers(self, rows: int, device: torch.device | str = 'meta') -> dict[str, Tensor]:
        """Make zero buffers for the tensors that the prefix hands to the head."""
        return {
            name: torch.zeros(tensor.for_rows(rows), dtype=tensor.dtype, device=device)
            for name, tensor in self.past.items()
        }


# Export, verification and every load of a policy ask for the same shapes.
_TRACED: dict[Hashable, TracedShapes] = {}


def trace_shapes(network: FlowNetwork) -> TracedShapes:
    """Run vision and prefix without numbers, for one and for two prompt rows.

    Networks with equal dimensions, parameters and buffers are traced once a process, and those of
    the package's own families once a machine.

    Args:
        network: network on any device.

    Raises:
        ValueError: a prefix tensor has no axis, or several, that depend on the rows.
    """
    tensors = [*network.named_parameters(), *network.named_buffers()]
    state = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)
    key = (type(network), network.dims, state)
    if key not in _TRACED:
        path = _file(network, f'{torch.__version__} {state}')
        shapes = remembered(path, _read)
        if shapes is None:
            with OperatorShapeCache():
                shapes = _trace(network)
            remember(path, _written(shapes))
        _TRACED[key] = shapes
    return _TRACED[key]


def _file(network: FlowNetwork, state: str) -> Path | None:
    """Name the file that remembers a network's shapes; None for code outside the families."""
    if not type(network).__module__.startswith(__name__.removesuffix('traced_shapes')):
        return None
    state = f'{type(network).__qualname__} {state}'
    return shapes_file(network.family.name, network.dims, code_folders(), state)


def _written(shapes: TracedShapes) -> dict[str, Any]:
    """Return shapes as JSON; `_read` is its inverse."""
    return {
        'image_tokens': shapes.image_tokens,
        'token_counts': [[*size, count] for size, count in shapes.token_counts.items()],
        'past': {
            name: [tensor.shape, tensor.row_axis, str(tensor.dtype)]
            for name, tensor in shapes.past.items()
        },
        'conditioning': shapes.conditioning,
    }


def _read(content: dict[str, Any]) -> TracedShapes:
    tokens, width = map(int, content['image_tokens'])
    return TracedShapes(
        (tokens, width),
        {(int(h), int(w)): int(count) for h, w, count in content['token_counts']},
        {
            name: PrefixTensor(tuple(map(int, shape)), int(row_axis), _DTYPES[dtype])
            for name, (shape, row_axis, dtype) in content['past'].items()
        },
        int(content['conditioning']),
    )


def _trace(network: FlowNetwork) -> TracedShapes:
    dims = network.dims
    tokens = {
        size: _on_meta(network.vision, torch.empty(1, 3, *size, device='meta'))[0]
        for size in distinct_image_sizes(dims)
    }
    most = max(tokens.values(), key=len)
    images = torch.empty(dims.cameras, *most.shape, dtype=most.dtype, device='meta')
    mask = torch.ones(dims.cameras, dtype=torch.bool, device='meta')
    prefix = Prefix(network)
    one, two = (
        _on_meta(prefix, images, mask, row_tensors(network.family.prefix_inputs(dims), count))
        for count in (1, 2)
    )
    conditioning = _on_meta(_TimeConditioning(network), torch.empty(1, device='meta'))
    return TracedShapes(
        (most.shape[0], most.shape[1]),
        {size: found.shape[0] for size, found in tokens.items()},
        {name: _prefix_tensor(name, one[name], two[name]) for name in one},
        conditioning.shape[1],
    )


def row_tensors(
    inputs: Mapping[str, RowInput], rows: int, device: torch.device | str = 'meta'
) -> dict[str, Tensor]:
    """Make zero buffers for a family's inputs."""
    return {
        name: torch.zeros(rows, *given.shape, dtype=KINDS[given.kind], device=device)
        for name, given in inputs.items()
    }


Part = Literal['vision', 'prefix', 'head', 'time']


def parameters_of(network: FlowNetwork, shapes: TracedShapes) -> dict[Part, set[str]]:
    """Names of the parameters and buffers that each part of a network computes with.

    A parameter in no set is for training alone. One may be in several sets.

    Args:
        network: network on the `meta` device; all its parameters get gradients.
        shapes: shapes of its inputs and outputs.

    Returns:
        `vision`, `prefix`, `head` (a denoise step) and `time` (the time table)
    """
    # Frozen norms too: what training leaves alone is computed with all the same.
    network.requires_grad_()
    with OperatorShapeCache():
        made = _outputs(network, shapes)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    parts: dict[Part, set[str]] = {
        part: {names[leaf] for leaf in _leaves_of(tensors) if leaf in names}
        for part, tensors in made.items()
    }
    # A module that computes with its parameters computes with its buffers.
    for name, _ in network.named_buffers():
        module = name.rpartition('.')[0]
        for read in parts.values():
            if any(other.rpartition('.')[0] == module for other in tuple(read)):
                read.add(name)
    return parts


def _outputs(network: FlowNetwork, shapes: TracedShapes) -> dict[Part, list[Tensor]]:
    """Run each part of a network once, with gradients."""
    dims, family = network.dims, network.family
    meta = torch.device('meta')
    past = network.prefix(
        torch.zeros(dims.cameras, *shapes.image_tokens, device=meta),
        torch.ones(dims.cameras, dtype=torch.bool, device=meta),
        **row_tensors(family.prefix_inputs(dims), 1),
    )
    cut_off = {name: value.detach() for name, value in past.items()}
    if isinstance(network, TokenNetwork):
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=meta)
        place = torch.zeros((), dtype=torch.int64, device=meta)
        head = network.read_token(tokens, place, cut_off, *network.answer_places(cut_off)).logits
    else:
        head = network.velocity(
            torch.zeros(1, dims.horizon, dims.action_dim, device=meta),
            cut_off,
            torch.zeros(1, shapes.conditioning, device=meta),
            **row_tensors(family.head_inputs(dims), 1),
        )
    return {
        'vision': [
            network.vision(torch.zeros(1, 3, *size, device=meta))
            for size in distinct_image_sizes(dims)
        ],
        'prefix': [value for value in past.values() if value.is_floating_point()],
        'head': [head],
        'time': [network.time_conditioning(torch.zeros(1, device=meta))],
    }


def _leaves_of(tensors: list[Tensor]) -> set[int]:
    """Identities of the tensors that autograd would accumulate gradients in."""
    leaves, seen = {id(tensor) for tensor in tensors if tensor.is_leaf}, set()
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, 'variable'):
            leaves.add(id(function.variable))
        waiting += [before for before, _ in function.next_functions]
    return leaves


class _TimeConditioning(nn.Module):
    def __init__(self, network: FlowNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, times: Tensor) -> Tensor:
        return self.network.time_conditioning(times)


@torch.no_grad()
def _on_meta(module: nn.Module, *inputs: object):  # type: ignore[no-untyped-def]
    """Run a module with its parameters and buffers replaced by empty ones on `meta`."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    without_numbers = {name: torch.empty_like(tensor, device='meta') for name, tensor in tensors}
    return torch.func.functional_call(module, without_numbers, inputs)


def _prefix_tensor(name: str, one: Tensor, two: Tensor) -> PrefixTensor:
    axes = [i for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    if len(axes) != 1 or (one.shape[axes[0]], two.shape[axes[0]]) != (1, 2):
        raise ValueError(
            f"the prefix hands over '{name}' of shape {tuple(one.shape)} for one prompt row and "
            f'{tuple(two.shape)} for two; exactly one axis must be as long as there are rows'
        )
    return PrefixTensor(tuple(one.shape), axes[0], one.dtype)
