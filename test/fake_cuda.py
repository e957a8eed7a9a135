"""cuda-python's runtime module where there is no GPU: real memory, and a stream.

Stands in at the edge of the hardware, below our own wrapper. Copies and zeroing work on real host
memory at real addresses, at once or as late as CUDA allows; a capture records what it is given and
runs nothing until it is launched; what CUDA forbids inside a capture ends it; memory can be short.
Errors are codes, as CUDA's are.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace

import numpy as np

_ALIGNMENT = 256


class CudaErrorCode(IntEnum):
    cudaSuccess = 0  # noqa: N815
    cudaErrorInvalidValue = 1  # noqa: N815
    cudaErrorMemoryAllocation = 2  # noqa: N815
    cudaErrorInsufficientDriver = 35  # noqa: N815
    cudaErrorInvalidResourceHandle = 400  # noqa: N815
    cudaErrorLaunchFailure = 719  # noqa: N815
    cudaErrorStreamCaptureUnsupported = 900  # noqa: N815
    cudaErrorStreamCaptureInvalidated = 901  # noqa: N815


class MemcpyKind(IntEnum):
    cudaMemcpyHostToDevice = 1  # noqa: N815
    cudaMemcpyDeviceToHost = 2  # noqa: N815
    cudaMemcpyDeviceToDevice = 3  # noqa: N815


class CaptureMode(IntEnum):
    cudaStreamCaptureModeThreadLocal = 1  # noqa: N815


class FakeCuda:
    """One device.

    Args:
        name: of the GPU.
        total_bytes: its memory; allocations and captured graphs count.
        devices: how many there are; None for a machine without a driver.
        graph_bytes: memory that one captured graph takes.
        stale_graphs: graphs replay what they saw at capture: a fault to be found.
        late: work on the stream runs only when the host waits for it.
        integrated: it shares its memory with the host, as a Jetson's does.
    """

    cudaMemcpyKind = MemcpyKind  # noqa: N815
    cudaStreamCaptureMode = CaptureMode  # noqa: N815
    cudaError_t = CudaErrorCode  # noqa: N815

    def __init__(
        self,
        name: str = 'Orin',
        total_bytes: int = 1 << 32,
        devices: int | None = 1,
        graph_bytes: int = 0,
        stale_graphs: bool = False,
        late: bool = False,
        integrated: bool = True,
    ) -> None:
        self.name, self.total_bytes, self.devices = name, total_bytes, devices
        self.graph_bytes, self.stale_graphs, self.late = graph_bytes, stale_graphs, late
        self.integrated = integrated
        self.calls: list[str] = []
        self.milliseconds = iter(())
        # By the name of a call: what it gives instead of doing anything.
        self.failing: dict[str, CudaErrorCode] = {}
        self.streams = 0
        self._device = self._stream_device = 0
        self._memory: dict[int, tuple[int, np.ndarray]] = {}
        self._pinned: dict[int, np.ndarray] = {}
        self._queue: deque[Callable[[], None]] = deque()
        self._graphs: set[int] = set()
        self._recording: list[Callable[[], None]] | None = None
        self._broken = False
        self._count = 0

    @property
    def used_bytes(self) -> int:
        graphs = len(self._graphs) * self.graph_bytes
        return sum(size for size, _ in self._memory.values()) + graphs

    @property
    def live(self) -> tuple[int, int]:
        """How many allocations, pinned ones included, and how many graphs there are."""
        return len(self._memory) + len(self._pinned), len(self._graphs)

    def put(self, stream: object, work: Callable[[], None]) -> CudaErrorCode:
        """What TensorRT does: put work on the stream."""
        if self._recording is not None:
            self._recording.append(work)
        else:
            self._queue.append(work)
            if not self.late:
                self._catch_up()
        return CudaErrorCode.cudaSuccess

    def _catch_up(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def array(self, address: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """The memory at an address as an array; it must lie within one allocation."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        assert any(
            start <= address and address + size <= start + held
            for start, (held, _) in self._memory.items()
        ), 'an engine reached outside the memory it was given'
        assert address % _ALIGNMENT == 0, 'TensorRT takes addresses that are multiples of 256'
        return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)

    def cudaGetDeviceCount(self):  # noqa: N802
        if self.devices is None:
            return CudaErrorCode.cudaErrorInsufficientDriver, None
        return CudaErrorCode.cudaSuccess, self.devices

    def cudaSetDevice(self, index):  # noqa: N802
        self._device = index
        return (CudaErrorCode.cudaSuccess,)

    def cudaGetDeviceProperties(self, index):  # noqa: N802
        return CudaErrorCode.cudaSuccess, SimpleNamespace(
            name=self.name.encode(),
            major=8,
            minor=7,
            multiProcessorCount=16,
            totalGlobalMem=self.total_bytes,
            integrated=int(self.integrated),
        )

    def cudaMemGetInfo(self):  # noqa: N802
        return CudaErrorCode.cudaSuccess, self.total_bytes - self.used_bytes, self.total_bytes

    def cudaGetErrorString(self, error):  # noqa: N802
        return CudaErrorCode.cudaSuccess, f'fake: {error.name}'.encode()

    def cudaMalloc(self, size):  # noqa: N802
        if self._recording is not None:
            self._broken = True
            return CudaErrorCode.cudaErrorStreamCaptureUnsupported, None
        if self.used_bytes + size > self.total_bytes:
            return CudaErrorCode.cudaErrorMemoryAllocation, None
        # Filled, so that nothing relies on fresh memory being zero.
        block = np.full(size + _ALIGNMENT, 0xA5, np.uint8)
        address = -(-block.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        self._memory[address] = (size, block)
        return CudaErrorCode.cudaSuccess, address

    def cudaFree(self, address):  # noqa: N802
        if self._memory.pop(address, None) is None:
            return (CudaErrorCode.cudaErrorInvalidValue,)
        return (CudaErrorCode.cudaSuccess,)

    def cudaMallocHost(self, size):  # noqa: N802
        block = np.full(size, 0xA5, np.uint8)
        self._pinned[block.ctypes.data] = block
        return CudaErrorCode.cudaSuccess, block.ctypes.data

    def cudaFreeHost(self, address):  # noqa: N802
        if self._pinned.pop(address, None) is None:
            return (CudaErrorCode.cudaErrorInvalidValue,)
        return (CudaErrorCode.cudaSuccess,)

    def cudaMemsetAsync(self, address, value, size, stream):  # noqa: N802
        return (self.put(stream, lambda: ctypes.memset(address, value, size)),)

    def cudaMemcpyAsync(self, target, source, size, kind, stream):  # noqa: N802
        if self._recording is not None and kind != MemcpyKind.cudaMemcpyDeviceToDevice:
            # Pageable memory cannot be part of a capture, and pinned memory is used again.
            self._broken = True
            return (CudaErrorCode.cudaErrorStreamCaptureUnsupported,)
        return (self.put(stream, lambda: ctypes.memmove(target, source, size)),)

    def cudaStreamCreateWithFlags(self, flags):  # noqa: N802
        self.streams += 1
        self._stream_device = self._device
        return CudaErrorCode.cudaSuccess, 77

    def cudaStreamDestroy(self, stream):  # noqa: N802
        self.streams -= 1
        return (CudaErrorCode.cudaSuccess,)

    def cudaStreamSynchronize(self, stream):  # noqa: N802
        if self._recording is not None:
            self._broken = True
            return (CudaErrorCode.cudaErrorStreamCaptureUnsupported,)
        self._catch_up()
        return (CudaErrorCode.cudaSuccess,)

    def cudaStreamBeginCapture(self, stream, mode):  # noqa: N802
        self.calls.append('capture')
        self._recording, self._broken = [], False
        return (CudaErrorCode.cudaSuccess,)

    def cudaStreamEndCapture(self, stream):  # noqa: N802
        recorded, self._recording = self._recording, None
        if self._broken:
            return CudaErrorCode.cudaErrorStreamCaptureInvalidated, None
        return CudaErrorCode.cudaSuccess, recorded

    def cudaGraphInstantiate(self, graph, flags):  # noqa: N802
        if self.used_bytes + self.graph_bytes > self.total_bytes:
            return CudaErrorCode.cudaErrorMemoryAllocation, None
        self._count += 1
        self._graphs.add(self._count)
        recorded = [] if self.stale_graphs else list(graph)
        return CudaErrorCode.cudaSuccess, SimpleNamespace(number=self._count, recorded=recorded)

    def cudaGraphDestroy(self, graph):  # noqa: N802
        return (CudaErrorCode.cudaSuccess,)

    def cudaGraphExecDestroy(self, executable):  # noqa: N802
        self._graphs.discard(executable.number)
        executable.recorded = None
        return (CudaErrorCode.cudaSuccess,)

    def cudaGraphLaunch(self, executable, stream):  # noqa: N802
        if error := self.failing.get('cudaGraphLaunch'):
            return (error,)
        self.calls.append(f'launch {executable.number}')
        for work in executable.recorded:
            self.put(stream, work)
        return (CudaErrorCode.cudaSuccess,)

    def cudaEventCreate(self):  # noqa: N802
        return CudaErrorCode.cudaSuccess, SimpleNamespace(device=self._device)

    def cudaEventRecord(self, event, stream):  # noqa: N802
        if event.device != self._stream_device:
            return (CudaErrorCode.cudaErrorInvalidResourceHandle,)
        return (CudaErrorCode.cudaSuccess,)

    def cudaEventSynchronize(self, event):  # noqa: N802
        self._catch_up()
        return (CudaErrorCode.cudaSuccess,)

    def cudaEventElapsedTime(self, start, end):  # noqa: N802
        if error := self.failing.get('cudaEventElapsedTime'):
            return error, None
        return CudaErrorCode.cudaSuccess, next(self.milliseconds, 1.0)

    def cudaEventDestroy(self, event):  # noqa: N802
        return (CudaErrorCode.cudaSuccess,)
