"""Record the operators of a network, without numbers.

`torch.export` records the same operators with the same tracer. It then prepares the program for
being run again, which takes as long as the trace itself; an ONNX export has no use for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx import Graph, config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from vla_runtime.families.known_shapes import KnownShapes


@dataclass(frozen=True)
class Trace:
    """The operators of one module, in the order that they ran in.

    Attributes:
        graph: ATen operators as PyTorch's functions call them (a linear layer is one node); every
            node has the shape and dtype of its output. Its placeholders are the parameters, the
            buffers and the arguments; those of a mapping one by one.
        parameters: their names, in the order of the placeholders.
        buffers: buffers by name, in the order of the placeholders.
        constants: tensors that `forward` makes from a list, by the target of their node.
    """

    graph: Graph
    parameters: tuple[str, ...]
    buffers: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]


def trace(module: nn.Module, *arguments: Any) -> Trace:
    """Run a module once and record its operators.

    Args:
        module: module with parameters on the meta device.
        arguments: arguments of its `forward`: tensors on the meta device, and mappings of them.
    """
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    state: dict[str, Tensor] = {**parameters, **buffers}
    inputs, structure = pytree.tree_flatten(arguments)

    def run(*values: Tensor) -> list[Tensor]:
        given = pytree.tree_unflatten(list(values[len(state) :]), structure)
        called = functional_call(module, dict(zip(state, values, strict=False)), given)
        return pytree.tree_leaves(called)

    # For the name of the submodule in every node.
    run._orig_mod = module  # type: ignore[attr-defined]
    record = make_fx(run, pre_dispatch=True, record_module_stack=True)
    context = TracingContext(_NoFakes())
    with _without_stack_traces(), tracing(context), KnownShapes():
        traced = record(*(torch.empty_like(value) for value in (*state.values(), *inputs)))
    graph = traced.graph
    graph.eliminate_dead_code()
    targets = {str(node.target) for node in graph.nodes if node.op == 'get_attr'}
    constants = {target: getattr(traced, target) for target in targets}
    return Trace(graph, tuple(parameters), buffers, constants)


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Keep PyTorch from writing down for every node which line of Python made it.

    Nothing here reads it, and it takes a third of a trace. A PyTorch without the setting ignores
    it.
    """
    before = getattr(config, 'do_not_emit_stack_traces', False)
    config.do_not_emit_stack_traces = True  # type: ignore[attr-defined, unused-ignore]
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before  # type: ignore[attr-defined, unused-ignore]


class _NoFakes(FakeTensorMode):
    """Stands for the mode that the tracer notes shapes in: tensors on `meta` are noted as well.

    Fake ones take a fifth of a trace. A PyTorch that asks for no such mode makes its own.
    """

    def __enter__(self) -> _NoFakes:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing, as nothing was entered."""
