"""TensorRT for RTX for tests: the real parser and builder, without a GPU.

It is installed, or beside the environment, where `./run test` puts it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

import onnx
import pytest
import torch
from made_once import made_once
from onnx import TensorProto
from onnx_bundles import copy_weights, tiny_onnx_bundle

from vla_convert.export.onnx.export import meta_network, write_onnx
from vla_convert.export.onnx.precision import tensor_types
from vla_convert.export.onnx.quantised import inputs_of_products, quantised_products
from vla_convert.export.onnx.quantised_products import Range
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import (
    ONNX_FOLDER,
    QUANTISED,
    ROWS,
    Precision,
    engine_graphs,
    read_graph_facts,
)
from vla_runtime.engines.tensorrt.adapter import BuildOptions, BuiltEngine, TensorRT
from vla_runtime.engines.tensorrt.kernel_plan import Kernel
from vla_runtime.engines.tensorrt.rtx import RTX_MODULES
from vla_runtime.models.blocks.layers import matrix_names

FAMILIES = (
    *('pi05', 'pi0', 'smolvla', 'act', 'groot_n15', 'groot_n16', 'groot_n17', 'evo1', 'bitvla'),
    *('diffusion', 'multi_task_dit', 'multi_task_dit_flow', 'openvla_oft', 'xvla'),
    *('vla_jepa', 'molmoact2'),
)
PRECISIONS: tuple[Precision, ...] = ('float32', 'float16', 'bfloat16', 'int8', 'fp8', 'nvfp4')
# One plan for all of them; 12.1 (GB10) has the kernels of 12.0.
TARGETS = ('sm86', 'sm89', 'sm120')
FP8_TARGETS, NVFP4_TARGETS = ('sm89', 'sm120'), ('sm120',)
GRAPHS = ('vision.onnx', 'prefix_rows.onnx', 'expert_rows.onnx')
_BESIDE = Path(sys.prefix) / 'tensorrt_rtx'
_TYPES = {
    TensorProto.FLOAT: 'float32',
    TensorProto.FLOAT16: 'float16',
    TensorProto.BFLOAT16: 'bfloat16',
    TensorProto.INT8: 'int8',
    TensorProto.FLOAT8E4M3FN: 'fp8',
    TensorProto.FLOAT4E2M1: 'fp4',
}

_INSTALLED = next((name for name in RTX_MODULES if importlib.util.find_spec(name)), None)
needs_rtx = pytest.mark.skipif(
    _INSTALLED is None and not _BESIDE.is_dir(),
    reason='TensorRT for RTX is neither installed nor beside the environment; ./run test puts it '
    'there, from the package index',
)


@cache
def bindings() -> ModuleType:
    """The real library, which stays unknown to the process where it lies beside the environment.

    Raises:
        ImportError: there is none.
    """
    if _INSTALLED is not None:
        return importlib.import_module(_INSTALLED)
    sys.path.insert(0, str(_BESIDE))
    before = set(sys.modules)
    try:
        return importlib.import_module(RTX_MODULES[-1])
    finally:
        sys.path.remove(str(_BESIDE))
        for name in {*sys.modules} - before:
            if name.startswith('tensorrt_rtx'):
                del sys.modules[name]


@cache
def adapter() -> TensorRT:
    """The adapter of the real library; one for the process, as its logger is."""
    return TensorRT(bindings())


def tiny_graphs(family: str, precision: Precision) -> Path:
    """Folder of a tiny policy's graphs; not to be changed."""
    if precision not in QUANTISED:
        return tiny_onnx_bundle(family, precision) / ONNX_FOLDER

    def write(folder: Path) -> None:
        _write_quantised(family, precision, folder)

    return made_once(f'{family}_{precision}_uncalibrated', write) / ONNX_FOLDER


def targets_of(precision: Precision) -> tuple[str, ...]:
    """All of `TARGETS` that have products of a precision."""
    return {'fp8': FP8_TARGETS, 'nvfp4': NVFP4_TARGETS}.get(precision, TARGETS)


def _write_quantised(family: str, precision: Precision, folder: Path) -> None:
    """Write graphs in 8 or 4 bits whose ranges nobody measured: a builder does not look at them."""
    source = tiny_onnx_bundle(family)
    folder.mkdir()
    copy_weights(source, folder)
    spec = read_bundle(source, verify=False).spec
    quantised = quantised_products(uncalibrated(source, precision), 'bfloat16', precision)
    write_onnx(folder, spec, precision, quantised=quantised)


def uncalibrated(source: Path, precision: Precision = 'int8') -> dict[str, Range]:
    """Ranges of a float32 bundle's products, as if all were alike."""
    matrices = matrix_names(meta_network(read_bundle(source, verify=False).spec, torch.float32))
    graphs = (
        onnx.load(source / ONNX_FOLDER / name, load_external_data=False).graph
        for name in engine_graphs(ROWS)
    )
    return {
        matrix: (-3.0, 3.0)
        for graph in graphs
        for matrix, _ in inputs_of_products(graph, matrices, precision)
    }


def build(
    path: Path,
    lengths: tuple[int, ...] = (1, 2),
    targets: tuple[str, ...] = TARGETS,
    using: TensorRT | None = None,
) -> BuiltEngine:
    """Build a graph that export wrote, as `vla_runtime build` does."""
    facts = read_graph_facts(path.parent, [path.name])
    options = BuildOptions(
        reduced=facts.beside != 'float32',
        int8_products=facts.graphs[path.name].int8_products,
        lengths=lengths,
        targets=targets,
    )
    return (using or adapter()).build(path, options)


def wrong_products(path: Path, kernels: list[Kernel]) -> list[str]:
    """Products that a plan multiplies in other types than the graph file says."""
    factors = _factors_of(path)
    wrong = []
    for kernel in kernels:
        expected = {factors[name] for name in kernel.products}
        # A kernel of several products tells the types of one of them.
        if expected and kernel.kind != 'kgen' and kernel.factors not in expected:
            wrong.append(f'{kernel.products} in {kernel.factors}, the file says {expected}')
    return wrong


def unplanned(path: Path, kernels: list[Kernel]) -> set[str]:
    """Products of a graph file that no kernel of a plan computes."""
    return set(_factors_of(path)) - {name for kernel in kernels for name in kernel.products}


@cache
def _factors_of(path: Path) -> Mapping[str, tuple[str, ...]]:
    """Types of both factors of every product of a graph, those before they are widened."""
    model = onnx.load(path, load_external_data=False)
    types = tensor_types(path, model)
    made = {name: node for node in model.graph.node for name in node.output}

    def type_of(name: str) -> str:
        node = made.get(name)
        if node is not None and node.op_type == 'DequantizeLinear':
            name = node.input[0]
        return _TYPES[types[name]]

    return {
        node.name: tuple(type_of(name) for name in node.input)
        for node in model.graph.node
        if node.op_type == 'MatMul'
    }
