"""Record the operators of a network, without numbers.

`torch.export` records the same operators with the same tracer. It then prepares the program for
being run again, which takes as long as the trace itself; an ONNX export has no use for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Trace:
    """The operators of one module, in the order that they ran in.

    Attributes:
        graph: ATen operators as PyTorch's functions call them (a linear layer is one node); every
            node has the shape and dtype of its output. Its placeholders are the parameters, the
            buffers and the arguments; those of a mapping one by one.
        parameters: their names, in the order of the placeholders.
        buffers: by name, in the order of the placeholders.
        constants: tensors that `forward` makes from a list, by the target of their node.
    """

    graph: Graph
    parameters: tuple[str, ...]
    buffers: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]


def trace(module: nn.Module, *arguments: Any) -> Trace:
    """Run a module once and record its operators.

    Args:
        module: with parameters on the meta device.
        arguments: of its `forward`: tensors on the meta device, and mappings of them.
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
    record = make_fx(
        run,
        tracing_mode='fake',
        pre_dispatch=True,
        record_module_stack=True,
        # A tensor that `forward` makes from a list was not made by this tracer.
        _allow_non_fake_inputs=True,
    )
    traced = record(*state.values(), *inputs)
    graph = traced.graph
    graph.eliminate_dead_code()
    targets = {str(node.target) for node in graph.nodes if node.op == 'get_attr'}
    constants = {target: getattr(traced, target) for target in targets}
    return Trace(graph, tuple(parameters), buffers, constants)
