"""Checks that a backend can run here, made before anything slow is imported or read.

They take milliseconds: names, packages, providers, files and the NVIDIA driver. The engine itself
checks what only its runtime knows. Imports ONNX Runtime only where its provider is asked for.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from vla_runtime.bundle.onnx_files import ONNX_FOLDER
from vla_runtime.bundle.onnx_files import PRECISIONS as FILE_PRECISIONS
from vla_runtime.engines.devices import parse_device
from vla_runtime.engines.tensorrt.rtx import RTX_MODULES

# Word of backend and precision that lets the load choose (`engines.candidates`).
AUTO = 'auto'
BACKENDS = ('torch', 'onnxruntime', 'tensorrt')
# PyTorch runs those of them that are in `engines.torch.weights`.
PRECISIONS = FILE_PRECISIONS
# Packages that comparing ONNX files with PyTorch needs.
COMPARISON_PACKAGES = ('torch', 'onnx', 'onnxruntime')
_DRIVER = 'libcuda.so.1'
_INSTALL = {
    'torch': 'install PyTorch (pip install torch), or choose another backend',
    'onnxruntime': 'install ONNX Runtime (pip install onnxruntime, or onnxruntime-gpu for CUDA), '
    'or choose another backend',
}


def check_words(backend: str, precision: str) -> None:
    """Refuse an unknown backend or precision beside `auto` (ValueError)."""
    if backend not in (AUTO, *BACKENDS):
        raise ValueError(
            f"backend '{backend}' is unknown; known are: {', '.join((AUTO, *BACKENDS))}"
        )
    if precision not in (AUTO, *PRECISIONS):
        raise ValueError(
            f"precision '{precision}' is unknown; known are: {', '.join((AUTO, *PRECISIONS))}"
        )


def check_backend(backend: str, device: str) -> None:
    """Refuse a backend or device that is not available on this machine.

    Raises:
        ValueError: unknown backend or device, its package is not installed, ONNX Runtime has no
            such provider, or no such CUDA device answers; the message says what to do.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend '{backend}' is unknown; known are: {', '.join(BACKENDS)}")
    if backend == 'tensorrt' and device == 'cpu' and not (devices := driver_devices())[0]:
        # Whoever took a CUDA device instead would read next that there is none.
        raise ValueError(
            f"device 'cpu' is not supported by backend 'tensorrt', and no CUDA device answers here "
            f"({devices[1]}): on the CPU take backend 'auto'"
        )
    kind, index = parse_device(device, backend)
    if backend == 'tensorrt':
        from vla_runtime.engines.cuda_driver import CudaDriver, import_cuda
        from vla_runtime.engines.tensorrt.adapter import import_tensorrt

        # These raise with install advice. An installed TensorRT is slow to import, so it is not.
        if missing_backend(backend):
            try:
                import_tensorrt()
            except ValueError as error:
                count, reason = driver_devices()
                if count:
                    raise
                # Whoever installs it would read the other fact next.
                raise ValueError(
                    f'{error}; and no CUDA device answers here ({reason}), without which it runs '
                    "nothing: backend 'auto' takes what can run here"
                ) from error
        # Through the package that the backend uses, so that a driver it cannot use is seen here.
        CudaDriver(import_cuda()).find_device(index)
        return
    if missing := missing_package(backend):
        raise ValueError(
            f"backend '{backend}': the Python package '{missing}' is not installed; "
            f'{_INSTALL[backend]}'
        )
    if kind == 'cpu':
        return
    if backend == 'onnxruntime':
        from vla_runtime.engines.onnx.session import Placement

        Placement.of(device)
    check_cuda_device(device, index)


def check_cuda_device(device: str, index: int = 0) -> None:
    """Refuse a device that the NVIDIA driver does not show (ValueError; on ROCm none)."""
    count, reason = driver_devices()
    if count == 0:
        raise ValueError(
            f"device '{device}': no CUDA device answers here ({reason}); check the NVIDIA driver "
            '(nvidia-smi; on a Jetson: jtop), or use the CPU (backends torch and onnxruntime)'
        )
    if index >= count:
        raise ValueError(
            f"device '{device}': there are {count} CUDA devices here, the first is cuda:0"
        )


def unused_gpu(device: str) -> str:
    """Return a warning where a GPU answers and the networks run on the CPU; else empty."""
    if device != 'cpu' or not driver_devices()[0]:
        return ''
    return (
        "the networks run on the CPU (device 'cpu') although a CUDA GPU answers here; the launch "
        'argument device:=cuda, or the parameter device, makes it run them'
    )


def check_graph_files(bundle: Path, names: Iterable[str]) -> None:
    """Refuse a bundle that lacks one of these ONNX files (ValueError, with the remedy)."""
    for name in names:
        path = bundle / ONNX_FOLDER / name
        if not path.is_file():
            raise ValueError(
                f'{path}: is missing, so neither ONNX Runtime nor TensorRT can run this bundle; '
                f'make its ONNX files: vla_runtime export {bundle} --out NEW_BUNDLE'
            )


def missing_package(*names: str) -> str | None:
    """Return the first of these Python packages that is not installed; import none of them."""
    for name in names:
        try:
            found = find_spec(name) is not None
        except ValueError:
            # An imported module that has no spec.
            found = sys.modules.get(name) is not None
        if not found:
            return name
    return None


def missing_backend(backend: str) -> str | None:
    """Return a backend whose package is not installed; None where it is. Import none."""
    names = ('tensorrt', *RTX_MODULES) if backend == 'tensorrt' else (backend,)
    return backend if all(missing_package(name) for name in names) else None


def require_packages(*names: str) -> None:
    """Raise ModuleNotFoundError for the first of these packages not installed; import none."""
    if missing := missing_package(*names):
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)


def driver_cuda_version() -> tuple[int, int]:
    """Return the newest CUDA that the NVIDIA driver supports; (0, 0) where it does not say."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL(_DRIVER).cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10


def driver_devices() -> tuple[int, str]:
    """Return the number of devices that the driver shows, and the reason where it is 0."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return 0, f'no NVIDIA driver is installed: {_DRIVER} is not found'
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        return 0, f'the driver says: {(text.value or b"").decode() or f"error {code}"}'
    return count.value, 'the driver shows none'
