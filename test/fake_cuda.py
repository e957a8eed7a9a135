"""`cuda.bindings.driver` where there is no GPU: real memory, and a stream.

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


# The names are those of the driver's interface.
CUresult = IntEnum(
    'CUresult',
    {
        'CUDA_SUCCESS': 0,
        'CUDA_ERROR_INVALID_VALUE': 1,
        'CUDA_ERROR_OUT_OF_MEMORY': 2,
        'CUDA_ERROR_NO_DEVICE': 100,
        'CUDA_ERROR_INVALID_CONTEXT': 201,
        'CUDA_ERROR_INVALID_HANDLE': 400,
        'CUDA_ERROR_LAUNCH_FAILED': 719,
        'CUDA_ERROR_SYSTEM_DRIVER_MISMATCH': 803,
        'CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED': 900,
        'CUDA_ERROR_STREAM_CAPTURE_INVALIDATED': 901,
    },
)
CaptureMode = IntEnum('CaptureMode', {'CU_STREAM_CAPTURE_MODE_THREAD_LOCAL': 1})
ContextFlags = IntEnum('ContextFlags', {'CU_CTX_SCHED_BLOCKING_SYNC': 4})
EventFlags = IntEnum('EventFlags', {'CU_EVENT_BLOCKING_SYNC': 1})
StreamFlags = IntEnum('StreamFlags', {'CU_STREAM_NON_BLOCKING': 1})
Attribute = IntEnum(
    'Attribute',
    {
        'CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT': 16,
        'CU_DEVICE_ATTRIBUTE_INTEGRATED': 18,
        'CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR': 75,
        'CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR': 76,
    },
)

OK = CUresult.CUDA_SUCCESS


class FakeCuda:
    """One device.

    Args:
        name: name of the GPU.
        total_bytes: memory of the GPU; allocations and captured graphs count.
        devices: number of GPUs; None for a machine without a driver.
        processors: multiprocessors of each.
        graph_bytes: memory that one captured graph takes.
        stale_graphs: graphs replay what they saw at capture: a fault to be found.
        late: work on the stream runs only when the host waits for it.
        integrated: memory is shared with the host, as a Jetson's is.
    """

    __version__ = '12.9.10'
    CUresult = CUresult
    CUstreamCaptureMode = CaptureMode
    CUctx_flags = ContextFlags
    CUevent_flags = EventFlags
    CUstream_flags = StreamFlags
    CUdevice_attribute = Attribute

    def __init__(
        self,
        name: str = 'Orin',
        total_bytes: int = 1 << 32,
        devices: int | None = 1,
        graph_bytes: int = 0,
        stale_graphs: bool = False,
        late: bool = False,
        integrated: bool = True,
        processors: int = 16,
        capability: tuple[int, int] = (8, 7),
    ) -> None:
        self.name, self.total_bytes, self.devices = name, total_bytes, devices
        self.graph_bytes, self.stale_graphs, self.late = graph_bytes, stale_graphs, late
        self.integrated, self.processors = integrated, processors
        self.capability = capability
        self.driver_version = 12060
        self.context_flags: dict[int, int] = {}
        self.calls: list[str] = []
        self.milliseconds = iter(())
        # By the name of a call: what it gives instead of doing anything.
        self.failing: dict[str, CUresult] = {}
        # What every call gives once the context is broken: CUDA does not recover from some errors.
        self.broken: CUresult | None = None
        self.streams = self.events = 0
        self._context: int | None = None
        self._stream_context: int | None = None
        self._memory: dict[int, tuple[int, np.ndarray]] = {}
        self._pinned: dict[int, np.ndarray] = {}
        self._queue: deque[Callable[[], None]] = deque()
        self._graphs: set[int] = set()
        self._recorded: dict[int, list[Callable[[], None]]] = {}
        self._recording: list[Callable[[], None]] | None = None
        self._broken = False
        self._count = 0

    def __getattribute__(self, name: str):
        function = object.__getattribute__(self, name)
        if name.startswith('cu') and name != 'cuGetErrorString' and self.broken is not None:
            error = self.broken
            return lambda *arguments: (error, None)
        return function

    @property
    def used_bytes(self) -> int:
        graphs = len(self._graphs) * self.graph_bytes
        return sum(size for size, _ in self._memory.values()) + graphs

    @property
    def live(self) -> tuple[int, int]:
        """Counts of allocations, pinned ones included, and of graphs."""
        return len(self._memory) + len(self._pinned), len(self._graphs)

    def put(self, stream: object, work: Callable[[], None]) -> CUresult:
        """Put work on the stream, as TensorRT does."""
        if self._recording is not None:
            self._recording.append(work)
        else:
            self._queue.append(work)
            if not self.late:
                self._catch_up()
        return OK

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

    def cuDriverGetVersion(self):  # noqa: N802
        if self.devices is None:
            raise RuntimeError('Failed to dlopen libcuda.so.1')
        return OK, self.driver_version

    def cuInit(self, flags):  # noqa: N802
        return (self.failing.get('cuInit', OK),)

    def cuDeviceGetCount(self):  # noqa: N802
        return OK, self.devices

    def cuDeviceGet(self, index):  # noqa: N802
        return OK, index

    def cuDeviceGetName(self, length, device):  # noqa: N802
        return OK, self.name.encode().ljust(length, b'\0')

    def cuDeviceTotalMem(self, device):  # noqa: N802
        return OK, self.total_bytes

    def cuDeviceGetAttribute(self, attribute, device):  # noqa: N802
        values = {
            'MULTIPROCESSOR_COUNT': self.processors,
            'INTEGRATED': int(self.integrated),
            'COMPUTE_CAPABILITY_MAJOR': self.capability[0],
            'COMPUTE_CAPABILITY_MINOR': self.capability[1],
        }
        return OK, values[attribute.name.removeprefix('CU_DEVICE_ATTRIBUTE_')]

    def cuDevicePrimaryCtxSetFlags(self, device, flags):  # noqa: N802
        self.context_flags[device] = flags
        return (OK,)

    def cuDevicePrimaryCtxRetain(self, device):  # noqa: N802
        return OK, device

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self._context = context
        return (OK,)

    def cuMemGetInfo(self):  # noqa: N802
        return OK, self.total_bytes - self.used_bytes, self.total_bytes

    def cuGetErrorString(self, error):  # noqa: N802
        return OK, f'fake: {error.name}'.encode()

    def cuMemAlloc(self, size):  # noqa: N802
        if self._recording is not None:
            self._broken = True
            return CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, None
        if self.used_bytes + size > self.total_bytes:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        # Filled, so that nothing relies on fresh memory being zero.
        block = np.full(size + _ALIGNMENT, 0xA5, np.uint8)
        address = -(-block.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        self._memory[address] = (size, block)
        return OK, address

    def cuMemFree(self, address):  # noqa: N802
        if error := self.failing.get('cuMemFree'):
            return (error,)
        if self._memory.pop(address, None) is None:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        return (OK,)

    def cuMemHostAlloc(self, size, flags):  # noqa: N802
        block = np.full(size, 0xA5, np.uint8)
        self._pinned[block.ctypes.data] = block
        return OK, block.ctypes.data

    def cuMemFreeHost(self, address):  # noqa: N802
        if self._pinned.pop(address, None) is None:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        return (OK,)

    def cuMemsetD8Async(self, address, value, size, stream):  # noqa: N802
        return (self.put(stream, lambda: ctypes.memset(address, value, size)),)

    def cuMemcpyHtoDAsync(self, target, source, size, stream):  # noqa: N802
        return self._copy_from_or_to_host(target, source, size, stream)

    def cuMemcpyDtoHAsync(self, target, source, size, stream):  # noqa: N802
        return self._copy_from_or_to_host(target, source, size, stream)

    def cuMemcpyDtoDAsync(self, target, source, size, stream):  # noqa: N802
        return (self.put(stream, lambda: ctypes.memmove(target, source, size)),)

    def _copy_from_or_to_host(self, target, source, size, stream):
        if self._recording is not None:
            # Pageable memory cannot be part of a capture, and pinned memory is used again.
            self._broken = True
            return (CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        return (self.put(stream, lambda: ctypes.memmove(target, source, size)),)

    def cuStreamCreate(self, flags):  # noqa: N802
        self.streams += 1
        self._stream_context = self._context
        return OK, 77

    def cuStreamDestroy(self, stream):  # noqa: N802
        self.streams -= 1
        return (OK,)

    def cuStreamBeginCapture(self, stream, mode):  # noqa: N802
        self.calls.append('capture')
        self._recording, self._broken = [], False
        return (OK,)

    def cuStreamEndCapture(self, stream):  # noqa: N802
        recorded, self._recording = self._recording, None
        if self._broken:
            return CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, None
        self._count += 1
        self._recorded[self._count] = recorded or []
        return OK, self._count

    def cuGraphInstantiate(self, graph, flags):  # noqa: N802
        if self.used_bytes + self.graph_bytes > self.total_bytes:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        self._graphs.add(graph)
        recorded = [] if self.stale_graphs else list(self._recorded[graph])
        return OK, SimpleNamespace(number=graph, recorded=recorded)

    def cuGraphDestroy(self, graph):  # noqa: N802
        del self._recorded[graph]
        return (OK,)

    def cuGraphExecDestroy(self, executable):  # noqa: N802
        self._graphs.discard(executable.number)
        executable.recorded = None
        return (OK,)

    def cuGraphLaunch(self, executable, stream):  # noqa: N802
        if error := self.failing.get('cuGraphLaunch'):
            return (error,)
        self.calls.append(f'launch {executable.number}')
        for work in executable.recorded:
            self.put(stream, work)
        return (OK,)

    def cuEventCreate(self, flags):  # noqa: N802
        assert flags == EventFlags.CU_EVENT_BLOCKING_SYNC, 'a wait for this event polls'
        self.events += 1
        return OK, SimpleNamespace(context=self._context)

    def cuEventRecord(self, event, stream):  # noqa: N802
        if event.context != self._stream_context:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
        return (OK,)

    def cuEventSynchronize(self, event):  # noqa: N802
        if self._recording is not None:
            self._broken = True
            return (CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        self._catch_up()
        return (OK,)

    def cuEventElapsedTime(self, start, end):  # noqa: N802
        if error := self.failing.get('cuEventElapsedTime'):
            return error, None
        return OK, next(self.milliseconds, 1.0)

    def cuEventDestroy(self, event):  # noqa: N802
        self.events -= 1
        return (OK,)
