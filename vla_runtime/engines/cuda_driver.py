"""CUDA's driver functions through the Python package `cuda-bindings`, and their errors.

Only the package's half for the *driver* is used: it loads the machine's `libcuda.so.1` when the
first function is called, so it serves drivers older and newer than itself. The half for the CUDA
*runtime* refuses every older driver: 12.9 finds none on JetPack 6.2.

Invariants:
- Every function that is called here releases the interpreter lock: from release 12.9.1 on. Before,
  a thread that waits for the GPU stops every thread of its process.
- A function that fails raises `CudaError`, also where the package raises an error of its own.
"""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from types import ModuleType
from typing import Any

PACKAGE = 'cuda-bindings'
# First release whose functions release the interpreter lock.
OLDEST_RELEASE = (12, 9, 1)
# First driver that has every function asked for, by the bindings' major release. 12.0 is the first
# with their cuGraphInstantiate; 13 asks for the cuEventElapsedTime of 12.8.
OLDEST_DRIVER = {12: (12, 0), 13: (12, 8)}
_MODULE = 'cuda.bindings.driver'
_INSTALL = (
    "pip install 'cuda-bindings==12.9.*' where nvidia-smi shows CUDA 12 (JetPack 6), "
    "pip install 'cuda-bindings==13.*' where it shows CUDA 13 (JetPack 7)"
)
# Errors of a driver that cannot serve this process, whatever is asked of it.
_UNUSABLE = {
    'CUDA_ERROR_SYSTEM_DRIVER_MISMATCH': 'libcuda.so.1 and the kernel module are of two releases: '
    'restart the machine after the driver was updated; in a container use --runtime nvidia',
    'CUDA_ERROR_STUB_LIBRARY': "libcuda.so.1 is the CUDA toolkit's stub for linking: remove its "
    "folder 'stubs' from LD_LIBRARY_PATH; in a container use --runtime nvidia",
    'CUDA_ERROR_NO_DEVICE': 'the driver shows no GPU: check CUDA_VISIBLE_DEVICES; in a container '
    'use --runtime nvidia (Jetson) or --gpus all',
}


# After these CUDA asks to end the process.
_LOST = frozenset(
    f'CUDA_ERROR_{name}'
    for name in (
        'ASSERT',
        'CONTAINED',
        'CONTEXT_IS_DESTROYED',
        'ECC_UNCORRECTABLE',
        'HARDWARE_STACK_ERROR',
        'ILLEGAL_ADDRESS',
        'ILLEGAL_INSTRUCTION',
        'INVALID_ADDRESS_SPACE',
        'INVALID_PC',
        'LAUNCH_FAILED',
        'LAUNCH_TIMEOUT',
        'MISALIGNED_ADDRESS',
        'UNKNOWN',
    )
)


class CudaError(RuntimeError):
    """A CUDA call that failed; `code` is the name of CUDA's error."""

    def __init__(self, call: str, code: str, text: str) -> None:
        super().__init__(f'{call}: {code} ({text})')
        self.code = code
        self._call, self._text = call, text

    def __reduce__(self) -> tuple[Any, ...]:
        return CudaError, (self._call, self.code, self._text)

    @property
    def out_of_memory(self) -> bool:
        # A capture that could not get memory may surface as an invalidated capture.
        return self.code in ('CUDA_ERROR_OUT_OF_MEMORY', 'CUDA_ERROR_STREAM_CAPTURE_INVALIDATED')

    @property
    def context_lost(self) -> bool:
        """True after an error that makes every later call on the context fail too."""
        return self.code in _LOST


