"""Loads a bundle's networks on a backend; imports that backend's runtime and no other."""

from __future__ import annotations

import os

from vla_runtime.bundle.folder import Bundle
from vla_runtime.engines.protocol import PolicyEngine


def load_engine(
    bundle: Bundle,
    backend: str,
    device: str,
    *,
    precision: str,
    max_rows: int,
    use_cuda_graphs: bool,
) -> PolicyEngine:
    """Load a bundle's networks on the requested backend, and on no other.

    Args:
        bundle: checked.
        backend, device: accepted by `preflight.check_backend`.
        precision, max_rows, use_cuda_graphs: as for `Policy.load`.

    Raises:
        ValueError: files that this backend cannot load.
    """
    if backend == 'torch':
        from vla_runtime.engines.torch.engine import TorchEngine

        return TorchEngine.load(
            bundle.spec.family,
            bundle.spec.dims,
            bundle.weights_path,
            device=device,
            precision=precision,
            max_rows=max_rows,
            use_cuda_graphs=use_cuda_graphs,
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
        denoise_steps=bundle.spec.denoise_steps,
        use_cuda_graphs=use_cuda_graphs,
    )


def limit_threads(backend: str, threads: int, networks: int) -> int:
    """Set the CPU threads of each network of this process; call before networks are loaded.

    Args:
        backend: that will run the networks.
        threads: 0 for all cores but one: networks on all of them starve a node's callbacks.
        networks: number that run at once (two in the pipeline `throughput`) and share those cores;
            each has at least one.

    Returns:
        the number that was set
    """
    threads = threads or max(1, (len(os.sched_getaffinity(0)) - 1) // networks)
    if backend == 'torch':
        import torch

        torch.set_num_threads(threads)
    else:
        os.environ['OMP_NUM_THREADS'] = str(threads)
    return threads
