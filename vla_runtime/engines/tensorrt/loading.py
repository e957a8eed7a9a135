"""Checks before engines are loaded, and loading them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from vla_runtime.engines.closing import close_all, close_on_error
from vla_runtime.engines.cuda_driver import CudaError
from vla_runtime.engines.cuda_runtime import CudaRuntime
from vla_runtime.engines.free_memory import LOAD_RESERVE_BYTES, free_device_bytes
from vla_runtime.engines.tensorrt.adapter import (
    Network,
    TensorRT,
    TensorRTError,
    TensorRTMemoryError,
)
from vla_runtime.engines.tensorrt.rtx import CompiledKernels
from vla_runtime.engines.tensorrt.store import ENGINES, Metadata, rebuild_command
from vla_runtime.family.declaration import PolicyDims, distinct_image_sizes


@contextmanager
def closed_on_failure(
    device_index: int, networks: Mapping[str, Network], device: str, bundle: Path
) -> Iterator[CudaRuntime]:
    """Open a runtime on a device; close it and the networks where the block fails.

    An engine that failed is a cycle, and would hold its networks while another backend is loaded.

    Raises:
        ValueError: no such device, or not enough memory on it; says what mends it.
    """
    try:
        runtime = CudaRuntime(device_index)

        with close_on_error(runtime.close), close_on_error(partial(_close, networks)):
            yield runtime
    except CudaError as error:
        if not error.out_of_memory:
            raise
        raise ValueError(
            f"device '{device}': not enough memory for the engines of {bundle}: {error}; free "
            'memory, or build for one prompt row (--rows 1), which takes fewer buffers'
        ) from error


def load_networks(
    adapter: TensorRT,
    runtime: CudaRuntime,
    folder: Path,
    metadata: Metadata,
    rows: int,
    bundle: Path,
    compiled: CompiledKernels | None = None,
) -> dict[str, Network]:
    """Load engine files; return a network for every number of prompt rows, by `network_name`.

    Raises:
        ValueError: TensorRT refuses one, or memory is short; says what mends it. None stays loaded.
    """
    networks: dict[str, Network] = {}
    try:
        with close_on_error(partial(_close, networks)):
            for name in ENGINES:
                path = folder / metadata.engines[name].file
                loaded = adapter.load(path, runtime.stream, range(1, rows + 1), compiled)
                for count, network in enumerate(loaded, 1):
                    networks[name if count == 1 else f'{name}_r{count}'] = network
            runtime.synchronize()
    except TensorRTMemoryError as error:
        raise ValueError(
            f'{error} The engines may be sound: building again does not help, fewer prompt rows '
            '(--rows 1) or ONNX files of a smaller precision do'
        ) from error
    except TensorRTError as error:
        raise ValueError(f'{error} Run: {rebuild_command(bundle, metadata.rows)}') from error
    return networks


def _close(networks: Mapping[str, Network]) -> None:
    close_all(network.close for network in networks.values())


def check_one_image_size(dims: PolicyDims) -> None:
    """Refuse a policy whose cameras' images differ in size (ValueError): one vision engine."""
    sizes = distinct_image_sizes(dims)
    if len(sizes) > 1:
        written = ', '.join(f'{height}x{width}' for height, width in sizes)
        raise ValueError(
            f"backend 'tensorrt' runs images of one size, and this policy's are {written}; use "
            'backend onnxruntime or torch'
        )


def check_precision(bundle: Path, metadata: Metadata, precision: str) -> None:
    if metadata.precision != precision:
        raise ValueError(
            f"precision '{precision}': the engines of {bundle} were built in "
            f"{metadata.precision}; ask for that, or export the ONNX files in '{precision}' and "
            f'run: {rebuild_command(bundle, metadata.rows, precision)}'
        )


@contextmanager
def refused_where_full(runtime: CudaRuntime, need_bytes: int) -> Iterator[None]:
    """Allocate a session's memory in the block, of which a load's reserve stays free.

    Raises:
        ValueError: there is less; says what mends it.
    """
    free_bytes = max(0, free_device_bytes(runtime) - LOAD_RESERVE_BYTES)
    told = (
        f'{runtime.info.name}: one more session needs {need_bytes / 1e6:.1f} MB, and '
        f'{free_bytes / 1e6:.1f} MB are free beside what CUDA needs; serve fewer robots at once '
        '(--max-sessions), end what else uses the GPU, or build for one prompt row (--rows 1)'
    )
    if need_bytes > free_bytes:
        raise ValueError(told)
    try:
        yield
    except CudaError as error:
        if not error.out_of_memory:
            raise
        raise ValueError(told) from error


def check_memory(runtime: CudaRuntime, metadata: Metadata, device: str) -> None:
    entries = [metadata.engines[name] for name in ENGINES]
    need = sum(entry.size for entry in entries) + max(entry.scratch_bytes for entry in entries)
    need += LOAD_RESERVE_BYTES
    free = free_device_bytes(runtime)
    if need > free:
        raise ValueError(
            f"device '{device}': the engines need about {need / 1e9:.1f} GB and {free / 1e9:.1f} "
            'GB are free; end what else uses the GPU, or build from ONNX files of a smaller '
            'precision'
        )
