"""Products that go into 8 or 4 bits, and the ranges of their inputs on recorded observations.

Invariants:
- products with the matrices that may be in half are in 8 bits (`eight_bits`) or 4 (`four_bits`),
  and nothing else is: attention, softmax, norms, time, patches, action projections and updates are
  not;
- in 8 bits an MLP's last product is not either: the few large values of its input leave too few
  bits for the others (the demo policy's chunks were 2 to 3 times further off with it in int8);
- in 4 bits are vision and the prefix's MLPs, where most weights of a large policy are, with the
  last product of each in fp8 (in 4 bits the demo policy lost 8 moving blocks of 200 and won 1).
  The head and the prefix's attention are not: its chunks would be off by 0.13 and 0.26, where the
  bound is 0.1;
- vision, prefix and expert are calibrated apart, each on what the float32 networks hand to it; one
  and two rows together, so that a graph for any number of rows has the same scales;
- there is no monolithic graph.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from vla_convert.export.onnx.cases import Reference, passes_of
from vla_convert.export.onnx.eight_bits import EightBits
from vla_convert.export.onnx.export import meta_network, write_onnx
from vla_convert.export.onnx.four_bits import FourBits
from vla_convert.export.onnx.quantised_products import QuantisedProducts, Range, is_mlp_output
from vla_convert.export.onnx.verification import step_inputs
from vla_convert.export.onnx.weights import BundleWeights
from vla_runtime.bundle.onnx_files import (
    ONNX_FOLDER,
    ROWS,
    TEXT_INPUT,
    Attention,
    Network,
    Precision,
    engine_graphs,
    graph_name,
    vision_names,
)
from vla_runtime.bundle.schema import WEIGHTS_FILE, BundleSpec
from vla_runtime.engines.onnx.session import Placement, Session
from vla_runtime.engines.recorded_cases import Case
from vla_runtime.engines.token_embedding import TokenEmbedding
from vla_runtime.family.declaration import distinct_image_sizes
from vla_runtime.family.listing import find_family
from vla_runtime.models.blocks.layers import matrix_names

Feed = dict[str, np.ndarray]
# Ends of the names of MLPs' matrices.
_OF_MLPS = ('.gate.weight', '.up.weight', '.down.weight', '.fc1.weight', '.fc2.weight')


def quantise_onnx(
    folder: Path,
    spec: BundleSpec,
    precision: Precision,
    cases: Sequence[Case],
    beside: Precision,
    *,
    attention: Attention = 'exact',
    advance: Callable[[int], object] = lambda count: None,
) -> None:
    """Replace a bundle's float32 files by files in 8 or 4 bits.

    Args:
        folder: has the float32 files of `write_onnx`; not sealed yet.
        cases: for one row and for two, to take the ranges from; PyTorch's outputs are added.
        advance: called with 1 for each of the `quantised_steps`.

    Raises ExportError: as `Reference`.
    """
    ranges = measured_ranges(folder, spec, cases, precision, advance=advance)
    shutil.rmtree(folder / ONNX_FOLDER)
    quantised = quantised_products(ranges, beside, precision)
    write_onnx(folder, spec, precision, quantised=quantised, attention=attention)
    advance(1)


def quantised_products(
    ranges: Mapping[str, Range], beside: Precision, precision: Precision
) -> QuantisedProducts:
    """Make the products of one of the precisions `QUANTISED`; arguments as for them."""
    if precision == 'nvfp4':
        return FourBits(ranges, beside)
    return EightBits(ranges, beside, precision)


def quantised_steps(spec: BundleSpec) -> int:
    """Return the number of `advance` calls that `quantise_onnx` makes."""
    return 2 + len(engine_graphs(ROWS, len(distinct_image_sizes(spec.dims))))


def measured_ranges(
    folder: Path,
    spec: BundleSpec,
    cases: Sequence[Case],
    precision: Precision = 'int8',
    *,
    advance: Callable[[int], object] = lambda count: None,
) -> dict[str, Range]:
    """Run the float32 files; return each product's input range by matrix names (`EightBits`).

    Arguments as for `quantise_onnx`; `advance` gets 1 after PyTorch and after each graph.
    """
    sizes = distinct_image_sizes(spec.dims)
    reference = Reference(spec, BundleWeights(folder / WEIGHTS_FILE))
    reference.image_tokens(list(cases))
    reference.prefixes(list(cases))
    table = reference.chunks(list(cases))
    advance(1)
    # Generated as the graphs run.
    feeds: dict[str, Iterator[Feed]] = {
        name: _vision_feeds(cases, size)
        for size, name in zip(sizes, vision_names(len(sizes)), strict=True)
    }
    for rows in ROWS:
        of_rows = [case for case in cases if case.rows == rows]
        feeds[graph_name('prefix', rows)] = _prefix_feeds(folder, of_rows)
        feeds[graph_name('expert', rows)] = _expert_feeds(folder, spec, of_rows, table)
    matrices = matrix_names(meta_network(spec, torch.float32))
    ranges: dict[str, Range] = {}
    for name in engine_graphs(ROWS, len(sizes)):
        for matrix, found in _ranges_of(
            folder / ONNX_FOLDER / name, matrices, precision, feeds[name]
        ):
            known = ranges.get(matrix, found)
            ranges[matrix] = min(known[0], found[0]), max(known[1], found[1])
        advance(1)
    return ranges


def _ranges_of(
    path: Path, matrices: set[str], precision: Precision, feeds: Iterator[Feed]
) -> Iterator[tuple[str, Range]]:
    """Yield (matrix, range of its product's input) of every run of a graph."""
    model = onnx.load(path, load_external_data=False)
    inputs = inputs_of_products(model.graph, matrices, precision)
    if not inputs:
        return
    for name in dict.fromkeys(name for _, name in inputs):
        for operator in ('ReduceMin', 'ReduceMax'):
            end = f'{name}/{operator}'
            model.graph.node.append(helper.make_node(operator, [name], [end], keepdims=0))
            port = helper.make_tensor_value_info(end, TensorProto.FLOAT, [])
            model.graph.output.append(port)
    session = Session(path, Placement.of('cpu'), model=model.SerializeToString())
    for feed in feeds:
        found = session.run(feed)
        for matrix, name in inputs:
            yield matrix, (float(found[f'{name}/ReduceMin']), float(found[f'{name}/ReduceMax']))


def inputs_of_products(
    graph: onnx.GraphProto, matrices: set[str], precision: Precision = 'int8'
) -> list[tuple[str, str]]:
    """Names of matrix and input of every product that is rounded, in a float32 graph."""
    constants = {item.name: item for item in graph.initializer}
    is_rounded = _in_four_bits if precision == 'nvfp4' else _in_eight_bits
    return [
        (node.input[1], node.input[0])
        for node in graph.node
        if node.op_type == 'MatMul'
        and set(node.input[1].split('+')) <= matrices
        # A product of constants is made at load.
        and node.input[0] not in constants
        and is_rounded(graph.name, constants[node.input[1]])
    ]


def _in_eight_bits(network: str, matrix: onnx.TensorProto) -> bool:
    """Return whether the product with a matrix (in, out) is in 8 bits: all but an MLP's last."""
    return not is_mlp_output(*matrix.dims)


def _in_four_bits(network: str, matrix: onnx.TensorProto) -> bool:
    """Return whether the product with a matrix is in 4 bits, an MLP's last in 8."""
    return network == 'vision' or (network == 'prefix' and matrix.name.endswith(_OF_MLPS))


def _vision_feeds(cases: Sequence[Case], size: tuple[int, int]) -> Iterator[Feed]:
    for case in cases:
        for image in case.pixels:
            if image.shape[1:] == size:
                yield {'pixels': image[None]}


def _expert_feeds(
    folder: Path, spec: BundleSpec, cases: Sequence[Case], table: np.ndarray
) -> Iterator[Feed]:
    """Every denoise step, or every compared pass of a `tokens` head."""
    if find_family(spec.family).head == 'tokens':
        text = _token_embedding(folder, 'expert')
        for case in cases:
            yield from (feed for feed, _ in passes_of(case, text))
        return
    for case in cases:
        for k in range(spec.denoise_steps):
            yield step_inputs(spec, case, case.past, table, k, case.reference['trace'][k])


def _token_embedding(folder: Path, network: Network) -> TokenEmbedding | None:
    """Open the token embedding where a network's graph takes rows of it."""
    graph = onnx.load(folder / ONNX_FOLDER / graph_name(network), load_external_data=False).graph
    hosted = any(port.name == TEXT_INPUT for port in graph.input)
    return TokenEmbedding.of(folder, 'float32') if hosted else None


def _prefix_feeds(folder: Path, cases: Sequence[Case]) -> Iterator[Feed]:
    table = _token_embedding(folder, 'prefix')
    for case in cases:
        prompt = case.prefix_inputs if table is None else table.replace_tokens(case.prefix_inputs)
        tokens = {'image_tokens': case.reference['image_tokens']}
        yield {**tokens, 'image_mask': case.image_mask, **prompt}
