"""A bundle's networks as ONNX files; `bundle/onnx_files.py` lists and names the files.

Invariants:
- networks are traced on the meta device and weights written one by one: memory is for the largest
  tensor, not for the model;
- all files share one weights.data; a build and the roofline read facts beside the graphs only;
- the monolithic graph is the other three, the expert once a step; a `tokens` head has none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, ItemsView, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import helper
from torch import Tensor, nn

from vla_convert.export.onnx.graph import (
    ATTENTION_OPSET,
    FLOAT4_OPSET,
    FLOAT8_OPSET,
    OPSET,
    GraphWriter,
    Value,
)
from vla_convert.export.onnx.quantised_products import QuantisedProducts
from vla_convert.export.onnx.row_axis import TRACED, with_row_axis
from vla_convert.export.onnx.tracing import Trace, trace
from vla_convert.export.onnx.translation import Translator
from vla_convert.export.onnx.weights import BundleWeights, WeightFile
from vla_runtime.bundle.onnx_files import (
    IMAGE_INPUTS,
    ONNX_FOLDER,
    PASS_INPUTS,
    PASS_OUTPUTS,
    PRECISION_KEY,
    QUANTISED,
    ROWS,
    ROWS_ENDING,
    STEP_OUTPUTS,
    TOKENS,
    Attention,
    ExportedGraphs,
    GraphFacts,
    Precision,
    graph_path,
    step_inputs,
    vision_names,
    write_graph_facts,
)
from vla_runtime.bundle.schema import WEIGHTS_FILE, BundleSpec
from vla_runtime.engines.onnx.shapes import GraphShapes, Tensors, image_input
from vla_runtime.family.declaration import distinct_image_sizes, image_sizes, stages
from vla_runtime.family.listing import find_family
from vla_runtime.family.ternary_weights import PER_BYTE
from vla_runtime.models.base.flow_network import FlowNetwork, empty_network
from vla_runtime.models.base.flow_step import DenoiseStep, Prefix
from vla_runtime.models.base.token_network import ReadToken, TokenNetwork
from vla_runtime.models.blocks.layers import matrix_names, query_scales
from vla_runtime.models.shapes.operation_counts import count_operations, write_counts
from vla_runtime.models.shapes.traced_shapes import parameters_of, trace_shapes

# Most looks of the head at its flow that the baseline holds, one after the other.
_MOST_UNROLLED = 50
_OPSETS: Mapping[Precision, int] = {'fp8': FLOAT8_OPSET, 'nvfp4': FLOAT4_OPSET}
_DTYPES = {
    'float32': torch.float32,
    'float16': torch.float16,
    'bfloat16': torch.bfloat16,
    'int64': torch.int64,
    'bool': torch.bool,
}


def write_onnx(
    folder: Path,
    spec: BundleSpec,
    precision: Precision,
    *,
    quantised: QuantisedProducts | None = None,
    attention: Attention = 'exact',
    advance: Callable[[int], object] = lambda count: None,
) -> None:
    """Write a bundle's ONNX files.

    Args:
        folder: its weights.safetensors is read; `onnx/` must not exist.
        precision: of the large matrices; all else stays float32, indices integers. 8 bits have
            no baseline.
        attention: fused needs half products.
        advance: gets the bytes of each written block.

    Raises ExportError: an operator without an ONNX form, or a constant without numbers in the
    trace.
    """
    assert (precision in QUANTISED) == (quantised is not None)
    beside = precision if quantised is None else quantised.beside
    assert attention == 'exact' or beside != 'float32'
    target = folder / ONNX_FOLDER
    target.mkdir()
    weights = BundleWeights(folder / WEIGHTS_FILE)
    traced = _TracedNetworks(spec, beside)
    with WeightFile(target, advance) as file:
        fused = None if attention == 'exact' else _DTYPES[beside]
        writer = _Writer(folder, spec, weights, file, traced, quantised, fused)
        writer.vision()
        for rows in ROWS:
            writer.prefix(rows)
            writer.expert(rows)
        if has_monolithic(spec, precision):
            for rows in ROWS:
                writer.monolithic(rows)
        writer.any_rows()
    write_graph_facts(
        target, ExportedGraphs(precision, beside, writer.token_embedding, writer.facts)
    )
    write_counts(folder, count_operations(spec.family, spec.dims))


def is_unrolled(spec: BundleSpec) -> bool:
    """Return whether a policy has a baseline: of many passes or steps it would be too long."""
    looks = spec.denoise_steps * len(stages(spec.dims))
    return find_family(spec.family).is_unrolled and looks <= _MOST_UNROLLED


def has_monolithic(spec: BundleSpec, precision: Precision) -> bool:
    """Return whether the baseline is written in a precision."""
    return precision not in QUANTISED and is_unrolled(spec)


def onnx_bytes(spec: BundleSpec, precision: Precision) -> int:
    """Estimate the size of weights.data, with 8 bits also of the float32 files for calibration."""
    empty = empty_network(spec.family, spec.dims)
    parts = parameters_of(empty, trace_shapes(empty))
    # The time table is an input of the graphs.
    used = parts['vision'] | parts['prefix'] | parts['head']
    network = meta_network(spec, _DTYPES['float32' if precision in QUANTISED else precision])
    held = sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in network.named_parameters()
        if name in used
    )
    # A byte for each ternary weight.
    packed = (tensor.numel() for name, tensor in network.named_buffers() if name in used)
    return held + PER_BYTE * sum(packed)


def meta_network(spec: BundleSpec, dtype: torch.dtype) -> FlowNetwork:
    """The network without numbers, its matrices in the given precision."""
    network = empty_network(spec.family, spec.dims)
    matrices = matrix_names(network)
    for name, parameter in network.named_parameters():
        if name in matrices:
            parameter.data = parameter.data.to(dtype)
    return network.eval().requires_grad_(False)


def head_sizes(spec: BundleSpec, precision: Precision) -> dict[str, set[int]]:
    """Return how many numbers the attention heads of each network have."""
    traced = _TracedNetworks(spec, precision)
    traces = {
        'vision': [traced.vision(1, size) for size in distinct_image_sizes(spec.dims)],
        'prefix': [traced.prefix(1)],
        'expert': [traced.expert(1)],
    }
    return {
        name: {
            node.args[0].meta['val'].shape[-1]
            for trace in of_network
            for node in trace.graph.nodes
            if node.target is torch.ops.aten.scaled_dot_product_attention.default
        }
        for name, of_network in traces.items()
    }


class _TracedNetworks:
    """Traces on demand and keeps what was traced."""

    def __init__(self, spec: BundleSpec, precision: Precision) -> None:
        self.network = meta_network(spec, _DTYPES[precision])
        self._spec = spec
        self._traced = trace_shapes(self.network)
        self._kept: dict[tuple[str, tuple[int, ...]], Trace] = {}

    def shapes(self, rows: int) -> GraphShapes:
        traced = self._traced
        past = {
            name: (str(tensor.dtype).removeprefix('torch.'), tensor.for_rows(rows))
            for name, tensor in traced.past.items()
        }
        network = self.network
        return GraphShapes(
            network.family, network.dims, rows, traced.image_tokens, past, traced.conditioning
        )

    def vision(self, images: int, size: tuple[int, int]) -> Trace:
        inputs = self._tensors(image_input(images, size))
        key = (images, *size)
        return self._trace('vision', key, self.network.vision, inputs['pixels'])

    @property
    def most_tokens(self) -> int:
        """Return N of the image with most tokens."""
        return self._traced.image_tokens[0]

    def prefix(self, rows: int) -> Trace:
        inputs = self._tensors(self.shapes(rows).inputs('prefix'))
        images = [inputs.pop(name) for name in IMAGE_INPUTS]
        return self._trace('prefix', (rows,), Prefix(self.network), *images, inputs)

    def expert(self, rows: int) -> Trace:
        inputs = self._tensors(self.shapes(rows).inputs('expert'))
        if isinstance(self.network, TokenNetwork):
            own = [inputs.pop(name) for name in PASS_INPUTS]
            module = ReadToken(self.network)
            return self._trace('expert', (rows,), module, *own[:2], inputs, *own[2:])
        x = inputs.pop('x')
        past = {name: inputs.pop(name) for name in self._traced.past}
        names = step_inputs(has_scheduler=self.network.family.has_scheduler)
        step = [inputs.pop(name) for name in names]
        return self._trace('expert', (rows,), DenoiseStep(self.network), x, past, *step, inputs)

    def _trace(self, name: str, size: tuple[int, ...], module: nn.Module, *inputs: Any) -> Trace:
        key = (name, size)
        if key not in self._kept:
            self._kept[key] = trace(module, *inputs)
        return self._kept[key]

    @staticmethod
    def _tensors(inputs: Tensors) -> dict[str, Tensor]:
        return {
            name: torch.zeros(shape, dtype=_DTYPES[kind], device='meta')
            for name, (kind, shape) in inputs.items()
        }


class _Writer:
    """Writes the graph files of a bundle."""

    def __init__(
        self,
        folder: Path,
        spec: BundleSpec,
        weights: BundleWeights,
        file: WeightFile,
        traced: _TracedNetworks,
        quantised: QuantisedProducts | None,
        fused: torch.dtype | None,
    ) -> None:
        self._quantised = quantised
        self._fused = fused
        self._folder = folder
        self._spec = spec
        self._weights = weights
        self._file = file
        self._traced = traced
        self._scales = query_scales(traced.network)
        self.facts: dict[str, GraphFacts] = {}
        # That the prefix graphs leave to the host; empty where they hold it.
        self.token_embedding = ''

    def vision(self) -> None:
        """Write a graph for each size of the cameras' images."""
        sizes = distinct_image_sizes(self._spec.dims)
        for size, name in zip(sizes, vision_names(len(sizes)), strict=True):
            graph, translator = self._begin('vision')
            inputs = self._declare(graph, image_input(1, size))
            traced = self._traced.vision(1, size)
            (tokens,) = translator.write(traced, 'vision.', list(inputs.values()))
            graph.output('image_tokens', tokens)
            self._save(graph.model(), self._folder / ONNX_FOLDER / name)

    def prefix(self, rows: int) -> None:
        graph = self._prefix_graph(rows)
        self._save(graph.model(), graph_path(self._folder, 'prefix', rows))

    def any_rows(self) -> None:
        """Write prefix and expert for any number of rows, which engines are built from."""
        family, dims = self._traced.network.family, self._spec.dims
        counted_by = 'prefix_mask' if self._answers else 'row_weight'
        for network, write, counted in (
            # Every family's prefix has an input besides the tokens with a value for each row.
            ('prefix', self._prefix_graph, [*family.prefix_inputs(dims)][-1]),
            ('expert', self._expert_graph, counted_by),
        ):
            two, three = (write(rows) for rows in TRACED)
            model = with_row_axis(two, three, counted)
            self._save(model, self._folder / ONNX_FOLDER / f'{network}{ROWS_ENDING}')

    def _prefix_graph(self, rows: int) -> GraphWriter:
        graph, translator = self._begin('prefix', tokens_on_host=True)
        inputs = self._declare(graph, self._traced.shapes(rows).inputs('prefix'))
        outputs = translator.write(self._traced.prefix(rows), '', list(inputs.values()))
        graph.drop_unused_input(TOKENS)
        self.token_embedding = translator.token_embedding
        for (name, (kind, _)), value in zip(self._past(rows), outputs, strict=True):
            # A half product with a bias is float32 until here.
            graph.output(name, graph.cast(value, _DTYPES[kind]))
        return graph

    def _past(self, rows: int) -> ItemsView[str, tuple[str, tuple[int, ...]]]:
        return self._traced.shapes(rows).past.items()

    def expert(self, rows: int) -> None:
        graph = self._expert_graph(rows)
        self._save(graph.model(), graph_path(self._folder, 'expert', rows))

    def _expert_graph(self, rows: int) -> GraphWriter:
        if self._answers:
            return self._pass_graph(rows)
        graph, translator = self._begin('expert')
        inputs = self._declare(graph, self._traced.shapes(rows).inputs('expert'))
        outputs = translator.write(self._traced.expert(rows), '', list(inputs.values()))
        for name, value in zip(STEP_OUTPUTS, outputs, strict=True):
            graph.output(name, value)
        return graph

    def _pass_graph(self, rows: int) -> GraphWriter:
        """Write one pass of a `tokens` head, which takes its token from the host's text table."""
        graph, translator = self._begin('expert', tokens_on_host=True)
        shapes = self._traced.shapes(rows)
        inputs = self._declare(graph, shapes.inputs('expert'))
        own = [inputs.pop(name) for name in PASS_INPUTS]
        given = [*own[:2], *inputs.values(), *own[2:]]
        outputs = translator.write(self._traced.expert(rows), '', given)
        graph.drop_unused_input(TOKENS)
        kinds = shapes.outputs('expert')
        for name, value in zip(PASS_OUTPUTS, outputs, strict=True):
            kind, _ = kinds[name]
            graph.output(name, graph.cast(value, _DTYPES[kind]))
        return graph

    @property
    def _answers(self) -> bool:
        return isinstance(self._traced.network, TokenNetwork)

    def monolithic(self, rows: int) -> None:
        graph, translator = self._begin('monolithic')
        shapes = self._traced.shapes(rows)
        values = self._declare(graph, shapes.monolithic(self._spec.denoise_steps))
        values['image_tokens'] = self._all_tokens(graph, translator, values)
        graph.scope = 'prefix/'
        prefix_inputs = [values[name] for name in shapes.inputs('prefix')]
        past = translator.write(self._traced.prefix(rows), '', prefix_inputs)
        values |= {
            name: graph.cast(value, _DTYPES[kind])
            for (name, (kind, _)), value in zip(self._past(rows), past, strict=True)
        }
        x = values['x']
        for step in range(self._spec.denoise_steps):
            graph.scope = f'step_{step}/'
            given = values | self._step_inputs(graph, values, step) | {'x': x}
            inputs = [given[name] for name in shapes.inputs('expert')]
            x, _ = translator.write(self._traced.expert(rows), '', inputs)
        graph.output('x_next', x)
        self._save(graph.model(), graph_path(self._folder, 'monolithic', rows))

    def _all_tokens(
        self, graph: GraphWriter, translator: Translator, values: Mapping[str, Value]
    ) -> Value:
        """Write vision for all cameras: once for images of one size, else once a camera."""
        sizes = image_sizes(self._spec.dims)
        if len(set(sizes)) == 1:
            graph.scope = 'vision/'
            traced = self._traced.vision(len(sizes), sizes[0])
            return translator.write(traced, 'vision.', [values['pixels']])[0]
        most, rows = self._traced.most_tokens, []
        for camera, size in enumerate(sizes):
            graph.scope = f'vision_{camera}/'
            traced = self._traced.vision(1, size)
            (tokens,) = translator.write(traced, 'vision.', [values[f'pixels_{camera}']])
            _, count, width = tokens.shape
            if count < most:
                # The tokens of a smaller image come first and zeros follow.
                zeros = graph.constant(torch.zeros(1, most - count, width))
                shape = (1, most, width)
                tokens = graph.node('Concat', [tokens, zeros], shape, axis=1)
            rows.append(tokens)
        return graph.node('Concat', rows, (len(rows), *rows[0].shape[1:]), axis=0)

    def _step_inputs(
        self, graph: GraphWriter, values: Mapping[str, Value], step: int
    ) -> dict[str, Value]:
        """This step's row of the inputs that hold all steps."""
        index = graph.constant(torch.tensor(step))

        def row(name: str) -> Value:
            whole = values[name]
            return graph.node('Gather', [whole, index], whole.shape[1:], axis=0)

        conditioning = row('time_conditioning')
        return {
            'time_conditioning': graph.reshape(conditioning, (1, *conditioning.shape)),
            't': row('t'),
            'plan_weight': row('plan_weight'),
        }

    def _begin(self, name: str, *, tokens_on_host: bool = False) -> tuple[GraphWriter, Translator]:
        opset = OPSET
        if self._fused is not None:
            opset = ATTENTION_OPSET
        elif self._quantised is not None:
            opset = _OPSETS.get(self._quantised.precision, OPSET)
        graph = GraphWriter(name, self._file, opset, self._fused)
        translator = Translator(
            graph,
            self._weights,
            self._scales,
            tokens_on_host=tokens_on_host,
            quantised=self._quantised,
        )
        return graph, translator

    @staticmethod
    def _declare(graph: GraphWriter, inputs: Tensors) -> dict[str, Value]:
        return {
            name: graph.input(name, _DTYPES[kind], shape) for name, (kind, shape) in inputs.items()
        }

    def _save(self, model: onnx.ModelProto, path: Path) -> None:
        if self._quantised is not None:
            # Keys and values do not say it.
            model.metadata_props.add(key=PRECISION_KEY, value=self._quantised.precision)
        onnx.save_model(model, path)
        self.facts[path.name] = graph_facts_of(model)


def graph_facts_of(model: onnx.ModelProto) -> GraphFacts:
    """Count a graph's operators and the bytes of its weights."""
    weights = model.graph.initializer
    return GraphFacts(
        opset=model.opset_import[0].version,
        operators=dict(sorted(Counter(node.op_type for node in model.graph.node).items())),
        weight_bytes=sum(map(_bytes_of, weights)),
        int8_products=_rounded_products(model.graph),
    )


def _rounded_products(graph: onnx.GraphProto) -> int:
    """Count the products of which both factors were rounded."""
    widened = {
        name for node in graph.node if node.op_type == 'DequantizeLinear' for name in node.output
    }
    return sum(node.op_type == 'MatMul' and {*node.input} <= widened for node in graph.node)


def _bytes_of(tensor: onnx.TensorProto) -> int:
    count = math.prod(tensor.dims)
    if tensor.data_type == onnx.TensorProto.FLOAT4E2M1:
        # NumPy has one number a byte.
        return (count + 1) // 2
    return count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
