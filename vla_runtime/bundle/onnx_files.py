"""Names of a bundle's ONNX files, and of the inputs and outputs of each.

    onnx/vision.onnx, vision_s2.onnx, …    one camera's pixels to its image tokens, a file for each
                                           different size of the cameras' images
    onnx/prefix.onnx, prefix_r2.onnx       image tokens and 1 or 2 prompt rows to keys and values
    onnx/expert.onnx, expert_r2.onnx       one denoise step over 1 or 2 rows, or one pass of a
                                           `tokens` head
    onnx/prefix_rows.onnx, expert_rows     the same for any number of rows, for TensorRT
    onnx/monolithic.onnx, ..._r2.onnx      everything, all denoise steps unrolled: the baseline
    onnx/weights.data                      the weights of all of them, once
    onnx/graphs.json                       operators and bytes of each, for a build; the text table
    onnx/operations.json                   operations and bytes of each run, for the roofline
    onnx/cases.npz                         recorded inputs, and what PyTorch gave for them

In 8 and 4 bits, of a `tokens` or a `diffusion` head, and of more than 50 steps there are no
`monolithic` graphs. Every shape is static but for the rows of `_rows`; shapes are those of
engines/README.md. The monolithic graph takes `pixels` (V, 3, S, S) and whole tables of
time_conditioning (N, C), t (N,) and plan_weight (N, 1, H, 1), and gives the chunk. With images of
several sizes it takes one input a camera, `pixels_0` (1, 3, height, width) and so on. Nothing is
imported here, so every runtime's engine may use this.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.files.quotes import quoted

Network = Literal['vision', 'prefix', 'expert', 'monolithic']
Precision = Literal['float32', 'float16', 'bfloat16', 'int8', 'fp8', 'nvfp4']
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# Those with products in 8 or 4 bits: both factors rounded, to ranges that observations had.
QUANTISED: tuple[Precision, ...] = ('int8', 'fp8', 'nvfp4')
# TensorRT's operator that rounds an input to 4-bit floats, as it comes; numbers of a block, and the
# sizes that a number can have.
FP4_DOMAIN, FP4_ROUNDING = 'trt', 'TRT_FP4DynamicQuantize'
FP4_BLOCK = 16
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Products and softmax written out, or ONNX's own operator.
Attention = Literal['exact', 'fused']

ONNX_FOLDER = 'onnx'
WEIGHTS_DATA = 'weights.data'
GRAPHS_FILE = 'graphs.json'
CASES_FILE = 'cases.npz'
# Of a graph's metadata; where it is missing, keys and values are in the files' precision.
PRECISION_KEY = 'precision'
# Numbers of prompt rows that are exported: 1, and 2 for guidance.
ROWS = (1, 2)
# Of the graphs with a free axis of rows.
ROWS_ENDING = '_rows.onnx'
ROWS_GRAPHS = (f'prefix{ROWS_ENDING}', f'expert{ROWS_ENDING}')

# Inputs and outputs of every family's graphs. `prefix` also takes the family's prefix inputs; its
# outputs are inputs of `expert` under the same names, beside the family's head inputs.
IMAGE_INPUTS = ('image_tokens', 'image_mask')
# The family's input that is looked up in a text table, and the rows that `prefix` takes in its
# place, (R, L, W) float32 (`engines.token_embedding`).
TOKENS = 'tokens'
TEXT_INPUT = 'text_embeddings'
STEP_INPUTS = ('time_conditioning', 't', 'dt', 'row_weight', 'plan', 'plan_weight')
# Of a `diffusion` head, in the same order: a scheduler's update and noise are in place of the
# flow's time and step.
SCHEDULER_INPUTS = ('time_conditioning', 'update', 'step_noise', *STEP_INPUTS[3:])
STEP_OUTPUTS = ('x_next', 'velocity')
# Of the expert's graph of a `tokens` head: a row of the text table in place of the token. `logits`
# of the first token come from the prefix.
LOGITS = 'logits'
ANSWER_INPUTS = ('answer_key', 'answer_value')
PASS_INPUTS = (TOKENS, 'place', *ANSWER_INPUTS)
PASS_OUTPUTS = (LOGITS, 'token', 'key', 'value')


def graph_name(network: Network, rows: int = 1) -> str:
    """File name of a network's graph for this number of prompt rows (`vision` has no rows)."""
    suffix = f'_r{rows}' if rows > 1 and network != 'vision' else ''
    return f'{network}{suffix}.onnx'


