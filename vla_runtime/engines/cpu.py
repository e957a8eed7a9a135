"""The CPU: its name, its native number formats, and how many of its threads the networks get."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from vla_runtime.engines.preflight import MOST_THREADS
from vla_runtime.files.quotes import quoted

_INFO = Path('/proc/cpuinfo')
# Flags of CPUs that multiply bfloat16 matrices themselves: x86 (vectors, tiles) and Arm.
_BFLOAT16 = {'avx512_bf16', 'amx_bf16', 'bf16'}
# Likewise 8-bit integers, added up in 32 bits.
_INT8 = {'avx_vnni', 'avx512_vnni', 'amx_int8', 'asimddp', 'i8mm'}
# Names of `mallopt` (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def cpu_name() -> str:
    """The maker's name of this CPU; the architecture where there is none."""
    return _first('model name') or platform.processor() or platform.machine()


def multiplies_bfloat16() -> bool:
    """True where bfloat16 products run in hardware; emulated they are slower than float32."""
    return bool(_BFLOAT16 & _flags())


def check_int8() -> None:
    """Refuse a CPU that does not multiply 8-bit integers itself (ValueError).

    Without such instructions products are added up in 16 bits, where they saturate: other numbers,
    and no faster than float32.
    """
    if not _INT8 & _flags():
        raise ValueError(
            f"precision 'int8': this CPU ({cpu_name()}) has no instructions for 8-bit products "
            '(VNNI; on Arm dotprod): int8 would be slower here, and its numbers wrong; use float32'
        )


def cpu_threads(given: int | None, networks: int = 1) -> int:
    """CPU threads of each network: the one rule, for every backend.

    Args:
        given: that many; 0: all cores but one, because networks on all of them starve a node's
            callbacks; None: as many as OMP_NUM_THREADS says, and as 0 where it is not set.
        networks: that run at once (two in the pipeline `throughput`) and share the cores of 0;
            each has at least one.

    Raises:
        ValueError: more than `MOST_THREADS`.
    """
    said = os.environ.get('OMP_NUM_THREADS', '') if given is None else str(given)
    if said.isdecimal() and said.strip('0'):
        if len(said) > 9 or int(said) > MOST_THREADS:
            name = 'OMP_NUM_THREADS' if given is None else 'threads'
            raise ValueError(f'{name}={quoted(said)}: expected 1 to {MOST_THREADS}')
        return int(said)
    return max(1, (len(os.sched_getaffinity(0)) - 1) // networks)


def keep_freed_memory() -> None:
    """Have the process keep up to 256 MB that it has freed, where it uses the GNU C library.

    Every product allocates its result anew. By default the library returns megabytes to the system
    and takes them back page by page, which is a tenth of an inference with large images.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_TRIM_THRESHOLD, 256 << 20)
    # The most that it accepts; larger allocations are returned as before.
    mallopt(_MMAP_THRESHOLD, 32 << 20)


def _flags() -> set[str]:
    return set((_first('flags') or _first('Features')).split())


def _first(field: str) -> str:
    """Value of a field of the first processor; empty where there is none."""
    if not _INFO.exists():
        return ''
    lines = (line.partition(':') for line in _INFO.read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == field), '')
