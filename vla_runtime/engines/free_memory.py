"""Memory that new work may take, on the host and on a device.

On a GPU that shares the host's memory CUDA counts only unused pages, but the kernel would also
give up its file cache, which is full after a bundle was hashed.
"""

from __future__ import annotations

from pathlib import Path

from vla_runtime.engines.cuda_runtime import CudaRuntime

# What TensorRT's engines leave free at load: CUDA's own, the captured graphs and the time tables.
LOAD_RESERVE_BYTES = 256 << 20
_MEMINFO = Path('/proc/meminfo')
_SWAPS = Path('/proc/swaps')


def available_host_bytes() -> int | None:
    """Return the bytes new work may take without swapping; None where the system does not say."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    sizes = {name: value.split() for name, _, value in (line.partition(':') for line in lines)}
    available = sizes.get('MemAvailable')
    return int(available[0]) * 1024 if available else None


def free_swap_bytes() -> int:
    """Unused swap, without zram, which lies in the very memory that is short; 0 if unknown."""
    try:
        areas = [line.split() for line in _SWAPS.read_text().splitlines()[1:]]
    except OSError:
        return 0
    on_disk = [area for area in areas if not area[0].startswith('/dev/zram')]
    return sum(int(size) - int(used) for _, _, size, used, *_ in on_disk) * 1024


def free_device_bytes(runtime: CudaRuntime) -> int:
    """Return the bytes of device memory that new work may take.

    Where the host's memory is shared, the larger of CUDA's and the kernel's number counts.

    Raises:
        CudaError: the device does not answer.
    """
    free = runtime.free_bytes()
    if not runtime.info.integrated:
        return free
    return max(free, available_host_bytes() or 0)
