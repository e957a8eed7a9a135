"""Task of an instruction in a scene, found by comparing it with every wording."""

from __future__ import annotations

import numpy as np

from vla_tabletop.sim.scene import COLOURS
from vla_tabletop.sim.tasks import SIDES, Family, Goal, Side, Task, wordings


def find_task(instruction: str, block_m: np.ndarray) -> Task | None:
    """The task of an instruction in any wording of any family; None if there is none.

    `block_m`: (3, 2 or 3) centres now, which decide who is left-most.
    """
    words = ' '.join(instruction.split())
    by_y = np.argsort(np.asarray(block_m)[:, 1])
    ends = {'left': int(by_y[0]), 'right': int(by_y[-1])}
    for side in SIDES:
        if _says(words, 'position', side):
            return Task('position', instruction, Goal(ends[side]))
    for block, colour in enumerate(COLOURS):
        if _says(words, 'colour', colour):
            return Task('colour', instruction, Goal(block))
        for side in SIDES:
            if _says(words, 'push', colour, side):
                return Task('push', instruction, Goal(block, side))
    return None


def _says(instruction: str, family: Family, word: str, side: Side | None = None) -> bool:
    return any(
        instruction in wordings(family, word, side, held_out=held_out) for held_out in (False, True)
    )