def graph_path(bundle_folder: Path, network: Network, rows: int = 1) -> Path:
    return bundle_folder / ONNX_FOLDER / graph_name(network, rows)


def vision_names(sizes: int = 1) -> list[str]:
    """File names of the vision graphs of so many image sizes, in the order of the sizes."""
    return ['vision.onnx', *(f'vision_s{number}.onnx' for number in range(2, sizes + 1))]


def step_inputs(*, has_scheduler: bool) -> tuple[str, ...]:
    """Inputs of `expert` that a step has besides x and what the family declares."""
    return SCHEDULER_INPUTS if has_scheduler else STEP_INPUTS


def graph_names(sizes: int = 1, monolithic: bool = True) -> list[str]:
    """File names of all graphs that an export writes, for so many image sizes."""
    networks: list[Network] = ['prefix', 'expert']
    if monolithic:
        networks.append('monolithic')
    of_rows = [graph_name(network, rows) for network in networks for rows in ROWS]
    return [*vision_names(sizes), *of_rows]


def engine_graphs(rows: Iterable[int], sizes: int = 1) -> tuple[str, ...]:
    """File names of the graphs that an engine for these numbers of prompt rows needs."""
    pair: tuple[Network, ...] = ('prefix', 'expert')
    of_rows = (graph_name(network, count) for count in rows for network in pair)
    return (*vision_names(sizes), *of_rows)


# --------------------------------------------------------------------------------------------------
# Facts of a bundle's ONNX graphs, `onnx/graphs.json`: a Jetson builds engines without reading ONNX
# files.


@dataclass(frozen=True)
class GraphFacts:
    """Facts of one graph that a build needs.

    Attributes:
        opset: version of ONNX's own operators.
        operators: name to number of nodes.
        weight_bytes: bytes of all its weights, in the graph and in weights.data.
        int8_products: number of products in 8 or 4 bits.
    """

    opset: int
    operators: Mapping[str, int]
    weight_bytes: int
    int8_products: int = 0


@dataclass(frozen=True)
class ExportedGraphs:
    """Contents of `graphs.json`.

    Attributes:
        precision: precision of the large matrices, in every graph.
        beside: precision of those that are left out of int8; else the same.
        text_table: tensor in weights.safetensors that the prefix graphs leave to the host; empty
            where they hold it, and without language.
        graphs: file name to facts.
    """

    precision: Precision
    beside: Precision
    text_table: str
    graphs: Mapping[str, GraphFacts]


def write_graph_facts(folder: Path, exported: ExportedGraphs) -> None:
    text = json.dumps(asdict(exported), indent=1) + '\n'
    (folder / GRAPHS_FILE).write_text(text, encoding='utf-8')


def read_graph_facts(folder: Path, names: Iterable[str]) -> ExportedGraphs:
    """Read the facts of some graphs (JsonError: missing, damaged, or without one of them)."""
    document = read_json(folder / GRAPHS_FILE)
    precision = _precision(document, 'precision')
    beside = _precision(document, 'beside', precision)
    stated = document.mapping('graphs')
    text_table = document.get('text_table', str)
    return ExportedGraphs(
        precision, beside, text_table, {name: _graph(stated.mapping(name)) for name in names}
    )


def _precision(document: JsonMapping, key: str, default: Precision | None = None) -> Precision:
    """Return a field that is a precision; the default where it is missing, as in older files."""
    value: Precision = document.get(key, str, *([default] if default else []))
    if value not in get_args(Precision):
        expected = ' or '.join(get_args(Precision))
        raise document.error(key, f'{quoted(value)} where {expected} is expected')
    return value


def _graph(stated: JsonMapping) -> GraphFacts:
    document = stated.mapping('operators')
    operators = {name: document.get(name, int) for name in document.values}
    # Older files do not say it: in 8 bits each product widens a matrix, beside rounded inputs.
    counted = operators.get('DequantizeLinear', 0) - operators.get('QuantizeLinear', 0)
    return GraphFacts(
        opset=stated.get('opset', int),
        operators=operators,
        weight_bytes=stated.get('weight_bytes', int),
        int8_products=stated.get('int8_products', int, counted),
    )
