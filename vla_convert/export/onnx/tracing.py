"""Record the operators of a network, without numbers.

A dispatch mode inside PyTorch's inference mode sees the operators before decomposition. PyTorch's
own tracers record the same ones and take four times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils import _pytree as pytree

from vla_runtime.models.shapes.meta_shapes import DispatchMode, OperatorShapeCache


@dataclass(frozen=True)
class Trace:
    """The operators of one module, in the order that they ran in.

    Attributes:
        graph: ATen operators as PyTorch's functions call them (a linear layer is one node).
            Each node's `meta` has the output's shape and dtype (`val`) and its submodule
            (`module`: path and class). Placeholders: parameters, buffers, then arguments, those of
            a mapping one by one.
        parameters: names in the order of the placeholders.
        buffers: buffers by name, in the order of the placeholders.
        constants: tensors made from lists in `forward`, by node target.
    """

    graph: Graph
    parameters: tuple[str, ...]
    buffers: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]


def trace(module: nn.Module, *arguments: Any) -> Trace:
    """Run a module once, all tensors on the meta device, and record its operators."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    recorder = _Recorder()
    for tensor in (*parameters.values(), *buffers.values(), *pytree.tree_leaves(arguments)):
        recorder.note(recorder.graph.placeholder('given'), tensor)
    with recorder.named_modules(module), torch.inference_mode(), OperatorShapeCache(), recorder:
        outputs = module(*arguments)
    graph = recorder.graph
    graph.output([recorder.node_of(tensor) for tensor in pytree.tree_leaves(outputs)])
    graph.eliminate_dead_code()
    return Trace(graph, tuple(parameters), buffers, recorder.constants)


_NODE = '_node_of_trace'


class _Recorder(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self.constants: dict[str, Tensor] = {}
        # Of parameters, buffers, arguments and constants, by the identity of the tensor, which its
        # node keeps alive. A tensor that an operator made names its node itself (`_NODE`).
        self._nodes: dict[int, Node] = {}
        self._modules: list[tuple[str, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:
            # Of a tensor made from a list, which `forward` may write into: the constant stays.
            func = torch.ops.aten.lift_fresh_copy.default
        given, named = pytree.tree_map_only(Tensor, self.node_of, (tuple(args), kwargs))
        node = self.graph.call_function(func, given, named)
        node.meta['module'] = self._modules[-1]
        result = func(*args, **kwargs)
        if isinstance(result, (tuple, list)):
            node.meta['val'] = [_like(tensor) for tensor in result]
            for index, tensor in enumerate(result):
                self._note_made(self.graph.call_function(getitem, (node, index)), tensor)
        else:
            self._note_made(node, result)
        return result

    def note(self, node: Node, tensor: Tensor) -> None:
        """Let a node stand for a given tensor from now on."""
        node.meta['val'] = tensor
        self._nodes[id(tensor)] = node

    def _note_made(self, node: Node, value: Any) -> None:
        """Let a node stand for an operator's result from now on."""
        node.meta['val'] = _like(value)
        if id(value) in self._nodes:
            self._nodes[id(value)] = node
        elif isinstance(value, Tensor):
            # Nothing else may refer to it: PyTorch 2.4 would pass a copy to `forward`.
            setattr(value, _NODE, node)

    def node_of(self, tensor: Tensor) -> Node:
        """Return the node that stands for a tensor; that of a constant if none does."""
        made = getattr(tensor, _NODE, None)
        # A module may keep a tensor from one trace to the next.
        if made is not None and made.graph is self.graph:
            return made
        if id(tensor) not in self._nodes:
            name = f'_tensor_constant{len(self.constants)}'
            self.constants[name] = tensor
            self.note(self.graph.create_node('get_attr', name), tensor)
        return self._nodes[id(tensor)]

    @contextmanager
    def named_modules(self, module: nn.Module) -> Iterator[None]:
        """Know in which submodule an operator runs."""
        names = {part: name for name, part in module.named_modules()}

        def enter(part: nn.Module, _: Any) -> None:
            if part in names:
                self._modules.append((names[part], type(part).__qualname__))

        def leave(part: nn.Module, *_: Any) -> None:
            if part in names:
                self._modules.pop()

        hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _like(value: Any) -> Any:
    """Return a tensor of the same shape and dtype without its numbers; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device='meta')
