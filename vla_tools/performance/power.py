"""Power mode, clocks and temperatures of this machine, to be read beside measured times.

From the kernel's files and `nvpmodel`; what a machine lacks is left out.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

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
