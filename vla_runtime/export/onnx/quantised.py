"""Graphs in int8 for ONNX Runtime on a CPU, made by its own static quantiser.

Invariants:
- matrix products with the matrices that may be in half are in 8 bits (weights signed, a scale a
  column; activations unsigned, ranges measured on recorded observations), and nothing else is:
  attention scores, softmax, norms, time, patches, action projections and updates are float32;
- an MLP's last product is float32 too: the few large values of its input leave 8 bits too few for
  the others (the demo policy's chunks were 2 to 3 times further off with it);
- vision, prefix and expert are quantised apart, each on what the float32 networks hand to it;
- the graphs for one and two rows refer to one weights.data, as in every precision;
- there is no monolithic graph, and none for TensorRT.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)
from onnxruntime.quantization.quant_utils import add_pre_process_metadata

from vla_runtime.bundle.schema import WEIGHTS_FILE, BundleSpec
from vla_runtime.engines.onnx.files import (
    ONNX_FOLDER,
    PRECISION_KEY,
    ROWS,
    TEXT_INPUT,
    engine_graphs,
    graph_name,
    vision_names,
)
from vla_runtime.engines.text_table import TextTable
from vla_runtime.export.cases import Case
from vla_runtime.export.graph_facts import read_graph_facts, write_graph_facts
from vla_runtime.export.onnx.cases import Reference
from vla_runtime.export.onnx.export import graph_facts_of, meta_network
from vla_runtime.export.onnx.verification import step_inputs
from vla_runtime.export.onnx.weights import BundleWeights, WeightFile
from vla_runtime.families.blocks.layers import matrix_names
from vla_runtime.families.family import distinct_image_sizes

Feed = dict[str, np.ndarray]
# A matrix that shrinks its input by more than this is an MLP's last.
_MLP_RATIO = 2


def quantise_onnx(
    folder: Path,
    spec: BundleSpec,
    cases: Sequence[Case],
    *,
    advance: Callable[[int], object] = lambda count: None,
) -> None:
    """Replace the float32 files that `write_onnx` made for int8 by files in int8.

    Args:
        folder: of the bundle, not sealed yet.
        spec: its policy.yaml.
        cases: to take the ranges from, for one row and for two; PyTorch's outputs are added.
        advance: called with 1 for each of the `quantised_steps`.

    Raises:
        ExportError: as `Reference`.
    """
    graphs, sizes = folder / ONNX_FOLDER, distinct_image_sizes(spec.dims)
    reference = Reference(spec, BundleWeights(folder / WEIGHTS_FILE))
    reference.image_tokens(list(cases))
    reference.prefixes(list(cases))
    table = reference.chunks(list(cases))
    advance(1)
    # Made one by one as the quantiser asks for them.
    feeds: dict[str, Iterator[Feed]] = {
        name: _vision_feeds(cases, size)
        for size, name in zip(sizes, vision_names(len(sizes)), strict=True)
    }
    for rows in ROWS:
        of_rows = [case for case in cases if case.rows == rows]
        feeds[graph_name('prefix', rows)] = _prefix_feeds(folder, of_rows)
        feeds[graph_name('expert', rows)] = (
            step_inputs(spec, case, case.past, table, k, case.reference['trace'][k])
            for case in of_rows
            for k in range(spec.denoise_steps)
        )
    matrices = matrix_names(meta_network(spec, torch.float32))
    work = graphs / 'quantised'
    work.mkdir()
    for name in engine_graphs(ROWS, len(sizes)):
        _quantise(graphs / name, work / name, matrices, feeds[name])
        advance(1)
    _replace_graphs(graphs, work, len(sizes))


def quantised_steps(spec: BundleSpec) -> int:
    """Return the number of `advance` calls that `quantise_onnx` makes."""
    return 1 + len(engine_graphs(ROWS, len(distinct_image_sizes(spec.dims))))


class _Feeds(CalibrationDataReader):
    """Inputs of one graph, as ONNX Runtime's quantiser asks for them."""

    def __init__(self, feeds: Iterator[Feed]) -> None:
        self._feeds = feeds

    def get_next(self) -> Feed | None:
        return next(self._feeds, None)


