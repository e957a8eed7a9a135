"""Release and power mode of a Jetson, for reports."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from vla_runtime.performance.power import power_mode

# First line: `# R36 (release), REVISION: 4.3, GCID: …, BOARD: generic, …`
_RELEASE = Path('/etc/nv_tegra_release')
_MODEL = Path('/proc/device-tree/model')
_JETPACKS = {'36': '6', '38': '7', '39': '7'}


def describe_jetson() -> dict[str, str]:
    """Return model, Jetson Linux release, JetPack and power mode; empty on any other machine."""
    try:
        text = _RELEASE.read_text(errors='replace').partition('\n')[0]
    except OSError:
        return {}
    found = re.search(r'R(\d+).*REVISION:\s*([\d.]+)', text)
    described = {'jetson_linux': f'{found[1]}.{found[2]}' if found else text.strip()[:80]}
    if found and found[1] in _JETPACKS:
        described['jetpack'] = _JETPACKS[found[1]]
    with suppress(OSError):
        described['model'] = _MODEL.read_text(errors='replace').strip('\0 \n')
    if mode := power_mode():
        described['power_mode'] = mode
    return described