class CudaDriver:
    """The driver's functions, called by name.

    `release` is that of the bindings, e.g. `12.9.10`; `version` the newest CUDA that the driver
    supports, (major, minor), (0, 0) until `find_device`.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module: Any = module
        self.release = bindings_release(module)
        self.version = (0, 0)

    def find_device(self, index: int) -> Any:
        """Load the driver and return a device's handle (ValueError: no usable driver or device)."""
        name = f"device 'cuda:{index}'"
        try:
            count = self._count_devices()
            if count == 0:
                raise CudaError('cuDeviceGetCount', 'CUDA_ERROR_NO_DEVICE', 'it shows none')
            if index < count:
                return self.call('cuDeviceGet', index)
        except CudaError as error:
            raise ValueError(f'{name}: {self._refusal(error)}') from error
        raise ValueError(f'{name}: there are {count} CUDA devices here, the first is cuda:0')

    def call(self, name: str, *arguments: object) -> Any:
        """Call a function; return its result, a tuple of several, or None (CudaError: it fails)."""
        try:
            code, *results = getattr(self._module, name)(*arguments)
        except RuntimeError as error:
            # The bindings' own: no library, or no such function in it.
            raise CudaError(name, 'not callable', self._reason(error)) from error
        except KeyError as error:
            # The driver is newer than the bindings, whose enumeration lacks its error.
            text = f'{PACKAGE} {self.release} does not know it'
            raise CudaError(name, f'error {error}', text) from error
        if int(code) != 0:
            raise CudaError(name, code.name, self._text(code))
        return results[0] if len(results) == 1 else tuple(results) or None

    def constant(self, kind: str, name: str) -> Any:
        """Return a member of an enumeration, e.g. `('CUevent_flags', 'CU_EVENT_DEFAULT')`."""
        return getattr(getattr(self._module, kind), name)

    def _count_devices(self) -> int:
        # Before cuInit, which an old driver may fail for a reason that names no version.
        number = int(self.call('cuDriverGetVersion'))
        self.version = (number // 1000, number % 1000 // 10)
        if self.version < self._oldest:
            raise CudaError('cuDriverGetVersion', 'too old', self._too_old())
        self.call('cuInit', 0)
        return int(self.call('cuDeviceGetCount'))

    def _refusal(self, error: CudaError) -> str:
        known = f'driver for CUDA {format_version(self.version)}' if self.version[0] else 'driver'
        advice = _UNUSABLE.get(
            error.code, 'check the NVIDIA driver (nvidia-smi; on a Jetson: jtop)'
        )
        return (
            f'no CUDA device answers here through {PACKAGE} {self.release} and the NVIDIA {known}: '
            f'{error}; {advice}, or use another backend'
        )

    def _reason(self, error: RuntimeError) -> str:
        text = str(error).rstrip('.')
        if re.search(r'dlopen|dynamic lib|driver library', text, re.IGNORECASE):
            return f'no NVIDIA driver is installed, libcuda.so.1 is not found: {text}'
        return f'{text}; {self._too_old()}'

    @property
    def _major(self) -> int:
        return _numbers(self.release)[0]

    @property
    def _oldest(self) -> tuple[int, int]:
        # A release after those known asks for no less than the newest of them.
        return OLDEST_DRIVER.get(self._major, max(OLDEST_DRIVER.values()))

    def _too_old(self) -> str:
        here = f'is for CUDA {format_version(self.version)}' if self.version[0] else 'is too old'
        if self.version < self._oldest:
            needs = f'needs one for CUDA {format_version(self._oldest)} or newer'
        else:
            needs = 'asks it for a function that it lacks'
        if self._major > 12 and self.version >= OLDEST_DRIVER[12]:
            mend = (
                f"pip install '{PACKAGE}==12.9.*', which serves this driver, or update the driver"
            )
        else:
            jetpack = 6 if self._major <= 12 else 7
            mend = f'update the driver (on a Jetson: JetPack {jetpack} or newer)'
        return f'the NVIDIA driver {here}; {PACKAGE} {self.release} {needs}: {mend}'

    def _text(self, code: Any) -> str:
        error, text = self._module.cuGetErrorString(code)
        if int(error) != 0 or text is None:
            return f'error {int(code)}'
        return text.decode() if isinstance(text, bytes) else str(text)


def import_cuda() -> ModuleType:
    """Import the driver half of `cuda-bindings` (ValueError: missing or too old)."""
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        found = _installed()
        if found and _numbers(found) < OLDEST_RELEASE:
            raise ValueError(_too_old_release(found)) from error
        raise ValueError(
            f"backend 'tensorrt': the Python package '{PACKAGE}' is not installed or cannot be "
            f'imported ({error}); {_INSTALL}'
        ) from error
    release = bindings_release(module)
    if _numbers(release) < OLDEST_RELEASE:
        raise ValueError(_too_old_release(release))
    return module


def bindings_release(module: ModuleType) -> str:
    """Return the release of the bindings that an imported module belongs to, `0` if unknown."""
    if own := getattr(module, '__version__', None):
        return str(own)
    package = importlib.import_module('cuda.bindings')
    return str(getattr(package, '__version__', None) or _installed() or '0')


def format_version(version: tuple[int, int]) -> str:
    return f'{version[0]}.{version[1]}'


def _installed() -> str | None:
    for package in (PACKAGE, 'cuda-python'):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r'\d+', release)[:3])


def _too_old_release(release: str) -> str:
    oldest = '.'.join(map(str, OLDEST_RELEASE))
    return (
        f"backend 'tensorrt': release {release} of the Python package '{PACKAGE}' (cuda-python) "
        'keeps the interpreter lock while it waits for the GPU, which stops every other thread of '
        f'the node; {oldest} or newer is needed: {_INSTALL}'
    )
