"""Outcomes of the instructions given since the world was reset."""

from __future__ import annotations

from dataclasses import dataclass

from vla_tabletop.sim.instructions import find_task
from vla_tabletop.sim.tasks import Judge, Outcome
from vla_tabletop.sim.world import TabletopState


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
