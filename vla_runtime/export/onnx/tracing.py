"""Records the operators of a network, without numbers.

This is the middle of what `torch.export` does. The rest of it, checks for changing shapes and for
another run of the program, takes longer than the trace, and an ONNX export has no use for it.
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
        parameters: names, in the order of their placeholders.
        buffers: those behind the parameters, by name.
        constants: tensors that the module made from numbers of its own, by their node's target.
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

    # So that each node knows the submodule that it is from.
    run._orig_mod = module  # type: ignore[attr-defined]
    record = make_fx(
        run,
        tracing_mode='fake',
        pre_dispatch=True,
        record_module_stack=True,
        # A tensor made from a list is none of this trace's.
        _allow_non_fake_inputs=True,
    )
    traced = record(*state.values(), *inputs)
    graph = traced.graph
    graph.eliminate_dead_code()
    targets = {str(node.target) for node in graph.nodes if node.op == 'get_attr'}
    constants = {target: getattr(traced, target) for target in targets}
    return Trace(graph, tuple(parameters), buffers, constants)
