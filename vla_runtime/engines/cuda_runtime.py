"""One CUDA device through the driver: memory, one stream, copies, captured graphs, timing.

Invariants:
- No call into TensorRT comes before `CudaRuntime` has found a device: without a driver TensorRT
  hands out objects whose first use ends the process.
- All work of one `CudaRuntime` is ordered on its one stream; only `synchronize`, `download` and
  `milliseconds` wait for it. They sleep and do not poll.
- The current context belongs to the thread, so every call that reaches the device first makes its
  context current: the device's primary one, which TensorRT and PyTorch use too.
- Uploads go through the runtime's own pinned memory, a piece of which is reused only after the
  stream has passed it: an asynchronous copy may read its source after the call returns.
- `close` frees whatever is left, graphs first: they replay on the addresses of the memory. It tries
  each where CUDA has failed for good. The primary context stays until the process ends, because
  TensorRT's own objects may outlive a runtime.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from vla_runtime.engines.closing import close_all, close_on_error
from vla_runtime.engines.cuda_driver import CudaDriver, CudaError, import_cuda
from vla_runtime.engines.devices import parse_device

# More than an inference uploads between two waits (3 cameras 1.8 MB, 2 rows of text 3.3 MB); larger
# arrays go in pieces.
_STAGING_BYTES = 8 << 20
_NAME_BYTES = 256


@dataclass(frozen=True)
class DeviceInfo:
    """Identity of a GPU, as an engine tuned on it needs it.

    Attributes:
        name: name that the driver gives it, e.g. `Orin` or `NVIDIA H200`.
        capability: `major.minor`.
        processors: streaming multiprocessors; a Jetson's power mode may switch some off.
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
    """One device and one stream on it (ValueError: no usable cuda-bindings, driver or device)."""

    def __init__(self, index: int = 0, module: ModuleType | None = None) -> None:
        self.module = module or import_cuda()
        self.index = index
        self.driver = CudaDriver(self.module)
        self._call = self.driver.call
        self._device = self.driver.find_device(index)
        self.info = self._read_info()
        self._context = self._retain_context()
        self.activate()
        self._stream = self._call('cuStreamCreate', self._flag('CUstream', 'STREAM_NON_BLOCKING'))
        self._waits = self._flag('CUevent', 'EVENT_BLOCKING_SYNC')
        with close_on_error(partial(self._call, 'cuStreamDestroy', self._stream)):
            self._passed = self._call('cuEventCreate', self._waits)
        self._allocated: set[int] = set()
        self._graphs: list[Graph] = []
        # Start of the pinned memory, and the bytes of it that copies on the stream may still read.
        self._staging: int | None = None
        self._staged = 0

    @property
    def stream(self) -> int:
        """The stream's handle as a number, as TensorRT takes it."""
        return int(self._stream)

    def free_bytes(self) -> int:
        self.activate()
        return int(self._call('cuMemGetInfo')[0])

    def activate(self) -> None:
        self._call('cuCtxSetCurrent', self._context)

    def allocate(self, size: int) -> int:
        """Allocate zeroed memory; return its address, a multiple of 256 (CudaError: not enough)."""
        self.activate()
        address = int(self._call('cuMemAlloc', max(size, 1)))
        self._allocated.add(address)
        if size:
            self._call('cuMemsetD8Async', address, 0, size, self._stream)
        return address

    def free(self, address: int) -> None:
        """Give memory back once all work so far is done."""
        self.synchronize()
        self._call('cuMemFree', address)
        self._allocated.remove(address)

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy an array to the device; it may be changed or freed as soon as this returns.

        Waits for the stream once the uploads since the last wait exceed 8 MiB.
        """
        array = np.ascontiguousarray(array)
        self.activate()
        for offset in range(0, array.nbytes, _STAGING_BYTES):
            size = min(array.nbytes - offset, _STAGING_BYTES)
            piece = self._stage(size)
            ctypes.memmove(piece, array.ctypes.data + offset, size)
            self._call('cuMemcpyHtoDAsync', address + offset, piece, size, self._stream)

    def download(self, address: int, array: np.ndarray) -> np.ndarray:
        """Wait for all work, and copy device memory into a contiguous `array`, also returned."""
        self.activate()
        if array.nbytes:
            self._call('cuMemcpyDtoHAsync', array.ctypes.data, address, array.nbytes, self._stream)
        self.synchronize()
        return array

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within the device; may be captured."""
        self.activate()
        self._call('cuMemcpyDtoDAsync', target, source, size, self._stream)

    def synchronize(self) -> None:
        """Sleep until all work so far is done."""
        # Through an event: the stream's own wait polls where another library made the context.
        self.activate()
        self._call('cuEventRecord', self._passed, self._stream)
        self._call('cuEventSynchronize', self._passed)
        self._staged = 0

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record the calls that `work` queues on the stream, without running them.

        Raises:
            CudaError: something in the work cannot be captured, or memory is short.
        """
        self.activate()
        # Only this thread's calls can break the capture, not another thread's allocations.
        mode = self.driver.constant('CUstreamCaptureMode', 'CU_STREAM_CAPTURE_MODE_THREAD_LOCAL')
        self._call('cuStreamBeginCapture', self._stream, mode)
        try:
            work()
        except BaseException:
            self._abandon_capture()
            raise
        graph = self._call('cuStreamEndCapture', self._stream)
        try:
            self._graphs.append(Graph(self._call('cuGraphInstantiate', graph, 0)))
        finally:
            self._call('cuGraphDestroy', graph)
        return self._graphs[-1]

    def launch(self, graph: Graph) -> None:
        self.activate()
        self._call('cuGraphLaunch', graph.executable, self._stream)

    def destroy(self, graph: Graph) -> None:
        """Free a graph once all work so far is done."""
        self.synchronize()
        self._call('cuGraphExecDestroy', graph.executable)
        self._graphs.remove(graph)

    def milliseconds(self, work: Callable[[], None]) -> float:
        """Device time of `work`, from an event before it to an event after it."""
        # An event belongs to the context in which it was made.
        self.activate()
        start, end = (self._call('cuEventCreate', self._waits) for _ in range(2))
        try:
            self._call('cuEventRecord', start, self._stream)
            work()
            self._call('cuEventRecord', end, self._stream)
            self._call('cuEventSynchronize', end)
            return float(self._call('cuEventElapsedTime', start, end))
        finally:
            self._call('cuEventDestroy', start)
            self._call('cuEventDestroy', end)

    def close(self) -> None:
        """Free all graphs, all memory and the stream; raise the first error. Safe to call twice."""
        if self._stream is None:
            return
        frees = [
            *(('cuGraphExecDestroy', graph.executable) for graph in self._graphs),
            *(('cuMemFree', address) for address in self._allocated),
            *(('cuMemFreeHost', start) for start in (self._staging,) if start is not None),
            ('cuEventDestroy', self._passed),
            ('cuStreamDestroy', self._stream),
        ]
        try:
            close_all((self.synchronize, *(partial(self._call, *free) for free in frees)))
        finally:
            self._graphs.clear()
            self._allocated.clear()
            self._staging = self._stream = None

    def _stage(self, size: int) -> int:
        """Return the address of `size` pinned bytes that no copy on the stream still reads."""
        if self._staging is None:
            self._staging = int(self._call('cuMemHostAlloc', _STAGING_BYTES, 0))
        if self._staged + size > _STAGING_BYTES:
            self.synchronize()
        address = self._staging + self._staged
        self._staged += size
        return address

    def _abandon_capture(self) -> None:
        # Ends the capture in any state. Its own error is ignored: the one that broke it is raised.
        try:
            graph = self._call('cuStreamEndCapture', self._stream)
        except CudaError:
            return
        if int(graph):
            self._call('cuGraphDestroy', graph)

    def _read_info(self) -> DeviceInfo:
        name = self._call('cuDeviceGetName', _NAME_BYTES, self._device)
        major, minor = (
            self._attribute(f'COMPUTE_CAPABILITY_{part}') for part in ('MAJOR', 'MINOR')
        )
        return DeviceInfo(
            name=name.split(b'\0')[0].decode().strip(),
            capability=f'{major}.{minor}',
            processors=self._attribute('MULTIPROCESSOR_COUNT'),
            total_bytes=int(self._call('cuDeviceTotalMem', self._device)),
            integrated=bool(self._attribute('INTEGRATED')),
        )

    def _retain_context(self) -> Any:
        """Return the device's primary context, in which waiting threads sleep."""
        try:
            sleep = self._flag('CUctx', 'CTX_SCHED_BLOCKING_SYNC')
            self._call('cuDevicePrimaryCtxSetFlags', self._device, sleep)
        except CudaError as error:
            # PyTorch may have made the context; the events of this runtime sleep all the same.
            if error.code != 'CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE':
                raise
        return self._call('cuDevicePrimaryCtxRetain', self._device)

    def _attribute(self, name: str) -> int:
        attribute = self.driver.constant('CUdevice_attribute', f'CU_DEVICE_ATTRIBUTE_{name}')
        return int(self._call('cuDeviceGetAttribute', attribute, self._device))

    def _flag(self, kind: str, name: str) -> int:
        return int(self.driver.constant(f'{kind}_flags', f'CU_{name}'))


def device_index(device: str) -> int:
    """Return N of `cuda:N`, and 0 for `cuda` (ValueError: any other text)."""
    return parse_device(device, 'tensorrt')[1]
