"""Walks exported graphs: half precision only where rounding does no harm.

Numbers alone cannot tell: an index computed in half is right for a short prompt and wrong for a
long one, and a norm in half is lost among the roundings of half matrix products. So the graph
itself is walked, node by node, on the types that ONNX infers; `graph_origins.py` follows every
tensor from where its numbers come from to where they are used. The rules:
- in float16 or bfloat16 there are two products and nothing else that computes: by one of the
  bundle's matrices (`is_half_matrix`), and of attention weights and values;
- what is rounded for such a product goes into it, or into the past, and is never widened again,
  but for queries and keys, whose product is in float32; so scores, norms, softmax, time, guidance
  mix, plan term and Euler update are in float32;
- no input, position, rotary angle, count or constant is rounded at all;
- no float becomes an integer and no truth value a float, but for the terms that hide keys, which go
  nowhere but onto scores: indices are integers from end to end, and rotary angles are made of such
  integers;
- the operators are those that the export writes, and none of them has a subgraph.
`graph_constants.py` checks the numbers that stand in the graph. This is a test of our exporter:
it knows the names of the parameters that every family shares.
"""

from __future__ import annotations

from pathlib import Path

from graph_constants import constant_faults
from graph_origins import origin_faults

from vla_convert.export.onnx.precision import load_graph, tensor_types, type_faults
from vla_convert.export.onnx.verification import check_graphs
from vla_convert.export.onnx.weights import BundleWeights
from vla_runtime.bundle.onnx_files import ONNX_FOLDER, Precision, graph_names
from vla_runtime.bundle.schema import WEIGHTS_FILE


def precision_faults(path: Path, precision: Precision) -> list[str]:
    """Sentences, one per fault in the types and origins of a graph file; empty if all is well."""
    model = load_graph(path)
    weights = BundleWeights(path.parents[1] / WEIGHTS_FILE)
    columns = {name: weights.shape(name)[0] for name in weights.names}
    origins = origin_faults(model.graph, tensor_types(path, model), columns)
    return type_faults(path, precision) + origins


def bundle_faults(bundle: Path) -> list[str]:
    """Sentences, one per fault in the graphs of a bundle, with the file's name."""
    precision, _ = check_graphs(bundle)
    weights = BundleWeights(bundle / WEIGHTS_FILE)
    return [
        f'{name}: {fault}'
        for name in graph_names()
        for fault in (
            *precision_faults(bundle / ONNX_FOLDER / name, precision),
            *constant_faults(bundle / ONNX_FOLDER / name, weights),
        )
    ]
