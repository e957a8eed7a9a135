"""The worlds of studies, by name."""

from __future__ import annotations

from vla_tabletop.study.world import World
from vla_tabletop.study.world_words import WorldName


def make_world(name: WorldName) -> World:
    """Return a world; its simulator is imported with it only."""
    if name == 'metaworld':
        from vla_tabletop.metaworld.world import MetaWorld

        return MetaWorld()
    from vla_tabletop.study.tabletop_world import TabletopWorld

    return TabletopWorld()
