"""Bundle sizes and memory in 16, 8 and 4 bits at published sizes, on paper, on Thor and RTX 5090.

    python benchmark/bits_on_paper.py

The exporter itself writes every family's graphs, over weights that are all zero and a weights file
that only counts; so which products are in how many bits is its word. `weights.data` are the ONNX
files' weights, `engine_weights` those that TensorRT's engines hold for one and two prompt rows.
Memory adds keys, values and activations (`vla_runtime roofline`), with all else than the rounded
products in bfloat16 or float32. Nothing was measured.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import torch
from export_memory import full_size
from measurement import write_result
from torch import Tensor

from vla_runtime.bundle.graph_facts import read_graph_facts
from vla_runtime.bundle.onnx_files import (
    ONNX_FOLDER,
    QUANTISED,
    ROWS,
    ROWS_GRAPHS,
    Precision,
    engine_graphs,
    vision_names,
)
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.export.onnx import export
from vla_runtime.export.onnx.quantised import inputs_of_products, quantised_products
from vla_runtime.export.onnx.quantised_products import Range
from vla_runtime.export.onnx.weights import ONNX_TYPE, WeightFile
from vla_runtime.families.blocks.layers import matrix_names
from vla_runtime.families.flow_network import empty_network
from vla_runtime.families.operation_counts import count_operations
from vla_runtime.family.declaration import distinct_image_sizes
from vla_runtime.family.listing import find_family
from vla_runtime.performance.devices import DEVICES, GIB
from vla_runtime.performance.roofline import fits, memory_need
from vla_runtime.selftest.policies import read_policy, unpack

FAMILIES = ('pi05', 'pi0', 'smolvla', 'groot_n15', 'groot_n17', 'evo1', 'act')
PRECISIONS: tuple[Precision, ...] = ('bfloat16', 'int8', 'fp8', 'nvfp4')
BESIDE: Precision = 'bfloat16'
ON = ('thor', 'rtx-5090')
PACKAGES = ('torch', 'onnx', 'numpy')


class Zeros:
    """A bundle's weights by name and shape."""

    def __init__(self, spec: BundleSpec) -> None:
        state = empty_network(spec.family, spec.dims).state_dict()
        self._shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}

    @property
    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        return torch.zeros(self._shapes[name])


class CountedFile(WeightFile):
    """A weights file that keeps the size of what would be written."""

    def named(self, name: str, dtype: torch.dtype, shape: Any, make: Any) -> onnx.TensorProto:
        size = math.prod(shape) * (torch.empty((), dtype=dtype).element_size())
        if ONNX_TYPE[dtype] == onnx.TensorProto.FLOAT4E2M1:
            size //= 2
        self._places.setdefault(name, (0, size))
        return self._proto(name, dtype, shape, self._places[name])

    def _write(self, value: Tensor) -> tuple[int, int]:
        return 0, value.numel() * value.element_size()

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self._places.values())


@contextmanager
def written(spec: BundleSpec, precision: Precision, quantised: Any = None) -> Iterator[Any]:
    """Write graphs into a folder for as long as it is asked; yields it and the counted file."""
    files: list[CountedFile] = []

    def counted(folder: Path, advance: Any) -> CountedFile:
        files.append(CountedFile(folder, advance))
        return files[-1]

    with (
        tempfile.TemporaryDirectory() as made,
        mock.patch.object(export, 'BundleWeights', lambda path: Zeros(spec)),
        mock.patch.object(export, 'WeightFile', counted),
    ):
        export.write_onnx(Path(made), spec, precision, quantised=quantised)
        yield Path(made) / ONNX_FOLDER, files[-1]


def ranges_of(spec: BundleSpec, precision: Precision) -> dict[str, Range]:
    """Ranges of all products that an export rounds; what they are does not move a size."""
    matrices = matrix_names(export.meta_network(spec, torch.float32))
    with written(spec, 'float32') as (folder, _):
        names = engine_graphs(ROWS, len(distinct_image_sizes(spec.dims)))
        graphs = [onnx.load(folder / name, load_external_data=False).graph for name in names]
    return {
        matrix: (-1.0, 1.0)
        for graph in graphs
        for matrix, _ in inputs_of_products(graph, matrices, precision)
    }


def spec_of(family: str) -> BundleSpec:
    with tempfile.TemporaryDirectory() as unpacked:
        unpack(Path(unpacked))
        return full_size(read_policy(Path(unpacked), family)[0].spec)


def measure(family: str) -> dict[str, Any]:
    """Sizes of one family in every precision."""
    spec = spec_of(family)
    counts = count_operations(family, find_family(family).presets[family])
    need = memory_need(counts, 'tensorrt', precision=BESIDE, rows=max(ROWS))
    found: dict[str, Any] = {
        'parameters': counts.matrices + counts.others,
        'weights.safetensors': 2 * (counts.matrices + counts.others),
        'keys_values_activations': need.past + need.activations,
    }
    for precision in PRECISIONS:
        rounded = (
            quantised_products(ranges_of(spec, precision), BESIDE, precision)
            if precision in QUANTISED
            else None
        )
        with written(spec, precision, rounded) as (folder, file):
            names = (*vision_names(len(distinct_image_sizes(spec.dims))), *ROWS_GRAPHS)
            graphs = read_graph_facts(folder, names).graphs
            weights = sum(facts.weight_bytes for facts in graphs.values())
            products = sum(facts.int8_products for facts in graphs.values())
            found[precision] = {
                'products_rounded': products if rounded else 0,
                'weights.data': file.bytes,
                'engine_weights': weights,
                'memory': {name: memory_on(name, replace(need, weights=weights)) for name in ON},
            }
    return found


def memory_on(name: str, need: Any) -> dict[str, Any]:
    """Bytes on a device, and their part of what a policy can have there."""
    device = DEVICES[name]
    free = (device.memory_gib - device.reserved_gib) * GIB
    return {
        'bytes': need.total,
        'of_free': round(need.total / free, 3),
        'fits': fits(need, device),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--families', nargs='*', default=FAMILIES, choices=FAMILIES)
    parser.add_argument('--out', type=Path)
    arguments = parser.parse_args(argv)
    figures = {}
    for family in arguments.families:
        figures[family] = measure(family)
        for precision in PRECISIONS:
            one = figures[family][precision]
            shares = ', '.join(f'{name} {m["of_free"]:.1%}' for name, m in one['memory'].items())
            print(
                f'{family:10} {precision:9} files {one["weights.data"] / 1e9:5.2f} GB, engines '
                f'{one["engine_weights"] / 1e9:5.2f} GB, memory {shares}',
                flush=True,
            )
    print('wrote', write_result('bits_on_paper', figures, PACKAGES, arguments.out).name)
    return 0


if __name__ == '__main__':
    sys.exit(main())
