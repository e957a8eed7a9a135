"""This machine and its software, as results and recordings name them."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

_CPU = Path('/proc/cpuinfo')
# Control groups of this process, and where they are mounted (cgroups(7)).
_GROUPS, _MOUNT = Path('/proc/self/cgroup'), Path('/sys/fs/cgroup')
# Instructions that decide which products a CPU computes fast, and with which last bits: x86, Arm.
_INSTRUCTIONS = (
    *('avx2', 'avx512f', 'avx512_bf16', 'avx512_vnni', 'avx_vnni', 'amx_bf16', 'amx_int8'),
    *('asimddp', 'sve', 'bf16', 'i8mm'),
)

# All packages that compute a part of a chunk.
CHUNK_PACKAGES = (
    *('numpy', 'opencv-python-headless', 'pillow', 'tokenizers', 'sentencepiece'),
    *('torch', 'onnxruntime', 'tensorrt'),
)


def cpu_field(field: str) -> str:
    """Return a field of the first processor as the kernel tells it; empty where there is none."""
    if not _CPU.exists():
        return ''
    lines = (line.partition(':') for line in _CPU.read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == field), '')


def cpu_name() -> str:
    """The maker's name of this CPU; the architecture where there is none."""
    return cpu_field('model name') or platform.processor() or platform.machine()


@cache
def cpu_vendor() -> str:
    """The maker of this CPU as x86 names it, such as `GenuineIntel`; empty elsewhere."""
    return cpu_field('vendor_id')


def cpu_flags() -> set[str]:
    """Instructions of the first processor, as the kernel names them."""
    return set((cpu_field('flags') or cpu_field('Features')).split())


def cpu_instructions() -> str:
    """Return the CPU instructions that products use; a cloud's CPUs share a name."""
    flags = cpu_flags()
    return ' '.join(name for name in _INSTRUCTIONS if name in flags)


def available_cores() -> int:
    """Return the cores that this process may keep busy, at least one.

    Its control groups' time counts, as a container's `--cpus` sets it, in whole cores.
    """
    allowed = len(os.sched_getaffinity(0))
    return max(1, min([allowed, *(int(cores) for cores in _quotas())]))


def _quotas() -> Iterator[float]:
    """Yield the quotas of all control groups that this process is in, in cores."""
    try:
        lines = _GROUPS.read_text(errors='replace').splitlines()
    except OSError:
        return
    for line in lines:
        if line.count(':') < 2:
            continue
        _, controllers, path = line.split(':', 2)
        files: tuple[str, ...] = ('cpu.cfs_quota_us', 'cpu.cfs_period_us')
        mount = _MOUNT / 'cpu'
        if not controllers:
            mount, files = _MOUNT, ('cpu.max',)
        elif 'cpu' not in controllers.split(','):
            continue
        group = mount / path.lstrip('/')
        # A parent's quota holds for its children. In a container the path may be the host's, and
        # the container's own group the mount itself.
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount) and (quota := _quota(folder, files)):
                yield quota


def _quota(folder: Path, files: Sequence[str]) -> float | None:
    """Return the quota of a control group in cores; None without one."""
    try:
        words = ' '.join((folder / name).read_text() for name in files).split()
        quota, period = (int(word) for word in words)
    except (OSError, ValueError):
        # No such file, or `max`.
        return None
    return quota / period if quota > 0 and period > 0 else None


def machine() -> dict[str, Any]:
    """Processor with its instructions, cores, memory, system and load; never the machine's name."""
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    return {
        'cpu': cpu_name(),
        'cpu_instructions': cpu_instructions(),
        'cores': os.cpu_count(),
        'memory_gib': round(memory / 2**30),
        'system': platform.platform(terse=True),
        'load_1min': round(os.getloadavg()[0], 2),
    }


def steady_facts() -> dict[str, Any]:
    """Return `machine` without how busy it is, which alone changes."""
    return {name: fact for name, fact in machine().items() if name != 'load_1min'}


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions, by the imported module's own word first; others are left out."""
    # Loads 40 modules that the executor, which imports this one, needs for nothing else.
    from importlib import metadata

    found = {'python': platform.python_version()}
    for package in packages:
        imported = getattr(sys.modules.get(package), '__version__', None)
        try:
            found[package] = str(imported or metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
    return found
