"""Outcomes of the instructions given since the world was reset."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_tabletop.sim.scene import COLOURS
from vla_tabletop.sim.tasks import SIDES, Family, Goal, Judge, Outcome, Side, Task, wordings
from vla_tabletop.sim.world import TabletopState

# --- Task of an instruction in a scene, found by comparing it with every wording


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


# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Outcome of one instruction; None for words that no task has."""

    instruction: str
    outcome: Outcome | None


class Episode:
    """Judges one instruction after the other, from the simulator's state."""

    def __init__(self) -> None:
        self._given: str | None = None
        self._judge: Judge | None = None

    @property
    def instruction(self) -> str | None:
        """The one that is being carried out."""
        if self._given is not None:
            return self._given
        return self._judge.task.instruction if self._judge is not None else None

    def give(self, instruction: str) -> None:
        """Begin an instruction; its time limit begins with the next state."""
        self._given = instruction

    def reset(self) -> None:
        """Drop all instructions: the world was reset."""
        self._given = self._judge = None

    def judge(self, state: TabletopState) -> Verdict | None:
        """The verdict, at the state that decides it."""
        if self._given is not None:
            instruction, self._given, self._judge = self._given, None, None
            task = find_task(instruction, state.block_m)
            if task is None:
                return Verdict(instruction, None)
            self._judge = Judge(task, start_s=state.time_s)
        if self._judge is None:
            return None
        outcome = self._judge.judge(state)
        if outcome is None:
            return None
        instruction, self._judge = self._judge.task.instruction, None
        return Verdict(instruction, outcome)
