"""Facts of a bundle's ONNX graphs, in `onnx/graphs.json` beside them.

The exporter writes them, so that nothing else has to read ONNX files: a Jetson that builds engines
has TensorRT, cuda-bindings and numpy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from vla_runtime.bundle.onnx_files import GRAPHS_FILE, Precision
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.files.quotes import quoted


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
    """Write `graphs.json` into the folder of the graphs."""
    text = json.dumps(asdict(exported), indent=1) + '\n'
    (folder / GRAPHS_FILE).write_text(text, encoding='utf-8')


def read_graph_facts(folder: Path, names: Iterable[str]) -> ExportedGraphs:
    """Read the facts of some graphs.

    Raises:
        JsonError: the file is missing, damaged, or lacks one of the graphs.
    """
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
