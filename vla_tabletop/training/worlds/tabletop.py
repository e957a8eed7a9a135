"""The tabletop, for `train-demo`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_tabletop.sim.tasks import all_instructions
from vla_tabletop.training import dataset
from vla_tabletop.training.dataset import DatasetSettings
from vla_tabletop.training.samples import TABLETOP, Prompting, Samples

if TYPE_CHECKING:
    from vla_tabletop.training.recipes.recipe import Recipe

WORLD = TABLETOP
EPISODES = 3000
DEMONSTRATIONS = 320
CHECK_EPISODES = 100
PACKAGES = ('mujoco',)


def claim(folder: Path, seed: int, episodes: int) -> None:
    """Write the plan where the data will be, or check that the one there is the same."""
    dataset.claim(folder, DatasetSettings(seed=seed, episodes=episodes))


def generate(folder: Path, seed: int, episodes: int, processes: int) -> None:
    """Write what is missing of the data set."""
    dataset.generate(folder, DatasetSettings(seed=seed, episodes=episodes), processes)


def write_dataset(folder: Path, seed: int, episodes: int, processes: int, force: bool) -> None:
    """Write demonstrations in LeRobot's format; a few minutes of one process."""
    from vla_tabletop.training.demonstrations import write_demonstrations

    write_demonstrations(folder, seed, episodes, force)


def samples(
    folder: Path,
    recipe: Recipe,
    prompting: Prompting | None,
    statistics: dict[str, np.ndarray] | None,
) -> Samples:
    """Read the data set as training batches of the recipe's tasks."""
    return Samples(dataset.load(folder), recipe.tasks, prompting, statistics)


def instructions() -> Iterable[str]:
    """Return every sentence that training uses."""
    return all_instructions()


def facts(folder: Path, samples: Samples) -> dict[str, Any]:
    """Return facts of the data set, for the receipt."""
    data = samples.data
    return {
        **json.loads((folder / 'dataset.json').read_text()),
        'frames': len(data.state),
        'expert_success': float(data.success.mean()),
        'advantage_positive': float(data.positive.mean()),
    }


def evaluate(bundle: Path, recipe: Recipe, episodes: int) -> list[dict[str, Any]]:
    """Run a policy on scenes that training never saw, for the receipt."""
    from vla_tabletop.training import demo_bundle

    return demo_bundle.evaluate(bundle, recipe, episodes)
