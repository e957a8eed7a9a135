"""A bundle's networks as ONNX files: see `engines.onnx_files` for which, and for their names.

Invariants:
- the networks are traced without numbers (PyTorch's meta device) and the weights are written one
  tensor at a time, so the export needs memory for the largest tensor, not for the model;
- all files refer to one weights.data;
- the monolithic graph is the other three written one after the other, the expert once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from vla_runtime.bundle.schema import WEIGHTS_FILE, BundleSpec
from vla_runtime.engines.onnx.files import (
    EXPERT_INPUTS,
    EXPERT_OUTPUTS,
    ONNX_FOLDER,
    PREFIX_INPUTS,
    PREFIX_OUTPUTS,
    ROWS,
    Precision,
    graph_path,
)
from vla_runtime.engines.onnx.shapes import GraphShapes, Tensors
from vla_runtime.export.onnx.graph import GraphWriter, Value
from vla_runtime.export.onnx.translation import Translator
from vla_runtime.export.onnx.weights import BundleWeights, WeightFile
from vla_runtime.families.blocks.layers import matrix_names
from vla_runtime.families.engine_networks import ExpertStep, PrefixEncoder
from vla_runtime.families.family import PolicyDims
from vla_runtime.families.flow_network import empty_network
from vla_runtime.families.pi.flow_policy import PiNetwork

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
    advance: Callable[[int], object] = lambda count: None,
) -> None:
    """Write a bundle's ONNX files.

    Args:
        folder: of the bundle; its weights.safetensors is read, `onnx/` must not be there.
        spec: its policy.yaml.
        precision: of the large matrices; everything else stays float32, indices stay integers.
        advance: told the bytes of weights written, as they are.

    Raises:
        ExportError: the network uses an operator that has no ONNX form here.
    """
    target = folder / ONNX_FOLDER
    target.mkdir()
    weights = BundleWeights(folder / WEIGHTS_FILE)
    traced = _TracedNetworks(spec, precision)
    with WeightFile(target, advance) as file:
        writer = _Writer(folder, spec, weights, file, traced)
        writer.vision()
        for rows in ROWS:
            writer.prefix(rows)
            writer.expert(rows)
            writer.monolithic(rows)


def onnx_bytes(spec: BundleSpec, precision: Precision) -> int:
    """About how large weights.data will be: every parameter that a graph uses."""
    network = meta_network(spec, _DTYPES[precision])
    last = f'language.blocks.{spec.dims.language.depth - 1}.'
    # The time table is an input; of the last prefix layer only keys and values are computed.
    unused = ('.modulation.', 'language.norm.')
    used_of_last = (f'{last}input_norm', f'{last}attention.k', f'{last}attention.v')
    return sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in network.state_dict().items()
        if not any(part in name for part in unused)
        and not name.startswith(('time_in.', 'time_out.'))
        and (not name.startswith(last) or name.startswith(used_of_last))
    )


def meta_network(spec: BundleSpec, dtype: torch.dtype) -> PiNetwork:
    """The network without numbers, its matrices in the given precision."""
    network = empty_network(spec.family, spec.dims)
    matrices = matrix_names(network)
    for name, parameter in network.named_parameters():
        if name in matrices:
            parameter.data = parameter.data.to(dtype)
    return network.eval().requires_grad_(False)


def query_scales(dims: PolicyDims, network: nn.Module) -> dict[str, float]:
    """What attention multiplies its queries by, as a factor of their projections' weights."""
    return {
        name: (dims.vision.width // dims.vision.num_heads) ** -0.5
        if name.startswith('vision.')
        else dims.language.head_dim**-0.5
        for name, _ in network.named_parameters()
        if '.attention.q.' in name
    }


class _TracedNetworks:
    """Traces on demand and keeps what was traced."""

    def __init__(self, spec: BundleSpec, precision: Precision) -> None:
        self.network = meta_network(spec, _DTYPES[precision])
        self._spec = spec
        self._precision = precision
        self._kept: dict[tuple[str, int], ExportedProgram] = {}
        row = self.network.time_conditioning(torch.zeros(1, device='meta'))
        self._conditioning = row.shape[1]

    def shapes(self, rows: int) -> GraphShapes:
        return GraphShapes(self._spec.dims, rows, self._precision, self._conditioning)

    def vision(self, images: int) -> ExportedProgram:
        return self._trace('vision', images, self.network.vision, self.shapes(1).images(images))

    def prefix(self, rows: int) -> ExportedProgram:
        module = PrefixEncoder(self.network)
        return self._trace('prefix', rows, module, self.shapes(rows).inputs('prefix'))

    def expert(self, rows: int) -> ExportedProgram:
        module = ExpertStep(self.network)
        return self._trace('expert', rows, module, self.shapes(rows).inputs('expert'))

    def _trace(
        self,
        name: str,
        size: int,
        module: nn.Module,
        inputs: Tensors,
    ) -> ExportedProgram:
        key = (name, size)
        if key not in self._kept:
            tensors: dict[str, Tensor] = {
                name: torch.zeros(shape, dtype=_DTYPES[kind], device='meta')
                for name, (kind, shape) in inputs.items()
            }
            self._kept[key] = torch.export.export(module, (), kwargs=tensors)
        return self._kept[key]


class _Writer:
    """Writes the graph files of one bundle."""

    def __init__(
        self,
        folder: Path,
        spec: BundleSpec,
        weights: BundleWeights,
        file: WeightFile,
        traced: _TracedNetworks,
    ) -> None:
        self._folder = folder
        self._spec = spec
        self._weights = weights
        self._file = file
        self._traced = traced
        self._scales = query_scales(spec.dims, traced.network)

    def vision(self) -> None:
        graph, translator = self._begin('vision')
        inputs = self._declare(graph, self._traced.shapes(1).images(1))
        (tokens,) = translator.write(self._traced.vision(1), 'vision.', inputs)
        graph.output('image_tokens', tokens)
        self._save(graph, graph_path(self._folder, 'vision'))

    def prefix(self, rows: int) -> None:
        graph, translator = self._begin('prefix')
        inputs = self._declare(graph, self._traced.shapes(rows).inputs('prefix'))
        outputs = translator.write(self._traced.prefix(rows), '', inputs)
        for name, value in zip(PREFIX_OUTPUTS, outputs, strict=True):
            graph.output(name, value)
        self._save(graph, graph_path(self._folder, 'prefix', rows))

    def expert(self, rows: int) -> None:
        graph, translator = self._begin('expert')
        inputs = self._declare(graph, self._traced.shapes(rows).inputs('expert'))
        outputs = translator.write(self._traced.expert(rows), '', inputs)
        for name, value in zip(EXPERT_OUTPUTS, outputs, strict=True):
            graph.output(name, value)
        self._save(graph, graph_path(self._folder, 'expert', rows))

    def monolithic(self, rows: int) -> None:
        graph, translator = self._begin('monolithic')
        cameras = self._spec.dims.cameras
        shapes = self._traced.shapes(rows)
        values = self._declare(graph, shapes.monolithic(self._spec.denoise_steps))
        graph.scope = 'vision/'
        (tokens,) = translator.write(self._traced.vision(cameras), 'vision.', values)
        values['image_tokens'] = tokens
        graph.scope = 'prefix/'
        prefix_inputs = {name: values[name] for name in PREFIX_INPUTS}
        past = translator.write(self._traced.prefix(rows), '', prefix_inputs)
        values |= dict(zip(PREFIX_OUTPUTS, past, strict=True))
        x = values['x']
        for step in range(self._spec.denoise_steps):
            graph.scope = f'step_{step}/'
            inputs = {name: values[name] for name in EXPERT_INPUTS if name in values}
            inputs |= self._step_inputs(graph, values, step) | {'x': x}
            x, _ = translator.write(self._traced.expert(rows), '', inputs)
        graph.output('x_next', x)
        self._save(graph, graph_path(self._folder, 'monolithic', rows))

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

    def _begin(self, name: str) -> tuple[GraphWriter, Translator]:
        graph = GraphWriter(name, self._file)
        return graph, Translator(graph, self._weights, self._scales)

    @staticmethod
    def _declare(graph: GraphWriter, inputs: Tensors) -> dict[str, Value]:
        return {
            name: graph.input(name, _DTYPES[kind], shape) for name, (kind, shape) in inputs.items()
        }

    @staticmethod
    def _save(graph: GraphWriter, path: Path) -> None:
        onnx.save_model(graph.model(), path)
