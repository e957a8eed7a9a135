"""One CUDA device through cuda-python: memory, one stream, copies, captured graphs, timing.

Invariants:
- No call into TensorRT comes before `CudaRuntime` has found a device: on a machine without a driver
  TensorRT hands out objects whose first use ends the process.
- All work of one `CudaRuntime` is ordered on its one stream; only `synchronize`, `download` and
  `milliseconds` wait for it.
- CUDA's current device belongs to the thread, and an engine may be loaded on one thread and used
  on another, so every call that reaches the device chooses it first.
- Uploads go through the runtime's own pinned memory. A piece of it is reused only after the stream
  has passed it: an asynchronous copy may still read its source after the call returns, so it must
  not read the caller's (pageable) memory.
- `close` frees whatever is left, graphs first: they replay on the addresses of the memory.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from vla_runtime.engines.device_names import parse_device

# The binding's name since cuda-python 12.6, and the one before (gone in 13).
_MODULES = ('cuda.bindings.runtime', 'cuda.cudart')
_NON_BLOCKING = 1
# More than an inference uploads between two waits; larger arrays go in pieces.
_STAGING_BYTES = 4 << 20


class CudaError(RuntimeError):
    """A CUDA call that failed; `code` is the name of CUDA's error."""

    def __init__(self, call: str, code: str, text: str) -> None:
        super().__init__(f'{call}: {code} ({text})')
        self.code = code

    @property
    def out_of_memory(self) -> bool:
        # A capture that could not get memory may surface as an invalidated capture.
        return self.code in ('cudaErrorMemoryAllocation', 'cudaErrorStreamCaptureInvalidated')


@dataclass(frozen=True)
class DeviceInfo:
    """Identity of a GPU, as an engine tuned on it needs it.

    Attributes:
        name: as the driver gives it, e.g. `Orin` or `NVIDIA H200`.
        capability: `major.minor`.
        processors: streaming multiprocessors.
        total_bytes: memory of the device.
        integrated: the GPU shares its memory with the CPU, as on a Jetson.
    """

    name: str
    capability: str
    processors: int
    total_bytes: int
    integrated: bool


@dataclass(frozen=True)
class Graph:
    """A captured graph, ready to launch."""

    executable: Any


