"""Worlds that `train-demo` can train in, a module each, with the functions of `WorldModule`.

A new one is such a module and a name below. It imports its simulator.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from vla_tabletop.training.recipes.recipe import Recipe
    from vla_tabletop.training.samples import Prompting
    from vla_tabletop.training.world import TrainingSamples, TrainingWorld

WORLD_NAMES = ('tabletop', 'metaworld')
DEMO_WORLD = 'tabletop'


class WorldModule(Protocol):
    """Demonstrations of a world, and the check of a policy in it.

    Attributes:
        EPISODES: default demonstrations to train on.
        DEMONSTRATIONS: default demonstrations written for others.
        CHECK_EPISODES: default episodes a kind of task in a new policy's check.
        PACKAGES: required ones.
        evaluate: bundle, recipe and episodes a kind of task to success figures of the receipt.
    """

    WORLD: TrainingWorld
    EPISODES: int
    DEMONSTRATIONS: int
    CHECK_EPISODES: int
    PACKAGES: tuple[str, ...]
    evaluate: Callable[[Path, Recipe, int], list[dict[str, Any]]]

    def claim(self, folder: Path, seed: int, episodes: int) -> None:
        """Refuse a folder that holds a data set of another plan."""

    def generate(self, folder: Path, seed: int, episodes: int, processes: int) -> None:
        """Write the data set, or what of it is missing."""

    def write_dataset(
        self, folder: Path, seed: int, episodes: int, processes: int, force: bool
    ) -> None:
        """Write demonstrations in LeRobot's format."""

    def samples(
        self,
        folder: Path,
        recipe: Recipe,
        prompting: Prompting | None,
        statistics: dict[str, np.ndarray] | None,
    ) -> TrainingSamples:
        """Read the data set as training batches."""

    def instructions(self) -> Iterable[str]:
        """Return every sentence that training uses."""

    def facts(self, folder: Path, samples: Any) -> dict[str, Any]:
        """Return facts of the data set, for the receipt."""


def find_world(name: str) -> WorldModule:
    """Return a world of `WORLD_NAMES`."""
    module: Any = importlib.import_module(f'{__name__}.{name}')
    found: WorldModule = module
    return found
