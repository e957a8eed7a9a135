"""Loads a bundle's networks on a backend; imports that backend's runtime and no other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vla_runtime.bundle.folder import Bundle, read_bundle, verify_files
from vla_runtime.bundle.onnx_files import engine_graphs
from vla_runtime.engines.candidates import Candidate
from vla_runtime.engines.devices import check_device, keep_freed_memory
from vla_runtime.engines.preflight import AUTO, check_backend, check_graph_files
from vla_runtime.engines.protocol import PolicyEngine
from vla_runtime.engines.triton_option import OFF
from vla_runtime.family.declaration import distinct_image_sizes
from vla_runtime.family.listing import find_family


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine that are the same for every backend and precision.

    Attributes:
        device: `cpu`, `cuda` or `cuda:N`; with ONNX Runtime also `tensorrt`, `tensorrt:N`.
        max_rows: most prompt rows that will be asked for (2 for guidance).
        threads: CPU threads of each network (`engines.devices.cpu_threads`); with PyTorch of the
            whole process.
        use_cuda_graphs: on CUDA, replay captured graphs.
        denoise_steps: number of steps whose CUDA graphs are captured at load, where a backend does
            so; None: the number that the bundle recommends.
        triton: one of `triton_option.WORDS`; `off` for other backends.
    """

    device: str
    max_rows: int
    threads: int
    use_cuda_graphs: bool = True
    denoise_steps: int | None = None
    triton: str = OFF


def read_for(
    backend: str, device: str, bundle: str | Path | Bundle, *, verify: bool = True
) -> Bundle:
    """Read a bundle, or take it as read, after checking that the backend can run here.

    `verify` compares every file with its SHA-256. With `auto` only the device's name is checked
    yet.

    Raises:
        BundleError: the bundle is damaged or inconsistent.
        ValueError: the backend or device is not available here, or the bundle lacks ONNX files.
    """
    if backend == AUTO:
        check_device(device)
    else:
        check_backend(backend, device)
    checked = bundle if isinstance(bundle, Bundle) else read_bundle(bundle, verify=False)
    if backend == 'onnxruntime':
        sizes = len(distinct_image_sizes(checked.spec.dims))
        check_graph_files(checked.folder, engine_graphs(prompt_rows(checked), sizes))
    if verify:
        verify_files(checked)
    return checked


def prompt_rows(bundle: Bundle) -> range:
    """Numbers of prompt rows: guidance needs a second one, and only policies with a tag have it."""
    return range(1, 3 if bundle.spec.advantage else 2)


def load_engine(bundle: Bundle, candidate: Candidate, options: EngineOptions) -> PolicyEngine:
    """Load a bundle's networks on a checked candidate's backend (ValueError: unfit files)."""
    spec, device, precision = bundle.spec, options.device, candidate.precision
    if candidate.backend == 'torch':
        import torch

        from vla_runtime.engines.torch.loading import load_torch_engine

        torch.set_num_threads(options.threads)
        if device == 'cpu':
            keep_freed_memory()
        return load_torch_engine(
            spec.family,
            spec.dims,
            bundle.weights_path,
            device=device,
            precision=precision,
            max_rows=options.max_rows,
            use_cuda_graphs=options.use_cuda_graphs,
            triton=options.triton,
            action_times=spec.trained_delay_steps > 0,
        )
    if candidate.backend == 'onnxruntime':
        from vla_runtime.engines.onnx.engine import OnnxEngine
        from vla_runtime.engines.onnx.token_engine import OnnxTokenEngine

        tokens = find_family(spec.family).head == 'tokens'
        return (OnnxTokenEngine if tokens else OnnxEngine)(
            spec.family,
            spec.dims,
            bundle.folder,
            device=device,
            precision=precision,
            max_rows=options.max_rows,
            threads=options.threads,
        )
    from vla_runtime.engines.tensorrt.token_engine import engine_class

    return engine_class(spec.family).load(
        bundle.folder,
        spec.family,
        spec.dims,
        files=spec.files,
        device=device,
        precision=precision,
        max_rows=options.max_rows,
        denoise_steps=options.denoise_steps or spec.denoise_steps,
        use_cuda_graphs=options.use_cuda_graphs,
    )
