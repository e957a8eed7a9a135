"""Names of devices, the processor's abilities, and memory that new work may take."""

from __future__ import annotations

import ctypes
import os
import re

from vla_runtime.files.machine import available_cores, cpu_flags, cpu_name
from vla_runtime.files.quotes import quoted

# --- Device names (`cpu`, `cuda:1`, `tensorrt`) and the backends that accept them


_KINDS = {
    'torch': ('cpu', 'cuda'),
    'onnxruntime': ('cpu', 'cuda', 'tensorrt'),
    'tensorrt': ('cuda',),
}
_USE = {
    'torch': 'cpu, cuda or cuda:N',
    'onnxruntime': 'cpu, cuda, cuda:N, tensorrt or tensorrt:N',
    'tensorrt': 'cuda or cuda:N',
}
_DEVICE = re.compile(r'cpu|(cuda|tensorrt)(:([0-9]{1,3}))?')


def default_device(backend: str) -> str:
    """Default device of a backend or `auto`: `cuda` for TensorRT, `cpu` for the rest."""
    return 'cuda' if backend == 'tensorrt' else 'cpu'


def accepts_device(device: str, backend: str) -> bool:
    return device.partition(':')[0] in _KINDS[backend]


def check_device(device: str) -> None:
    """Refuse a name that is no device's with any backend (ValueError)."""
    if not _DEVICE.fullmatch(device):
        raise ValueError(f"device '{device}' is unknown; use {_USE['onnxruntime']}")


def parse_device(device: str, backend: str) -> tuple[str, int]:
    """Split a device's name into kind and index (ValueError: unknown to this backend)."""
    found = _DEVICE.fullmatch(device)
    kind = found[1] or 'cpu' if found else ''
    kinds = _KINDS[backend]
    if not found or kind not in kinds:
        what = 'not supported by' if found else 'unknown to'
        raise ValueError(f"device '{device}' is {what} backend '{backend}'; use {_USE[backend]}")
    return kind, int(found[3] or 0)


# --- The CPU: its native number formats, and how many of its threads the networks get


# Most CPU threads of one network. With thousands that cannot be started PyTorch segfaults.
MOST_THREADS = 256
# Flags of CPUs that multiply bfloat16 matrices themselves: x86 (vectors, tiles) and Arm.
_BFLOAT16 = {'avx512_bf16', 'amx_bf16', 'bf16'}
# Likewise 8-bit integers, added up in 32 bits.
_INT8 = {'avx_vnni', 'avx512_vnni', 'amx_int8', 'asimddp', 'i8mm'}
# Names of `mallopt` (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def multiplies_bfloat16() -> bool:
    """True where bfloat16 products run in hardware; emulated they are slower than float32."""
    return bool(_BFLOAT16 & cpu_flags())


def check_int8() -> None:
    """Refuse a CPU that does not multiply 8-bit integers itself (ValueError).

    Others add up products in 16 bits, where they saturate.
    """
    if not _INT8 & cpu_flags():
        raise ValueError(
            f"precision 'int8': this CPU ({cpu_name()}) has no instructions for 8-bit products "
            '(VNNI; on Arm dotprod): int8 would be slower here, and its numbers wrong; use float32'
        )


def cpu_threads(given: int | None, networks: int = 1) -> int:
    """CPU threads of each network: the one rule, for every backend.

    Args:
        given: number of threads; 0: all cores but one that this process may keep busy, because
            networks on all of them starve a node's callbacks; None: as many as OMP_NUM_THREADS
            says (the first of a list), and as 0 where it is not set.
        networks: number of networks that run at once (two in the pipeline `throughput`) and share
            the cores of 0; each has at least one.

    Raises:
        ValueError: more than `MOST_THREADS`.
    """
    variable = os.environ.get('OMP_NUM_THREADS', '').partition(',')[0].strip()
    text = variable if given is None else str(given)
    if text.isdecimal() and text.strip('0'):
        if len(text) > 9 or int(text) > MOST_THREADS:
            name = 'OMP_NUM_THREADS' if given is None else 'threads'
            raise ValueError(f'{name}={quoted(text)}: expected 1 to {MOST_THREADS}')
        return int(text)
    return max(1, (available_cores() - 1) // networks)


def keep_freed_memory() -> None:
    """Have the process keep up to 256 MB that it has freed, where it uses the GNU C library.

    Every product allocates its result anew; page by page that is a tenth of an inference with large
    images.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_TRIM_THRESHOLD, 256 << 20)
    # The most that it accepts; larger allocations are returned as before.
    mallopt(_MMAP_THRESHOLD, 32 << 20)
