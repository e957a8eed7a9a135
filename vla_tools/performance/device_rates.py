"""Peak rates of a device: published where its name is in the table, measured here otherwise.

Measured: the best of a few runs of a large matrix product, and of an array copy or read beyond the
caches.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from vla_tools.performance.devices import MATRIX_BYTES, device_of_cuda
from vla_tools.performance.roofline import Rates, published_rates

# --- Power mode, clocks and temperatures of this machine, to be read beside measured times


_SYS = Path('/sys')
# Seconds; nvpmodel answers from a file.
_PATIENCE_S = 10
# Clocks of a device (a GPU, say), in Hz, and of a group of cores, in kHz, by the kernel's names.
_DEVICE_CLOCKS = ('cur_freq', 'min_freq', 'max_freq')
_CORE_CLOCKS = ('scaling_cur_freq', 'scaling_min_freq', 'scaling_max_freq')
_NAMES = ('now_mhz', 'least_mhz', 'most_mhz')


def power_state() -> dict[str, Any]:
    """Return power mode, clocks and temperatures as they are.

    Returns `power_mode`, the answer of `nvpmodel -q`; `clocks`, by device or group of cores:
    `now_mhz` and the bounds that are set, `least_mhz` and `most_mhz` (equal after
    `jetson_clocks`); `celsius` by thermal zone; a part that is not there is left out.
    """
    found = {'power_mode': power_mode(), 'clocks': _clocks(), 'celsius': _temperatures()}
    return {name: value for name, value in found.items() if value}


def power_mode() -> str:
    """Answer of `nvpmodel -q` in one line; empty where there is none."""
    if shutil.which('nvpmodel') is None:
        return ''
    try:
        done = subprocess.run(
            ['nvpmodel', '-q'], capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ''
    return ' '.join(done.stdout.replace('NV Power Mode:', '').split())


def _clocks() -> dict[str, dict[str, int]]:
    places = (
        ('class/devfreq/*', _DEVICE_CLOCKS, 1_000_000),
        ('devices/system/cpu/cpufreq/policy*', _CORE_CLOCKS, 1_000),
    )
    clocks = {}
    for pattern, files, per_mhz in places:
        for folder in sorted(_SYS.glob(pattern)):
            numbers = (_number(folder / file) for file in files)
            known = {
                name: round(number / per_mhz)
                for name, number in zip(_NAMES, numbers, strict=True)
                if number is not None
            }
            if known:
                clocks[folder.name] = known
    return clocks


def _temperatures() -> dict[str, float]:
    """Celsius by zone; the kernel gives thousandths, and an error where a zone is switched off."""
    zones = {}
    for folder in sorted(_SYS.glob('class/thermal/thermal_zone*')):
        number = _number(folder / 'temp')
        with suppress(OSError):
            if number is not None:
                zones[(folder / 'type').read_text().strip()] = number / 1000
    return zones


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


# --------------------------------------------------------------------------------------------------

# On a CPU short enough that some run is not interrupted by other processes.
_SIDE, _REPEATS = 512, 20
_CUDA_SIDE = 8192
# Larger than any processor's last-level cache.
_ARRAY_BYTES = 2**28
_READS = 5


def rates_of(
    name: str | None, total_bytes: int, device: str, precision: str, threads: int | None = None
) -> Rates | None:
    """Return the rates to compare a measurement with, or None where there are none.

    None for a GPU outside the table without PyTorch on it; for a CPU in half precision, since
    libraries emulate it differently and slowly; and in 8 bits, whose text table and activations
    are not in 8 bits though they are counted so.

    Args:
        name: the driver's; None for a CPU.
        device: `cpu`, `cuda` or `cuda:N`, for measuring.
        threads: of a CPU; None: as many as PyTorch uses.
    """
    # A policy's files in 8 bits leave some matrices in others.
    if precision not in MATRIX_BYTES or precision == 'int8':
        return None
    if name is not None:
        known = device_of_cuda(name, total_bytes)
        if known is not None:
            return published_rates(known, precision)
    elif precision != 'float32':
        return None
    if importlib.util.find_spec('torch') is not None:
        import torch

        if name is None or torch.cuda.is_available():
            return torch_rates(device, precision, threads)
    return numpy_rates() if name is None else None


def torch_rates(device: str, precision: str, threads: int | None = None) -> Rates:
    """Measure rates with PyTorch; arguments as of `rates_of`."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return _torch_rates(device, precision)
    finally:
        torch.set_num_threads(before)


def _torch_rates(device: str, precision: str) -> Rates:
    import torch

    dtype = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}
    on_cuda = device.startswith('cuda')
    side = _CUDA_SIDE if on_cuda else _SIDE
    left = torch.randn(side, side, device=device).to(dtype[precision])
    right = torch.randn(side, side, device=device).to(dtype[precision])
    array = torch.ones(_ARRAY_BYTES // 4, device=device)
    target = torch.empty_like(array)

    def timed(work: Callable[[], object]) -> float:
        work()
        if on_cuda:
            torch.cuda.synchronize(device)
        start = perf_counter()
        work()
        if on_cuda:
            torch.cuda.synchronize(device)
        return perf_counter() - start

    how = f'measured here: PyTorch {torch.__version__}'
    if not on_cuda:
        how += f', {torch.get_num_threads()} thread(s)'
    multiply: Callable[[], object] = lambda: left @ right  # noqa: E731
    if not on_cuda:
        # As the fused modules multiply: MKL, which `@` calls, is slow on some processors.
        from vla_runtime.models.blocks.products import one_pass

        operator = one_pass('cpu', dtype[precision])
        if operator is not None:
            products = (multiply, lambda: operator(left, right, None, 'none', [], ''))
            multiply = min(products, key=lambda product: min(timed(product) for _ in range(3)))
    return _best(timed, side, multiply, lambda: array.sum(), lambda: target.copy_(array), how)


def numpy_rates() -> Rates:
    """Measure rates with NumPy in float32, on as many threads as its BLAS uses."""
    random = np.random.default_rng(0)
    left, right = (random.standard_normal((_SIDE, _SIDE), dtype=np.float32) for _ in range(2))
    array = np.ones(_ARRAY_BYTES // 4, dtype=np.float32)
    target = np.empty_like(array)

    def timed(work: Callable[[], object]) -> float:
        start = perf_counter()
        work()
        return perf_counter() - start

    return _best(
        timed,
        _SIDE,
        lambda: left @ right,
        lambda: array.sum(),
        lambda: np.copyto(target, array),
        f'measured here: NumPy {np.__version__}',
    )


def _best(
    timed: Callable[[Callable[[], object]], float],
    side: int,
    multiply: Callable[[], object],
    read: Callable[[], object],
    copy: Callable[[], object],
    how: str,
) -> Rates:
    product = min(timed(multiply) for _ in range(_REPEATS))
    reading = _ARRAY_BYTES / min(timed(read) for _ in range(_READS))
    copying = 2 * _ARRAY_BYTES / min(timed(copy) for _ in range(_READS))
    return Rates(2 * side**3 / product, max(reading, copying), how)
