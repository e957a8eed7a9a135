"""Instructions of the demo: one a scene, drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vla_tabletop.sim.scene import FIRST_UNSEEN_SEED, sample_scene
from vla_tabletop.sim.tasks import Family, Task, sample_task

_FAMILIES: tuple[Family, ...] = ('colour', 'position')


@dataclass(frozen=True)
class Assignment:
    """A scene and what to do in it."""

    seed: int
    task: Task


def assignments(seed: int) -> Iterator[Assignment]:
    """Scenes and tasks without end; the same for the same seed.

    Args:
        seed: 0 and up.
    """
    rng = np.random.default_rng([seed, 7])
    number = 0
    while True:
        scene_seed = FIRST_UNSEEN_SEED + 1000 * seed + number
        blocks = sample_scene(scene_seed).block_xy_m
        family = _FAMILIES[number % len(_FAMILIES)]
        yield Assignment(scene_seed, sample_task(rng, blocks, family, 'training'))
        number += 1
