"""Words that a condition may use for each world; read without a simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vla_tabletop.metaworld.tasks import CAMERAS as METAWORLD_CAMERAS
from vla_tabletop.metaworld.tasks import TASKS
from vla_tabletop.sim.scene import CAMERAS, VARIANTS
from vla_tabletop.sim.tasks import FAMILIES

WorldName = Literal['tabletop', 'metaworld']


@dataclass(frozen=True)
class Words:
    """Words that a condition may use for a world."""

    families: tuple[str, ...]
    cameras: tuple[str, ...]
    variants: tuple[str, ...]


WORDS: Mapping[str, Words] = {
    'tabletop': Words(FAMILIES, CAMERAS, VARIANTS),
    'metaworld': Words(TASKS, METAWORLD_CAMERAS, ('still', 'lighting', 'camera_jitter')),
}
