"""Release and power mode of a Jetson, for reports."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from vla_tools.performance.power import power_mode

# First line: `# R36 (release), REVISION: 4.3, GCID: …, BOARD: generic, …`
_RELEASE = Path('/etc/nv_tegra_release')
_MODEL = Path('/proc/device-tree/model')
_REFUSALS = (
    'this release is reported to refuse large allocations although memory is free '
    '(NvMapMemAllocInternalTagged in the log): take another one of JetPack 6'
)
_JETPACKS = {'36': '6', '38': '7', '39': '7'}


def describe_jetson() -> dict[str, str]:
    """Return model, Jetson Linux release, JetPack and power mode; empty on any other machine.

    A container lacks the release's file: its kernel, the host's, is given instead.
    """
    described, model, kernel = _describe_release(), _read(_MODEL).strip('\0 \n'), platform.release()
    if not described:
        # Docker hides the device tree from a container without privileges.
        if 'Jetson' not in model and not kernel.endswith('-tegra'):
            return {}
        described['kernel'] = kernel
    if model:
        described['model'] = model
    if mode := power_mode():
        described['power_mode'] = mode
    return described


def _describe_release() -> dict[str, str]:
    text = _read(_RELEASE).partition('\n')[0]
    found = re.search(r'R(\d+).*REVISION:\s*([\d.]+)', text)
    if not found:
        return {'jetson_linux': text.strip()[:80]} if text else {}
    jetpack = {'jetpack': _JETPACKS[found[1]]} if found[1] in _JETPACKS else {}
    linux = f'{found[1]}.{found[2]}'
    known = {'known_problem': _REFUSALS} if linux == '36.4.7' else {}
    return {'jetson_linux': linux, **jetpack, **known}


def _read(path: Path) -> str:
    """Return a file's text; empty where it cannot be read."""
    try:
        return path.read_text(errors='replace')
    except OSError:
        return ''