class CudaRuntime:
    """One device and one stream on it.

    Args:
        index: of the device.
        module: cuda-python's runtime module; found by itself when left out.

    Raises:
        ValueError: cuda-python is not installed, no driver, or no such device.
    """

    def __init__(self, index: int = 0, module: ModuleType | None = None) -> None:
        self.module = module or import_cuda()
        self._cuda: Any = self.module
        self.index = index
        self.info = self._find_device()
        self._stream = self._call('cudaStreamCreateWithFlags', _NON_BLOCKING)
        self._allocated: dict[int, int] = {}
        self._graphs: list[Graph] = []
        # Start of the pinned memory, and the bytes of it that copies on the stream may still read.
        self._staging: int | None = None
        self._staged = 0

    @property
    def stream(self) -> int:
        """The stream's handle as a number, as TensorRT takes it."""
        return int(self._stream)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of device memory held through `allocate`."""
        return sum(self._allocated.values())

    def free_bytes(self) -> int:
        """Return the bytes of unused device memory."""
        self.activate()
        return int(self._call('cudaMemGetInfo')[0])

    def activate(self) -> None:
        """Make this device the calling thread's."""
        self._call('cudaSetDevice', self.index)

    def allocate(self, size: int) -> int:
        """Allocate zeroed device memory and return its address (a multiple of 256).

        Raises:
            CudaError: not enough memory.
        """
        self.activate()
        address = int(self._call('cudaMalloc', max(size, 1)))
        self._allocated[address] = size
        self._call('cudaMemsetAsync', address, 0, size, self._stream)
        return address

    def free(self, address: int) -> None:
        """Give memory back once all work so far is done."""
        self.synchronize()
        self._call('cudaFree', address)
        del self._allocated[address]

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy an array to the device; it may be changed or freed as soon as this returns.

        Waits for the stream once the uploads since the last wait exceed the pinned memory (4 MiB).
        """
        array = np.ascontiguousarray(array)
        for offset in range(0, array.nbytes, _STAGING_BYTES):
            size = min(array.nbytes - offset, _STAGING_BYTES)
            piece = self._stage(size)
            ctypes.memmove(piece, array.ctypes.data + offset, size)
            self._copy(address + offset, piece, size, 'cudaMemcpyHostToDevice')

    def download(self, address: int, array: np.ndarray) -> np.ndarray:
        """Wait for all work and copy memory of the device into `array`, which is returned.

        Args:
            address: on the device.
            array: contiguous.
        """
        self._copy(array.ctypes.data, address, array.nbytes, 'cudaMemcpyDeviceToHost')
        self.synchronize()
        return array

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within the device; may be captured."""
        self._copy(target, source, size, 'cudaMemcpyDeviceToDevice')

    def synchronize(self) -> None:
        self.activate()
        self._call('cudaStreamSynchronize', self._stream)
        self._staged = 0

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record the calls that `work` queues on the stream, without running them.

        Raises:
            CudaError: something in the work cannot be captured, or memory is short.
        """
        self.activate()
        # Only this thread's calls can break the capture, not another thread's allocations.
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call('cudaStreamBeginCapture', self._stream, mode)
        try:
            work()
        except BaseException:
            self._abandon_capture()
            raise
        graph = self._call('cudaStreamEndCapture', self._stream)
        try:
            self._graphs.append(Graph(self._call('cudaGraphInstantiate', graph, 0)))
        finally:
            self._call('cudaGraphDestroy', graph)
        return self._graphs[-1]

    def launch(self, graph: Graph) -> None:
        self.activate()
        self._call('cudaGraphLaunch', graph.executable, self._stream)

    def destroy(self, graph: Graph) -> None:
        """Free a graph once all work so far is done."""
        self.synchronize()
        self._call('cudaGraphExecDestroy', graph.executable)
        self._graphs.remove(graph)

    def milliseconds(self, work: Callable[[], None]) -> float:
        """Device time of `work`, from an event before it to an event after it."""
        # An event belongs to the device on which it was made.
        self.activate()
        start, end = self._call('cudaEventCreate'), self._call('cudaEventCreate')
        try:
            self._call('cudaEventRecord', start, self._stream)
            work()
            self._call('cudaEventRecord', end, self._stream)
            self._call('cudaEventSynchronize', end)
            return float(self._call('cudaEventElapsedTime', start, end))
        finally:
            self._call('cudaEventDestroy', start)
            self._call('cudaEventDestroy', end)

    def close(self) -> None:
        """Free all graphs, all memory and the stream; safe to call twice."""
        if self._stream is None:
            return
        self.synchronize()
        for graph in list(self._graphs):
            self.destroy(graph)
        for address in list(self._allocated):
            self._call('cudaFree', address)
        self._allocated.clear()
        if self._staging is not None:
            self._call('cudaFreeHost', self._staging)
            self._staging = None
        self._call('cudaStreamDestroy', self._stream)
        self._stream = None

    def _stage(self, size: int) -> int:
        """Return the address of `size` pinned bytes that no copy on the stream still reads."""
        if self._staging is None:
            self.activate()
            self._staging = int(self._call('cudaMallocHost', _STAGING_BYTES))
        if self._staged + size > _STAGING_BYTES:
            self.synchronize()
        address = self._staging + self._staged
        self._staged += size
        return address

    def _copy(self, target: int, source: int, size: int, kind: str) -> None:
        self.activate()
        kinds = self._cuda.cudaMemcpyKind
        self._call('cudaMemcpyAsync', target, source, size, getattr(kinds, kind), self._stream)

    def _abandon_capture(self) -> None:
        # Ends the capture in any state. Its own error is ignored: the one that broke it is raised.
        error, *graph = self._cuda.cudaStreamEndCapture(self._stream)
        if int(error) == 0 and graph:
            self._cuda.cudaGraphDestroy(graph[0])

    def _find_device(self) -> DeviceInfo:
        try:
            count = int(self._call('cudaGetDeviceCount'))
        except CudaError as error:
            raise ValueError(
                f"device 'cuda:{self.index}': no CUDA device answers here ({error}); check the "
                'NVIDIA driver (nvidia-smi; on a Jetson: jtop), or use another backend'
            ) from error
        if not 0 <= self.index < count:
            raise ValueError(
                f"device 'cuda:{self.index}': there are {count} CUDA devices here, the first is "
                'cuda:0'
            )
        self.activate()
        properties = self._call('cudaGetDeviceProperties', self.index)
        name = properties.name
        return DeviceInfo(
            name=(name.decode() if isinstance(name, bytes) else str(name)).rstrip('\0').strip(),
            capability=f'{properties.major}.{properties.minor}',
            processors=int(properties.multiProcessorCount),
            total_bytes=int(properties.totalGlobalMem),
            integrated=bool(properties.integrated),
        )

    def _call(self, name: str, *arguments: object) -> Any:
        """Call a CUDA function; return its one result, a tuple of several, or None."""
        error, *results = getattr(self._cuda, name)(*arguments)
        if int(error) != 0:
            text = self._cuda.cudaGetErrorString(error)[1]
            raise CudaError(
                name, error.name, text.decode() if isinstance(text, bytes) else str(text)
            )
        return results[0] if len(results) == 1 else tuple(results) or None


def import_cuda() -> ModuleType:
    """Import cuda-python's runtime module, under the name that this release has.

    Raises:
        ValueError: cuda-python, or something that it needs, is not installed.
    """
    reasons: dict[str, None] = {}
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons[str(error)] = None
    raise ValueError(
        "backend 'tensorrt': the Python package 'cuda-python' is not installed or cannot be "
        f"imported ({'; '.join(reasons)}); install the release of this machine's CUDA, which "
        "nvidia-smi shows (pip install 'cuda-python==12.6.*' with CUDA 12.6, as JetPack 6.1 has it)"
    )


def device_index(device: str) -> int:
    """Return N of `cuda:N`, and 0 for `cuda`.

    Raises:
        ValueError: any other text.
    """
    return parse_device(device, 'tensorrt')[1]
