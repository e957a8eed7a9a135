"""Loads a bundle's networks on a backend; imports that backend's runtime and no other."""

from __future__ import annotations

from vla_runtime.bundle.folder import Bundle
from vla_runtime.engines.cpu import cpu_threads, keep_freed_memory
from vla_runtime.engines.protocol import PolicyEngine
from vla_runtime.engines.torch_compile import NONE


def load_engine(
    bundle: Bundle,
    backend: str,
    device: str,
    *,
    precision: str,
    max_rows: int,
    use_cuda_graphs: bool,
    threads: int | None = None,
    denoise_steps: int | None = None,
    torch_compile: str = NONE,
) -> PolicyEngine:
    """Load a bundle's networks on the requested backend, and on no other.

    Args:
        bundle: checked.
        backend, device: accepted by `preflight.check_backend`.
        precision, max_rows, use_cuda_graphs: as for `Policy.load`.
        threads: CPU threads of each network, see `cpu.cpu_threads`; with PyTorch those of the whole
            process.
        denoise_steps: whose CUDA graphs are captured at load, where a backend does so; None: those
            that the bundle recommends.
        torch_compile: as for `Policy.load`; any word but `none` with PyTorch alone.

    Raises:
        ValueError: files that this backend cannot load.
    """
    if backend == 'torch':
        import torch

        from vla_runtime.engines.torch.engine import TorchEngine

        torch.set_num_threads(cpu_threads(threads))
        if device == 'cpu':
            keep_freed_memory()
        return TorchEngine.load(
            bundle.spec.family,
            bundle.spec.dims,
            bundle.weights_path,
            device=device,
            precision=precision,
            max_rows=max_rows,
            use_cuda_graphs=use_cuda_graphs,
            torch_compile=torch_compile,
        )
    if backend == 'onnxruntime':
        from vla_runtime.engines.onnx.engine import OnnxEngine

        return OnnxEngine(
            bundle.spec.family,
            bundle.spec.dims,
            bundle.folder,
            device=device,
            precision=precision,
            max_rows=max_rows,
            threads=threads,
        )
    from vla_runtime.engines.tensorrt.engine import TensorRTEngine

    return TensorRTEngine.load(
        bundle.folder,
        bundle.spec.family,
        bundle.spec.dims,
        files=bundle.spec.files,
        device=device,
        precision=precision,
        max_rows=max_rows,
        denoise_steps=denoise_steps or bundle.spec.denoise_steps,
        use_cuda_graphs=use_cuda_graphs,
    )
