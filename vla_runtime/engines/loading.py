"""Which backend a name means; imports a runtime only when it is asked for."""

from __future__ import annotations

from vla_runtime.bundle import Bundle
from vla_runtime.engines.engine import PolicyEngine

BACKENDS = ('torch', 'onnxruntime', 'tensorrt')


def load_engine(
    bundle: Bundle,
    backend: str,
    device: str,
    *,
    precision: str,
    max_rows: int,
    use_cuda_graphs: bool,
) -> PolicyEngine:
    """Load a bundle's networks on the backend that was asked for, and on no other.

    Raises:
        ValueError: unknown backend, or one whose runtime or device is not here; nothing falls
            back silently.
    """
    if backend == 'torch':
        try:
            from vla_runtime.engines.torch_engine import TorchEngine
        except ModuleNotFoundError as error:
            raise ValueError(
                f"backend 'torch': the Python package '{error.name}' is not installed; install "
                'PyTorch (pip install torch), or choose another backend'
            ) from error
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
        try:
            from vla_runtime.engines.onnx_engine import OnnxEngine
        except ModuleNotFoundError as error:
            raise ValueError(
                f"backend 'onnxruntime': the Python package '{error.name}' is not installed; "
                'install ONNX Runtime (pip install onnxruntime, or onnxruntime-gpu for CUDA), or '
                'choose another backend'
            ) from error
        return OnnxEngine(
            bundle.spec.family,
            bundle.spec.dims,
            bundle.folder,
            device=device,
            precision=precision,
            max_rows=max_rows,
        )
    if backend == 'tensorrt':
        from vla_runtime.engines.tensorrt_engine import TensorRTEngine

        return TensorRTEngine.load(
            bundle.folder,
            bundle.spec.family,
            bundle.spec.dims,
            device=device,
            precision=precision,
            max_rows=max_rows,
            denoise_steps=bundle.spec.denoise_steps,
            use_cuda_graphs=use_cuda_graphs,
        )
    raise ValueError(f"backend '{backend}' is unknown; known are: {', '.join(BACKENDS)}")
