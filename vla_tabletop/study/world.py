"""Interface of a study's simulated world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vla_runtime.execution.columns import Column
from vla_runtime.execution.limits import Limits
from vla_runtime.types import Observation
from vla_tabletop.sim.tasks import Outcome
from vla_tabletop.study.condition import Condition


@dataclass(frozen=True)
class Asked:
    """The task of an episode; `meant` is its block, 0 in a world without."""

    instruction: str
    family: str
    meant: int


class World(Protocol):
    """A world on a simulated clock. Lengths in the robot's units.

    Attributes:
        columns: commanded ones, in the order of `measured` and `step`.
        limits: of these columns; None: none.
        tick_s: period of the executor.
        step_time_s: of a policy step, a multiple of `tick_s`.
    """

    columns: tuple[Column, ...]
    limits: Limits | None
    tick_s: float
    step_time_s: float

    def begin(self, condition: Condition, seed: int, index: int, sees: bool) -> Asked:
        """Begin a seed's episode, of the condition's family `index`; `sees`: images are used."""

    def measured(self) -> np.ndarray:
        """Return the (columns,) measured positions, which are what it keeps without a command."""

    def observe(self, instruction: str) -> Observation:
        """Return what the robot sees and measures now."""

    def proprioception(self) -> np.ndarray:
        """Return the state of an observation alone."""

    def step(self, command: np.ndarray) -> None:
        """Advance one tick with (columns,) commands."""

    def judge(self) -> Outcome | None:
        """Return the outcome if the episode ended with this tick."""

    def close(self) -> None:
        """Free what renders."""
