"""From a traced PyTorch module to nodes of an ONNX graph.

`tracing.py` records what PyTorch runs. Four rewrites change no result beyond rounding:
- what depends on weights alone is computed at export, such as `1 + weight` of every norm;
- linear layers over one tensor become one matrix product (gate and up; q, k and v);
- Split and Concat are left out where all outputs of such a product are concatenated in order;
- attention's 1/sqrt(head_dim) goes into the query projection's weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.export.onnx.graph import GraphWriter, Value
from vla_convert.export.onnx.operators import lowering
from vla_convert.export.onnx.quantised_products import Matrix, QuantisedProducts
from vla_convert.export.onnx.ternary import TernaryMatrix, write_products
from vla_convert.export.onnx.tracing import Trace
from vla_convert.export.onnx.weights import BundleWeights
from vla_runtime.bundle.onnx_files import TEXT_INPUT, TOKENS

_SKIPPED = ('_assert_tensor_metadata.default',)
_CONVERSION = 'aten.to.dtype'
_TERNARY = 'vla_runtime.ternary_product.default'


@dataclass(frozen=True)
class _Weight:
    """A parameter that has not been read: its name in the bundle, and its traced form."""

    name: str
    traced: Tensor


class Translator:
    """Writes traced modules into one graph.

    `scales`: parameter name to factor; `tokens_on_host`: take the text table's rows as an input,
    named in `token_embedding`, and leave the table out; `quantised`: products in fewer bits.
    """

    def __init__(
        self,
        graph: GraphWriter,
        weights: BundleWeights,
        scales: Mapping[str, float],
        *,
        tokens_on_host: bool = False,
        quantised: QuantisedProducts | None = None,
    ) -> None:
        self._graph = graph
        self._weights = weights
        self._scales = scales
        self._tokens_on_host = tokens_on_host
        self._quantised = quantised
        self.token_embedding = ''

    def write(self, trace: Trace, prefix: str, inputs: Sequence[Value]) -> list[Value]:
        """Write one traced module; return its outputs in order.

        `prefix` of the parameters in the bundle is ``'vision.'`` for the vision tower; a leading
        ``network.`` is dropped. `inputs` has a value for each argument, those of a mapping one by
        one. Raises ExportError: an operator without an ONNX form, or a constant without numbers.
        """
        translation = _Translation(
            self._graph,
            self._weights,
            self._scales,
            prefix,
            self._tokens_on_host,
            self._quantised,
        )
        outputs = translation.run(trace, inputs)
        self.token_embedding = translation.token_embedding
        return outputs


class _Translation:
    def __init__(
        self,
        graph: GraphWriter,
        weights: BundleWeights,
        scales: Mapping[str, float],
        prefix: str,
        tokens_on_host: bool,
        quantised: QuantisedProducts | None,
    ) -> None:
        self._graph = graph
        self._weights = weights
        self._scales = scales
        self._prefix = prefix
        self._tokens_on_host = tokens_on_host
        self._quantised = quantised
        self.token_embedding = ''
        # Graph values, numbers known now (tensors), weights not yet read, and plain numbers.
        self._known: dict[Node, Any] = {}
        self._groups: dict[Node, list[Node]] = {}

    def run(self, trace: Trace, inputs: Sequence[Value]) -> list[Value]:
        nodes = list(trace.graph.nodes)
        self._place_inputs(trace, nodes, inputs)
        self._groups = _linear_groups(nodes) | _ternary_groups(nodes)
        for node in nodes:
            if node.op == 'call_function' and node not in self._known:
                self._write(node)
        (output,) = (node for node in nodes if node.op == 'output')
        return [self._value(self._known[item]) for item in output.args[0]]

    def _place_inputs(self, trace: Trace, nodes: list[Node], inputs: Sequence[Value]) -> None:
        given = iter(node for node in nodes if node.op == 'placeholder')
        # Names first: zip then takes no extra node.
        for name, node in zip(trace.parameters, given, strict=False):
            full_name = self._prefix + name.removeprefix('network.')
            self._known[node] = _Weight(full_name, node.meta['val'])
        for (name, buffer), node in zip(trace.buffers.items(), given, strict=False):
            full_name = self._prefix + name.removeprefix('network.')
            stored = full_name in self._weights.names
            self._known[node] = (
                _Weight(full_name, buffer) if stored else _numbers(buffer, node, name)
            )
        self._known.update(zip(given, inputs, strict=True))
        for node in nodes:
            if node.op == 'get_attr':
                target = str(node.target)
                self._known[node] = _numbers(trace.constants[target], node, target)

    def _write(self, node: Node) -> None:
        target = node.target
        if getattr(target, '__name__', '') == 'getitem':
            source, index = node.args
            assert isinstance(source, Node)
            self._known[node] = self._known[source][index]
            return
        operator = str(target).removeprefix('aten.')
        if operator in _SKIPPED:
            return
        if operator == 'linear.default':
            self._write_linears(self._groups[node])
            return
        if operator == _TERNARY:
            self._write_ternary(self._groups[node])
            return
        args = [self._known_argument(argument) for argument in node.args]
        named = {key: self._known_argument(value) for key, value in node.kwargs.items()}
        if not _depends_on_input(args):
            self._known[node] = self._compute(target, args, named)
            return
        if operator == 'embedding.default':
            table, tokens = args[:2]
            if self._leaves_out(table, tokens):
                self._known[node] = self._graph.input(
                    TEXT_INPUT, torch.float32, node.meta['val'].shape
                )
                self.token_embedding = table.name
                return
            args = [self._weight_value([table], transposed=False), tokens]
        write = lowering(operator)
        values = [_each(argument, self._value) for argument in args]
        named = {key: value for key, value in named.items() if key not in ('dtype', 'device')}
        self._known[node] = write(self._graph, node.meta['val'], *values, **named)

    def _leaves_out(self, table: Any, tokens: Any) -> bool:
        """Return whether a lookup is left to the host: the first one of the input `tokens`."""
        return (
            self._tokens_on_host
            and not self.token_embedding
            and isinstance(table, _Weight)
            and isinstance(tokens, Value)
            and tokens.name == TOKENS
        )

    def _known_argument(self, argument: Any) -> Any:
        return _each(argument, lambda item: self._known[item] if isinstance(item, Node) else item)

    def _compute(self, target: Any, args: list[Any], named: Mapping[str, Any]) -> Any:
        """Run an operator now, on numbers; in-place ones change what they were given a view of."""
        numbers = [_each(argument, self._number) for argument in args]
        named = {**named, **({'device': torch.device('cpu')} if 'device' in named else {})}
        return target(*numbers, **named)

    def _number(self, item: Any) -> Any:
        return self._scaled(item) if isinstance(item, _Weight) else item

    def _value(self, item: Any) -> Any:
        """Numbers and weights as constants of the graph; everything else as it is."""
        if isinstance(item, _Weight):
            return self._graph.constant(self._scaled(item), item.name)
        if isinstance(item, Tensor):
            return self._graph.constant(item)
        return item

    def _write_linears(self, nodes: list[Node]) -> None:
        """Linear layers over one input, as one matrix product."""
        graph = self._graph
        x = self._known_argument(nodes[0].args[0])
        layers = [[self._known_argument(item) for item in node.args[1:]] for node in nodes]
        has_bias = len(layers[0]) > 1 and layers[0][1] is not None
        y = self._product(self._value(x), [layer[0] for layer in layers], widened=has_bias)
        if has_bias:
            bias = torch.cat([self._scaled(layer[1]) for layer in layers])
            y = graph.node('Add', [graph.single(y), graph.constant(bias, _name(layers))], y.shape)
        parts = graph.split(y, [tuple(node.meta['val'].shape) for node in nodes], -1)
        self._known.update(zip(nodes, parts, strict=True))

    def _write_ternary(self, nodes: list[Node]) -> None:
        """Ternary layers over one input, as one product."""
        graph = self._graph
        args = [[self._known_argument(item) for item in node.args] for node in nodes]
        whole, token_scale = args[0][:2]
        layers = [
            TernaryMatrix(packed.name, packed.traced.shape[0], self._scaled(scale))
            for _, _, packed, scale, _ in args
        ]
        y = write_products(graph, self._weights, whole, token_scale, layers)
        biases = [one[4] for one in args]
        if biases[0] is not None:
            bias = torch.cat([self._scaled(one) for one in biases])
            y = graph.node('Add', [y, graph.constant(bias, biases[0].name)], y.shape)
        parts = graph.split(y, [tuple(node.meta['val'].shape) for node in nodes], -1)
        self._known.update(zip(nodes, parts, strict=True))

    def _product(self, x: Value, weights: list[_Weight | Tensor], *, widened: bool) -> Value:
        """Write the product of x and matrices side by side."""
        graph, quantised = self._graph, self._quantised
        if isinstance(weights[0], _Weight):
            matrix = self._joined(weights, transposed=True)
            if quantised is not None and quantised.takes(matrix):
                # Rounded once, without half in between.
                single = graph.single(graph.before_cast(x))
                # One product each where a bias follows, see `quantised_products`.
                cut = widened and quantised.apart
                apart = [[weight] for weight in weights] if cut else [weights]
                matrices = [self._joined(some, transposed=True) for some in apart]
                parts = quantised.products(graph, single, matrix.name, matrices)
                y = parts[0]
                if len(parts) > 1:
                    shape = (*x.shape[:-1], matrix.shape[1])
                    y = graph.node('Concat', parts, shape, axis=len(shape) - 1)
                return y if widened else graph.cast(y, matrix.dtype)
        weight = self._weight_value(weights, transposed=True)
        x = graph.cast(x, weight.dtype)
        return graph.node('MatMul', [x, weight], (*x.shape[:-1], weight.shape[1]))

    def _scaled(self, weight: _Weight | Tensor) -> Tensor:
        if isinstance(weight, Tensor):
            return weight
        scale = self._scales.get(weight.name, 1.0)
        numbers = self._weights.read(weight.name)
        return numbers if scale == 1.0 else numbers * scale

    def _weight_value(self, weights: list[_Weight | Tensor], transposed: bool) -> Value:
        """Join matrices side by side; `transposed` is as ONNX multiplies them, (in, out)."""
        if isinstance(weights[0], Tensor):
            (matrix,) = weights
            assert isinstance(matrix, Tensor)
            return self._graph.constant(matrix.T if transposed else matrix)
        one = self._joined(weights, transposed)
        stored = self._graph.weights.named(one.name, one.dtype, one.shape, one.make)
        return self._graph.initializer(stored, one.dtype)

    def _joined(self, weights: list[_Weight | Tensor], transposed: bool) -> Matrix:
        named = [weight for weight in weights if isinstance(weight, _Weight)]
        rows, columns = sum(weight.traced.shape[0] for weight in named), named[0].traced.shape[1]

        def make() -> Tensor:
            matrix = torch.cat([self._scaled(weight) for weight in named])
            return matrix.T if transposed else matrix

        name = '+'.join(weight.name for weight in named)
        shape = (columns, rows) if transposed else (rows, columns)
        return Matrix(name, named[0].traced.dtype, shape, make)


def _numbers(tensor: Tensor, node: Node, name: str) -> Tensor:
    if tensor.is_meta and node.users:
        modules = {user.meta['module'] for user in node.users if 'module' in user.meta}
        where = ', '.join(sorted(f"'{path}' ({kind})" if path else kind for path, kind in modules))
        raise ExportError(
            f'the network module {where or name} uses a constant of shape {list(tensor.shape)} '
            f"('{name}') whose numbers an export cannot know, since networks are traced without "
            'numbers: make it with torch.arange, torch.full or torch.linspace in forward instead '
            'of from a list or in a buffer, or make it a parameter of the checkpoint'
        )
    return tensor


def _each(argument: Any, change: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return [_each(item, change) for item in argument]
    return change(argument)


def _depends_on_input(arguments: list[Any]) -> bool:
    return any(
        _depends_on_input(list(item))
        if isinstance(item, (list, tuple))
        else isinstance(item, Value)
        for item in arguments
    )


def _name(layers: list[list[Any]]) -> str:
    first = layers[0][1]
    return first.name if isinstance(first, _Weight) else ''


def _linear_groups(nodes: list[Node]) -> dict[Node, list[Node]]:
    """Each linear layer with all that read the same tensor in the same precision."""
    groups: dict[tuple[Node, torch.dtype, bool], list[Node]] = {}
    for node in nodes:
        if str(node.target) != 'aten.linear.default':
            continue
        source, weight = node.args[0], node.args[1]
        assert isinstance(source, Node) and isinstance(weight, Node)
        source = _unconverted(source)
        # A weight that is computed stands alone.
        together = source if weight.op == 'placeholder' else node
        has_bias = len(node.args) > 2 and node.args[2] is not None
        key = (together, weight.meta['val'].dtype, has_bias)
        groups.setdefault(key, []).append(node)
    return {node: group for group in groups.values() for node in group}


def _ternary_groups(nodes: list[Node]) -> dict[Node, list[Node]]:
    """Each ternary layer with all that read the same rounded tokens."""
    groups: dict[tuple[Any, bool], list[Node]] = {}
    for node in nodes:
        if str(node.target) == _TERNARY:
            groups.setdefault((node.args[0], node.args[4] is None), []).append(node)
    return {node: group for group in groups.values() for node in group}


def _unconverted(node: Node) -> Node:
    """Return the node before a tensor's last change of dtype; skip casts that change nothing."""
    converted = False
    while str(node.target) == _CONVERSION:
        parent = node.all_input_nodes[0]
        changes = parent.meta['val'].dtype != node.meta['val'].dtype
        if changes and converted:
            break
        node, converted = parent, converted or changes
    return node
