"""How much memory new work may take, on the host and on a device.

On a GPU with memory of its own CUDA knows. On one that shares the host's memory, as a Jetson's,
CUDA counts only pages that nobody uses, while the kernel would give up its file cache as well: and
a bundle that was just hashed fills that cache.
"""

from __future__ import annotations

from pathlib import Path

from vla_runtime.engines.cuda_runtime import CudaRuntime

_MEMINFO = Path('/proc/meminfo')


def available_host_bytes() -> int | None:
    """Memory that new work may take without swapping; None where the system does not say."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    sizes = {name: value.split() for name, _, value in (line.partition(':') for line in lines)}
    available = sizes.get('MemAvailable')
    return int(available[0]) * 1024 if available else None


def free_device_bytes(runtime: CudaRuntime) -> int:
    """Device memory that new work may take, in bytes.

    Args:
        runtime: of the device. Where it shares the host's memory, the larger of what CUDA and the
            kernel say counts.

    Raises:
        CudaError: the device does not answer.
    """
    free = runtime.free_bytes()
    if not runtime.info.integrated:
        return free
    return max(free, available_host_bytes() or 0)