def _quantise(path: Path, target: Path, matrices: set[str], feeds: Iterator[Feed]) -> None:
    model = onnx.load(path, load_external_data=False)
    constants = {item.name: item for item in model.graph.initializer}
    products = [
        node.name
        for node in model.graph.node
        if node.op_type == 'MatMul'
        and set(node.input[1].split('+')) <= matrices
        # A product of constants is made at load.
        and node.input[0] not in constants
        and not _leaves_mlp(constants[node.input[1]])
    ]
    if not products:
        onnx.save(onnx.load(path), target)
        return
    # The graph is as lean as that step makes one, and the quantiser would warn without its mark.
    add_pre_process_metadata(model)
    onnx.save_model(model, path)
    quantize_static(
        path,
        target,
        _Feeds(feeds),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=['MatMul'],
        nodes_to_quantize=products,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod.MinMax,
        use_external_data_format=True,
        extra_options={
            'MatMulConstBOnly': True,
            # Products leave as float32: what follows them is computed there.
            'OpTypesToExcludeOutputQuantization': ['MatMul'],
            'QDQOpTypePerChannelSupportToAxis': {'MatMul': 1},
        },
    )
    quantised = onnx.load(target, load_external_data=False)
    _keep_unrounded(quantised.graph, set(products))
    onnx.save_model(quantised, target)


def _leaves_mlp(matrix: onnx.TensorProto) -> bool:
    """Return whether a matrix (in, out) takes what an MLP's activation made, of many outliers."""
    wide, narrow = matrix.dims
    return bool(wide > _MLP_RATIO * narrow)


def _keep_unrounded(graph: onnx.GraphProto, products: set[str]) -> None:
    """Give the tensors as they were to all but these products; the quantiser rounds for all."""
    made = {node.output[0]: node for node in graph.node}
    for node in graph.node:
        if node.name in products or node.op_type in ('QuantizeLinear', 'DequantizeLinear'):
            continue
        for index, name in enumerate(node.input):
            rounded = made.get(name)
            if rounded is not None and rounded.op_type == 'DequantizeLinear':
                node.input[index] = made[rounded.input[0]].input[0]


def _replace_graphs(graphs: Path, work: Path, sizes: int) -> None:
    """Put the quantised graphs in place of the others, over one weights.data."""
    names = engine_graphs(ROWS, sizes)
    exported = read_graph_facts(graphs, names)
    facts = {}
    with WeightFile(graphs) as file:
        for name in names:
            model = onnx.load(work / name)
            for tensor in model.graph.initializer:
                numbers = torch.from_numpy(numpy_helper.to_array(tensor).copy())
                tensor.CopyFrom(file.constant(tensor.name, numbers))
            model.metadata_props.add(key=PRECISION_KEY, value='int8')
            onnx.save_model(model, graphs / name)
            facts[name] = graph_facts_of(model)
    shutil.rmtree(work)
    write_graph_facts(graphs, replace(exported, graphs=facts))


def _vision_feeds(cases: Sequence[Case], size: tuple[int, int]) -> Iterator[Feed]:
    for case in cases:
        for image in case.pixels:
            if image.shape[1:] == size:
                yield {'pixels': image[None]}


def _prefix_feeds(folder: Path, cases: Sequence[Case]) -> Iterator[Feed]:
    graph = onnx.load(folder / ONNX_FOLDER / graph_name('prefix'), load_external_data=False).graph
    hosted = any(port.name == TEXT_INPUT for port in graph.input)
    table = TextTable.of(folder, 'float32') if hosted else None
    for case in cases:
        prompt = case.prefix_inputs if table is None else table.replace_tokens(case.prefix_inputs)
        tokens = {'image_tokens': case.reference['image_tokens']}
        yield {**tokens, 'image_mask': case.image_mask, **prompt}
