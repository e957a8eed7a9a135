"""Releases of JetPack, and the versions that go together in each (docs/howto/jetson.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

RELEASE_FILE = Path('/etc/nv_tegra_release')


@dataclass(frozen=True)
class JetPack:
    """One release, or several with the same versions.

    Attributes:
        l4t: release and revision of Jetson Linux from which on it is this one.
        cuda: version of CUDA, which the driver serves.
        bindings: requirement of `cuda-bindings`.
    """

    name: str
    l4t: tuple[int, int]
    cuda: tuple[int, int]
    tensorrt: str
    python: tuple[int, int]
    ros: str
    bindings: str


# Newest first.
JETPACKS = (
    JetPack('7.2', (39, 0), (13, 2), '10.16.2', (3, 12), 'jazzy', '13.*'),
    JetPack('7.0, 7.1', (38, 0), (13, 0), '10.13', (3, 12), 'jazzy', '13.*'),
    JetPack('6.1, 6.2', (36, 4), (12, 6), '10.3', (3, 10), 'humble', '12.9.*'),
)


def read_l4t(file: Path = RELEASE_FILE) -> tuple[int, int] | None:
    """Return release and revision of Jetson Linux, such as (36, 4); None on other machines."""
    try:
        text = file.read_text(errors='replace')
    except OSError:
        return None
    found = re.match(r'# R(\d+) \(release\), REVISION: (\d+)', text)
    return (int(found[1]), int(found[2])) if found else None


def jetpack_of(l4t: tuple[int, int]) -> JetPack | None:
    """Return the release that Jetson Linux belongs to; None for one older than all known."""
    return next((one for one in JETPACKS if l4t >= one.l4t), None)
