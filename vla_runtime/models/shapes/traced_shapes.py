"""Shapes of a network's tensors, read off a run: of an empty one on `meta`, or where it stands."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vla_runtime.family.declaration import RowInput, distinct_image_sizes
from vla_runtime.models.base.flow_network import FlowNetwork
from vla_runtime.models.base.token_network import TokenNetwork
from vla_runtime.models.shapes.meta_shapes import OperatorShapeCache

KINDS = {'float32': torch.float32, 'int64': torch.int64, 'bool': torch.bool}


@dataclass(frozen=True)
class PrefixTensor:
    """A tensor from prefix to head: shape for one prompt row, and the axis of the rows."""

    shape: tuple[int, ...]
    row_axis: int
    dtype: torch.dtype

    def for_rows(self, rows: int) -> tuple[int, ...]:
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
        return {
            name: torch.zeros(tensor.for_rows(rows), dtype=tensor.dtype, device=device)
            for name, tensor in self.past.items()
        }


# Export, verification and every load of a policy ask for the same shapes.
_TRACED: dict[Hashable, TracedShapes] = {}


def trace_shapes(network: FlowNetwork) -> TracedShapes:
    """Run vision and prefix, for one and for two prompt rows.

    Networks with equal dimensions, parameters and buffers are run once a process.

    Raises:
        ValueError: a prefix tensor has no axis, or several, that depend on the rows.
    """
    tensors = [*network.named_parameters(), *network.named_buffers()]
    state = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)
    key = (type(network), network.dims, state)
    if key not in _TRACED:
        device = next(network.parameters()).device
        with OperatorShapeCache() if device.type == 'meta' else nullcontext():
            _TRACED[key] = _trace(network, device)
    return _TRACED[key]


def repeat_prefix(
    network: FlowNetwork, past: Mapping[str, Tensor], times: int
) -> dict[str, Tensor]:
    """Repeat each row of a prefix, as for several noises over it; gradients go through."""
    axes = trace_shapes(network).past
    return {
        name: tensor.repeat_interleave(times, dim=axes[name].row_axis)
        for name, tensor in past.items()
    }


@torch.no_grad()
def _trace(network: FlowNetwork, device: torch.device) -> TracedShapes:
    dims = network.dims
    tokens = {
        size: network.vision(torch.zeros(1, 3, *size, device=device))[0]
        for size in distinct_image_sizes(dims)
    }
    most = max(tokens.values(), key=len)
    images = torch.zeros(dims.cameras, *most.shape, dtype=most.dtype, device=device)
    mask = torch.ones(dims.cameras, dtype=torch.bool, device=device)
    one, two = (
        network.prefix(
            images, mask, **row_tensors(network.family.prefix_inputs(dims), rows, device)
        )
        for rows in (1, 2)
    )
    conditioning = network.time_conditioning(torch.zeros(1, device=device))
    return TracedShapes(
        (most.shape[0], most.shape[1]),
        {size: found.shape[0] for size, found in tokens.items()},
        {name: _prefix_tensor(name, one[name], two[name]) for name in one},
        conditioning.shape[1],
    )


def row_tensors(
    inputs: Mapping[str, RowInput], rows: int, device: torch.device | str = 'meta'
) -> dict[str, Tensor]:
    return {
        name: torch.zeros(rows, *given.shape, dtype=KINDS[given.kind], device=device)
        for name, given in inputs.items()
    }


Part = Literal['vision', 'prefix', 'head', 'time']


def parameters_of(network: FlowNetwork, shapes: TracedShapes) -> dict[Part, set[str]]:
    """Names of the parameters and buffers that each part of a network computes with.

    The parts are `vision`, `prefix`, `head` (a denoise step) and `time` (the time table). A
    parameter in no set is for training alone. All parameters of the network, on `meta`, get
    gradients.
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


def _prefix_tensor(name: str, one: Tensor, two: Tensor) -> PrefixTensor:
    axes = [i for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    if len(axes) != 1 or (one.shape[axes[0]], two.shape[axes[0]]) != (1, 2):
        raise ValueError(
            f"the prefix hands over '{name}' of shape {tuple(one.shape)} for one prompt row and "
            f'{tuple(two.shape)} for two; exactly one axis must be as long as there are rows'
        )
    return PrefixTensor(tuple(one.shape), axes[0], one.dtype)
