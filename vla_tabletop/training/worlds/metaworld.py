"""Meta-World, for `train-demo`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_tabletop.metaworld import data
from vla_tabletop.metaworld.data import DataPlan
from vla_tabletop.metaworld.samples import METAWORLD, MetaWorldSamples
from vla_tabletop.metaworld.tasks import TASKS, trained_instructions
from vla_tabletop.training.samples import Prompting
from vla_tools.dataset.writer import check_replaceable

if TYPE_CHECKING:
    from vla_tabletop.training.recipes.recipe import Recipe

WORLD = METAWORLD
EPISODES = DataPlan.episodes_per_task * len(TASKS)
DEMONSTRATIONS = EPISODES
CHECK_EPISODES = 12
PACKAGES = ('mujoco', 'metaworld', 'pyarrow')


def _plan(seed: int, episodes: int) -> DataPlan:
    if episodes % len(TASKS):
        raise ValueError(f'--episodes {episodes}: expected a multiple of {len(TASKS)}, the tasks')
    return DataPlan(seed=seed, episodes_per_task=episodes // len(TASKS))


def claim(folder: Path, seed: int, episodes: int) -> None:
    """Check that the data set there, if there is one, is of the same plan."""
    data.check_plan(folder, _plan(seed, episodes))


def generate(folder: Path, seed: int, episodes: int, processes: int) -> None:
    """Write the data set."""
    data.generate(folder, _plan(seed, episodes), processes)


def write_dataset(folder: Path, seed: int, episodes: int, processes: int, force: bool) -> None:
    """Write demonstrations in LeRobot's format, which is how training reads them."""
    plan = _plan(seed, episodes)
    # A finished one is refused, as the tabletop's is.
    check_replaceable(folder, force)
    data.generate(folder, plan, processes, force=force)


def samples(
    folder: Path,
    recipe: Recipe,
    prompting: Prompting | None,
    statistics: dict[str, np.ndarray] | None,
) -> MetaWorldSamples:
    """Read the data set as training batches."""
    return MetaWorldSamples(data.read(folder), prompting, statistics)


def instructions() -> Iterable[str]:
    """Return every sentence that training uses."""
    return trained_instructions()


def facts(folder: Path, samples: MetaWorldSamples) -> dict[str, Any]:
    """Return facts of the data set, for the receipt."""
    recorded = samples.data
    return {
        **asdict(data.read_plan(folder)),
        'tasks': list(TASKS),
        'frames': len(recorded.state),
        'expert_success': float(recorded.success.mean()),
        'advantage_positive': float(recorded.positive.mean()),
    }


def evaluate(bundle: Path, recipe: Recipe, episodes: int) -> list[dict[str, Any]]:
    """Run a policy on scenes that training never saw, for the receipt."""
    from vla_tabletop.metaworld.check import check_policy

    return check_policy(bundle, recipe, episodes)
